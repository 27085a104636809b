"""The columns of a batch: what rewards need of them, those of some rows, and those that can be sent to a worker."""

import pickle
import re
from collections.abc import Collection, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.protocol import rewards
from grpo_ext.rewards.signatures import asks, function_options, needs
from grpo_ext.rewards.text import content_text

CALLBACKS = ("log_extra", "log_metric")
PLURALS = {"prompts": "prompt", "completions": "completion"}
"""TRL's names of columns, and their names in a row of a file."""
READ_AHEAD = 256
"""Most rows whose references are read before training: one takes milliseconds."""
_COMPLETION = [{"role": "assistant", "content": "0"}]

Columns = Mapping[str, Any]
"""The columns of a batch by name, and TRL's `trainer_state` and callbacks."""


def row_count(columns: Columns) -> int:
    """Return the number of completions of a batch; the reward of TRL's environments needs `environments` only."""
    return len(columns["completions"] if "completions" in columns else columns["environments"])


def opened(text: str) -> str:
    """Return the tag of a layout that a prompt leaves open at its end, with its white space, or ""."""
    return text[tag.start() :] if (tag := re.search(r"<(?:think|answer)>\s*\Z", text)) else ""


def as_begun(spec: RewardSpec, columns: Columns, template: str) -> Columns:
    """Return columns in which completions begin with the tag that was opened before them, for a reward of ours.

    A user's function reads what stock TRL gives it. `template` is what the chat template leaves open.
    """
    prompts = columns.get("prompts", ()) if spec.is_registered else ()
    tags = [opened(prompt) if isinstance(prompt, str) else template for prompt in prompts]
    if not any(tags):
        return columns
    both = zip(columns["completions"], tags, strict=True)
    return {**columns, "completions": [_with_tag(completion, tag) for completion, tag in both]}


def _with_tag(completion: Any, tag: str) -> Any:
    if isinstance(completion, str):
        return completion if completion.lstrip().startswith(tag.strip()) else tag + completion
    *before, last = completion or [{}]
    if last.get("role", "assistant") != "assistant" or {"reasoning_content", "thinking"} & last.keys():
        return completion  # a turn without end, or reasoning that was parsed
    return [*before, {**last, "content": _with_tag(content_text(last.get("content")), tag)}]


def check_clash(spec: RewardSpec, columns: Columns) -> None:
    """Raise if a dataset column would silently become an option that the recipe leaves unset.

    Raises:
        ConfigError: there is one.
    """
    options = function_options(spec.callable) or {}
    clash = sorted(options.keys() & columns.keys() - spec.kwargs.keys())
    if clash:
        name = clash[0]
        reason = f"it has the name of an option of reward {spec.name!r}"
        cure = (
            f"Rename the column, set the option in the recipe (kwargs: {{{name}: {options[name].default}}}), or, if "
            "the function needs the column, take it before the star in its signature."
        )
        raise ConfigError([Problem(f"dataset column {name!r}", ABSENT, reason, cure)])


def absences(
    specs: list[RewardSpec], columns: Collection[str], source: str = "the training data"
) -> Iterator[Problem]:
    """Yield a problem for each reward that cannot score any row of a dataset with these columns."""
    for spec in specs:
        wanted = [] if spec.is_model else needs(spec.callable)
        wanted += [spec.when] if spec.when is not None else []
        column, option = (spec.is_registered and rewards.traits(str(spec.function)).column_or_option) or ("", "")
        wanted += [column] if column and spec.kwargs.get(option) is None else []
        for name in (n for n in wanted if n not in columns and n not in spec.kwargs):
            cure = did_you_mean(name, columns)
            if name == "solution":  # answer_column may rename any column
                others = [column for column in columns if column != "prompt"]
                cure = f"Set answer_column to one of its columns: {', '.join(others)}." if others else "Add answers."
            if name == column:
                cure = f"Set its option {option}, or add the column."
            reason = f"it cannot score any row, since {source} has no column {name!r}"
            yield Problem("reward", spec.name, reason, cure)


def unreadable(specs: list[RewardSpec], dataset: object) -> Iterator[tuple[Problem, bool]]:
    """Yield, for each of our rewards that compares with `solution`, those it cannot read, and whether it is all."""
    from datasets import Dataset

    if not isinstance(dataset, Dataset) or "solution" not in dataset.column_names:
        return
    step = -(-len(dataset) // READ_AHEAD)
    rows = list(range(0, len(dataset), step))
    solutions = list(dataset.select(rows)["solution"])
    for spec in specs:
        if spec.weight == 0 or spec.is_model or not spec.is_registered or needs(spec.callable) != ["solution"]:
            continue
        columns = {"completions": [_COMPLETION] * len(rows), "completion_ids": [[0]] * len(rows)}
        try:
            values = spec.callable(solution=solutions, **columns, **spec.kwargs)
        except Exception:  # TRL's own raise for what they cannot read; that is reported when they score
            continue
        bad = [i for i, value in enumerate(values) if value is None]
        if bad:
            among = f"{len(rows)} solutions" + ("" if step == 1 else f" (one row in {step} was read)")
            reason = (
                f"it cannot read {len(bad)} of {among}: no score for those rows, except by `accuracy` "
                f"for an answer that repeats the text. The first is row {rows[bad[0]]} "
                f"(from 0): {solutions[bad[0]]!r:.80}"
            )
            cure = "Correct them; answer_format and answer_column set how and where answers are given."
            yield Problem("reward", spec.name, reason, cure), len(bad) == len(rows)


def scorable_rows(spec: RewardSpec, columns: Columns) -> list[int]:
    """Return the rows in which the column named by `when` is not empty; all rows without `when`."""
    rows = range(len(columns["completions"]))
    if spec.when is None:
        return list(rows)
    values = columns.get(spec.when)
    return [] if values is None else [i for i in rows if not _is_empty(values[i])]


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value)  # an array must not be compared with ""


def take(columns: Columns, rows: list[int]) -> dict[str, Any]:
    """Return the columns of some rows; the state and the callbacks stay as they are."""
    total = row_count(columns)
    return {
        name: [value[i] for i in rows] if isinstance(value, list) and len(value) == total else value
        for name, value in columns.items()
    }


def readable_columns(spec: RewardSpec, columns: Columns) -> dict[str, Any]:
    """Return the columns that the function may read, without callbacks: a worker has its own."""
    return {name: v for name, v in columns.items() if name not in CALLBACKS and asks(spec.callable, name)}


def with_plain_state(columns: Columns) -> dict[str, Any]:
    """Return columns whose `trainer_state` can be pickled: without other attributes, and with the last log entry."""
    if columns.get("trainer_state") is None:
        return dict(columns)
    state = dict(vars(columns["trainer_state"]))
    if isinstance(state.get("log_history"), list):
        state["log_history"] = state["log_history"][-1:]  # the whole log grows with the run
    plain = {name: value for name, value in state.items() if _can_be_sent(value)}
    return {**columns, "trainer_state": SimpleNamespace(**plain)}


def _can_be_sent(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # pickle calls the value's own methods, which raise what they like
        return False
    return True
