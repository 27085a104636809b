"""Procedural tasks of reasoning_gym as datasets whose rows their own verifier can score."""

import dataclasses
import json
import logging
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any

from grpo_ext.config.spec import Spec
from grpo_ext.data.rows import Row, unusable
from grpo_ext.errors import DataError, Problem
from grpo_ext.objective.options import Count, Within
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.library.verifiers import known_answer, refusal, verifier

logger = logging.getLogger(__name__)

# A task draws row i from Random(seed + i): evaluation starts beyond every seed that training can reach.
EVAL_SEED_OFFSET = 2**30
EVAL_ATTEMPTS = 20  # blocks of seeds tried before an evaluation split stays short
ROWS_SCORED = 16  # rows whose score is compared before and after the JSON round trip
DEFAULT_SEED = 0  # the tasks' own default is a random seed: another dataset on every rank


def task_problems(task: str, options: Mapping[str, Any]) -> list[Problem]:
    """Return what is wrong with a task's name and its options."""
    name = f"reasoning_gym/{task}"
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        return [Problem("dataset_name", name, str(error), "Run `pip install 'grpo-ext[tasks]'`.")]
    if task not in DATASETS:
        return [Problem("dataset_name", name, "reasoning_gym has no such task", did_you_mean(task, DATASETS))]
    config_class = DATASETS[task][1]
    problems = [*_spec(task, config_class).problems("dataset_kwargs", options)]
    return problems or _validation_problems(task, config_class, options) or refusal(task)


_PLAIN = {int, float, bool, str, type(None)}


def _spec(task: str, config_class: type) -> Spec:
    """Options of a task, with the types that it declares but does not check; it checks those that are not plain."""
    defaults = {f.name: None if f.default is dataclasses.MISSING else f.default for f in fields(config_class)}
    hints: dict[str, Any] = typing.get_type_hints(config_class)
    for name, default in defaults.items():
        united = typing.get_origin(hints[name]) in (typing.Union, types.UnionType)
        kinds = typing.get_args(hints[name]) if united else (hints[name],)
        hints[name] = hints[name] | type(default) if _PLAIN.issuperset(kinds) else object
    return Spec({**hints, "size": Count, "seed": Annotated[int, Within(least=0.0)]}, defaults, owner=repr(task))


def _validation_problems(task: str, config_class: Callable[..., Any], options: Mapping[str, Any]) -> list[Problem]:
    try:
        config = config_class(**_arguments(task, options))
        getattr(config, "validate", lambda: None)()
    except Exception as error:  # the tasks check with assert; a value of the wrong type fails in any way
        reason = f"refused by reasoning_gym's {task!r}: {error!s:.300}" if str(error) else f"refused: {error!r}"
        return [Problem("dataset_kwargs", dict(options), reason, "Change that option.")]
    if task == "composite":
        return [problem for spec in config.datasets for problem in task_problems(spec.name, spec.config)]
    return []


def _arguments(task: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    if task != "composite" or not isinstance(options.get("datasets"), list):
        return options
    from reasoning_gym.composite import DatasetSpec

    specs = [DatasetSpec(**{"weight": 1.0, "config": {}, **spec}) for spec in options["datasets"]]
    return {**options, "datasets": specs}


def generate(task: str, options: Mapping[str, Any], eval_size: float | None = None) -> tuple[list[Row], list[Row]]:
    """Return training rows, and evaluation rows from other seeds that share no question with them.

    A row has `prompt`, `solution` (null where the task has no single answer) and `reasoning_gym_entry` (JSON text).
    `eval_size` is a fraction of the training rows, or a number of rows from 1 up; None makes no evaluation rows.

    Raises:
        DataError: a row cannot be generated, or not be scored from JSON, or no question is left for evaluation.
    """
    options = {"seed": DEFAULT_SEED, **options}
    train = list(_rows(task, options))
    if eval_size is None:
        return train, []
    count = int(eval_size) if eval_size >= 1 else max(1, round(eval_size * len(train)))
    evaluation = _unseen_rows(task, options, {_question(row) for row in train}, count)
    if not evaluation:
        reason = (
            f"the {len(train)} training rows hold every question that {EVAL_ATTEMPTS} blocks of other seeds gave, so "
            "none is left to evaluate on"
        )
        raise _unusable(task, reason, f"Make the task larger or size={len(train)} smaller.")
    if len(evaluation) < count:
        logger.warning(
            "reasoning_gym/%s: %d evaluation rows, not %d: the task has few questions.", task, len(evaluation), count
        )
    return train, evaluation


def held_out_seeds(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's options with a seed beyond every one that training can reach."""
    seed = options.get("seed", DEFAULT_SEED)
    return {**options, "seed": seed + EVAL_SEED_OFFSET} if isinstance(seed, int) else dict(options)


def _unusable(task: str, reason: str, cure: str = "Choose another task.") -> DataError:
    return unusable(f"reasoning_gym/{task}", reason, cure)


def _unseen_rows(task: str, options: Mapping[str, Any], seen: set[str], count: int) -> list[Row]:
    rows: list[Row] = []
    for block in range(EVAL_ATTEMPTS):
        seed = held_out_seeds(options)["seed"] + block * count
        for row in _rows(task, {**options, "seed": seed, "size": count}):
            if _question(row) not in seen:
                seen.add(_question(row))
                rows.append(row)
            if len(rows) == count:
                return rows
    return rows


def _rows(task: str, options: Mapping[str, Any]) -> Iterator[Row]:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, **_arguments(task, options))
    for index in range(len(dataset)):
        try:
            entry = dataset[index]
        except Exception as error:  # the generator may raise anything
            reason = f"row {index} of seed {options['seed']} cannot be generated: {error!r}"
            raise _unusable(task, reason, f"Change dataset_kwargs ({options!r}).") from error
        yield _row(task, entry, dataset.score_answer, check=index < ROWS_SCORED)


def _row(task: str, entry: Row, score: Callable[..., float], *, check: bool) -> Row:
    entry["metadata"].setdefault("source_dataset", task)
    try:
        text = json.dumps(entry, ensure_ascii=False)
    except (TypeError, ValueError):
        check = True
        try:
            text = json.dumps(entry, ensure_ascii=False, default=str)
        except (TypeError, ValueError) as error:
            raise _unusable(task, f"its rows do not fit into JSON ({error})") from error
    if check:
        _check_round_trip(task, entry, text, score)
    return {
        "prompt": [{"role": "user", "content": entry["question"]}],
        "solution": None if entry["answer"] is None else str(entry["answer"]),
        "reasoning_gym_entry": text,
    }


def _check_round_trip(task: str, entry: Row, text: str, score: Callable[..., float]) -> None:
    answer = known_answer(entry)
    before = score(answer, entry)
    after: float | str
    try:
        after = verifier(entry["metadata"]["source_dataset"])(answer, json.loads(text))
    except Exception as error:  # a verifier that cannot take the JSON form
        after = repr(error)
    if before != after:
        reason = (
            f"its verifier scores the task's own answer {before} before and {after} after the row went through JSON, "
            "so rewards would be wrong"
        )
        raise _unusable(task, reason)


def _question(row: Row) -> str:
    return row["prompt"][0]["content"]
