"""Procedural tasks of reasoning_gym as datasets whose rows their own verifier can score."""

import dataclasses
import functools
import json
import logging
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from grpo_ext.errors import DataError
from grpo_ext.registry import did_you_mean

logger = logging.getLogger(__name__)

# A task draws row i from Random(seed + i): evaluation starts beyond every seed that training can reach.
EVAL_SEED_OFFSET = 2**30
EVAL_ATTEMPTS = 20  # blocks of seeds tried before an evaluation split stays short
ROWS_SCORED = 16  # rows whose score is compared before and after the JSON round trip
DEFAULT_SEED = 0  # the tasks' own default is a random seed: another dataset on every rank
Row = dict[str, Any]


def option_problems(task: str, options: dict[str, Any]) -> list[str]:
    """Problems with a task name and its options, each with value, reason and cure."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        return [f"dataset_name='reasoning_gym/{task}': {error}. Run `pip install 'grpo-ext[tasks]'`."]
    if task not in DATASETS:
        return [f"dataset_name='reasoning_gym/{task}': reasoning_gym has no such task. {did_you_mean(task, DATASETS)}"]
    config_class = DATASETS[task][1]
    known = [field.name for field in dataclasses.fields(config_class)]
    problems = [
        f"dataset_kwargs: {task!r} has no option {name!r} (= {value!r}). {did_you_mean(name, known)}"
        for name, value in options.items()
        if name not in known
    ]
    for name, minimum in (("size", 1), ("seed", 0)):
        value = options.get(name, minimum)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            problems.append(f"dataset_kwargs: {name}={value!r} of {task!r} must be an integer >= {minimum}.")
    problems += _type_problems(task, config_class, options)
    return problems or _validation_problems(task, config_class, options)


_PLAIN = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def _type_problems(task: str, config_class: Any, options: dict[str, Any]) -> list[str]:
    """Options that the task declares as plain values and that are given as another type; it would not look."""
    declared = typing.get_type_hints(config_class)
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    found = []
    for name, value in options.items():
        kind = declared.get(name)
        kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
        plain = all(kind in _PLAIN for kind in kinds) and name not in ("size", "seed")
        allowed = [*kinds, int] if float in kinds else kinds
        if plain and type(value) not in (*allowed, type(defaults.get(name))):
            wanted = " or ".join(_PLAIN[kind] for kind in kinds)
            found.append(f"dataset_kwargs: {name}={value!r} of {task!r} must be {wanted}.")
    return found


def _validation_problems(task: str, config_class: Callable[..., Any], options: dict[str, Any]) -> list[str]:
    try:
        config = config_class(**_arguments(task, options))
        getattr(config, "validate", lambda: None)()
    except Exception as error:  # the tasks check with assert; a value of the wrong type fails in any way
        reason = str(error) or repr(error)
        return [f"dataset_kwargs={options!r}: refused by reasoning_gym's {task!r}: {reason}. Change that option."]
    if task == "composite":
        return [problem for spec in config.datasets for problem in option_problems(spec.name, spec.config)]
    return []


def _arguments(task: str, options: dict[str, Any]) -> dict[str, Any]:
    if task != "composite" or not isinstance(options.get("datasets"), list):
        return options
    from reasoning_gym.composite import DatasetSpec

    specs = [DatasetSpec(**{"weight": 1.0, "config": {}, **spec}) for spec in options["datasets"]]
    return {**options, "datasets": specs}


def generate(task: str, options: dict[str, Any], eval_size: float | None = None) -> tuple[list[Row], list[Row]]:
    """Training rows, and evaluation rows from other seeds that share no question with them.

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
        raise DataError(
            f"reasoning_gym/{task}: the {len(train)} training rows hold every question that {EVAL_ATTEMPTS} blocks of "
            f"other seeds gave, so none is left to evaluate on. Make the task larger or size={len(train)} smaller."
        )
    if len(evaluation) < count:
        logger.warning(
            "reasoning_gym/%s: %d evaluation rows, not %d: the task has few questions.", task, len(evaluation), count
        )
    return train, evaluation


def _unseen_rows(task: str, options: dict[str, Any], seen: set[str], count: int) -> list[Row]:
    rows: list[Row] = []
    for block in range(EVAL_ATTEMPTS):
        seed = options["seed"] + EVAL_SEED_OFFSET + block * count
        for row in _rows(task, {**options, "seed": seed, "size": count}):
            if _question(row) not in seen:
                seen.add(_question(row))
                rows.append(row)
            if len(rows) == count:
                return rows
    return rows


def _rows(task: str, options: dict[str, Any]) -> Iterator[Row]:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, **_arguments(task, options))
    for index in range(len(dataset)):
        try:
            entry = dataset[index]
        except Exception as error:  # whatever the generator raises
            raise DataError(
                f"reasoning_gym/{task}: row {index} of seed {options['seed']} cannot be generated: {error!r}. "
                f"Change dataset_kwargs ({options!r})."
            ) from error
        yield _row(task, entry, dataset.score_answer, check=index < ROWS_SCORED)


def _row(task: str, entry: dict[str, Any], score: Callable[..., float], *, check: bool) -> Row:
    entry["metadata"].setdefault("source_dataset", task)
    try:
        text = json.dumps(entry, ensure_ascii=False)
    except (TypeError, ValueError):
        text, check = _dumps_as_text(task, entry), True
    if check:
        _check_round_trip(task, entry, text, score)
    return {
        "prompt": [{"role": "user", "content": entry["question"]}],
        "solution": None if entry["answer"] is None else str(entry["answer"]),
        "reasoning_gym_entry": text,
    }


def _dumps_as_text(task: str, entry: dict[str, Any]) -> str:
    try:
        return json.dumps(entry, ensure_ascii=False, default=str)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"reasoning_gym/{task}: its rows do not fit into JSON ({error}). Choose another task."
        ) from error


def _check_round_trip(task: str, entry: dict[str, Any], text: str, score: Callable[..., float]) -> None:
    answer = _known_answer(entry)
    before = score(answer, entry)
    after: float | str
    try:
        after = _scorer(entry["metadata"]["source_dataset"])(answer, json.loads(text))
    except Exception as error:  # a verifier that trips over the JSON form
        after = repr(error)
    if before != after:
        raise DataError(
            f"reasoning_gym/{task}: its verifier scores the task's own answer {before} before and {after} after the "
            "row went through JSON, so rewards would be wrong. Choose another task."
        )


def _known_answer(entry: dict[str, Any]) -> str | None:
    """The answer, or the example that tasks with many right answers put into their metadata."""
    metadata = entry["metadata"]
    for answer in (entry["answer"], metadata.get("example_answer"), metadata.get("example_correct_answer")):
        if answer is not None:
            return answer
    return json.dumps(metadata["possible_answer"]) if "possible_answer" in metadata else None


@functools.cache
def _scorer(task: str) -> Callable[..., float]:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)


def _question(row: Row) -> str:
    return row["prompt"][0]["content"]
