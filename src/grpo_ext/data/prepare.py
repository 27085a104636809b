"""From a loaded dataset to one that GRPO can train on: columns, system prompt, answers, length."""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, Union

from datasets import Dataset, IterableDataset

from grpo_ext.data import files as local_files
from grpo_ext.data.config import DataConfig, value_problems
from grpo_ext.data.rows import (
    ANSWER_COLUMNS,
    MAX_REPORTED,
    PROMPT_COLUMNS,
    Plan,
    RowError,
    check_columns,
    convert,
    parse_chat,
)
from grpo_ext.errors import DataError
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.signatures import TRL_ARGUMENTS

logger = logging.getLogger(__name__)

AnyDataset: TypeAlias = Union[Dataset, IterableDataset]  # noqa: UP007  mypy takes no other form


@dataclass(frozen=True)
class Split:
    """A dataset as it was loaded, and how to name its rows in an error."""

    dataset: AnyDataset
    source: str
    files: tuple[Path, ...] = ()

    def place(self, index: int) -> str:
        """File and line of a row, or the source and its number."""
        return local_files.place_of(self.files, index) if self.files else f"{self.source}, row {index} (from 0)"


def prepare(
    dataset: AnyDataset, config: DataConfig, tokenizer: Any = None, *, source: str = "dataset", **template_kwargs: Any
) -> AnyDataset:
    """`dataset` with its prompts and answers as the settings want them; one that TRL takes as it is stays untouched.

    Raises:
        DataError: columns are missing or collide with TRL's, rows are malformed, or none is left.
    """
    found = value_problems(config)
    if found:
        raise DataError("\n".join(found))
    return prepare_split(Split(dataset, source), config, tokenizer, template_kwargs)


def prepare_split(
    split: Split, config: DataConfig, tokenizer: Any = None, template_kwargs: dict[str, Any] | None = None
) -> AnyDataset:
    """Same as `prepare`, for a split that knows the places of its rows.

    Raises:
        DataError: as `prepare`.
    """
    dataset = split.dataset
    names = _column_names(dataset, split.source)
    found: list[str] = []
    plan = _plan(names, config, split.source, found)
    renamed = [name for name in TRL_ARGUMENTS if name in (plan.prompt_column, plan.answer_column)]
    collisions = check_columns(name for name in names if name not in renamed)
    found += [f"{split.source}: {problem}" for problem in collisions]
    if found:
        raise DataError("\n".join(found))
    if config.max_samples is not None:
        counted = isinstance(dataset, Dataset)  # take before datasets 5.2 wants no more than there are
        dataset = dataset.take(min(config.max_samples, len(dataset)) if counted else config.max_samples)
    dataset, place = _keep_pass_rates(dataset, names, config, split)
    dataset = _convert_all(dataset, plan, replace(split, dataset=dataset), place, renamed, config.on_bad_row)
    return _drop_long(dataset, config, tokenizer, split.source, template_kwargs or {})


def _column_names(dataset: AnyDataset, source: str) -> list[str]:
    if isinstance(dataset, Dataset) and len(dataset):
        return list(dataset.column_names)
    first = None if isinstance(dataset, Dataset) else next(iter(dataset), None)
    if first is None:
        raise DataError(f"{source}: no rows. Check the file and the split.")
    return list(dataset.column_names or first)


def _plan(names: Collection[str], config: DataConfig, source: str, problems: list[str]) -> Plan:
    """Which columns are used; what is wrong with the settings of columns is added to `problems`."""
    prompt = _pick("prompt_column", config.prompt_column, PROMPT_COLUMNS, names, source, problems)
    answer = _pick("answer_column", config.answer_column, ANSWER_COLUMNS, names, source, problems)
    if prompt is None and config.prompt_column is None:
        problems.append(
            f"prompt_column=None: {source} has none of the columns {', '.join(PROMPT_COLUMNS)}. Set prompt_column to "
            f"one of its columns: {', '.join(names)}."
        )
    if answer is None and config.answer_format is not None and config.answer_column is None:
        problems.append(
            f"answer_format={config.answer_format!r}: no column of {source} holds answers. Set answer_column to one "
            f"of its columns: {', '.join(names)}."
        )
    return Plan(
        prompt_column=prompt or "",
        answer_column=answer,
        answer_format=config.answer_format,
        answer_required=config.answer_column is not None or config.answer_format is not None,
        system_prompt=config.system_prompt,
    )


def _pick(
    setting: str,
    chosen: str | None,
    usual: tuple[str, ...],
    names: Collection[str],
    source: str,
    problems: list[str],
) -> str | None:
    """The column that a setting names, else the first usual one."""
    target = usual[0]
    if chosen is None:
        found = next((name for name in usual if name in names), None)
        if found not in (None, target):
            logger.info("%s: column %r is used as %r (set %s to choose another).", source, found, target, setting)
        return found
    if chosen not in names:
        problems.append(f"{setting}={chosen!r} is no column of {source}. {did_you_mean(chosen, names)}")
        return None
    if chosen != target and target in names:
        logger.warning("%s: %s=%r replaces the column %r.", source, setting, chosen, target)
    return chosen


def _keep_pass_rates(
    dataset: AnyDataset, names: Collection[str], config: DataConfig, split: Split
) -> tuple[AnyDataset, Callable[[int], str]]:
    """Return the rows with a pass rate in the bounds, and the function that gives the place of one of them."""
    low, high, source = config.min_pass_rate, config.max_pass_rate, split.source
    if low is None and high is None:
        return dataset, split.place
    if "pass_rate" not in names:
        raise DataError(
            f"{source}: min_pass_rate={low}, max_pass_rate={high}, but no column pass_rate. Name a file as "
            "dataset_name that `grpo-ext sample` has written, or remove both."
        )
    low, high = 0.0 if low is None else low, 1.0 if high is None else high
    if isinstance(dataset, IterableDataset):
        kept = dataset.filter(lambda row: row["pass_rate"] is not None and low <= row["pass_rate"] <= high)
        return kept, lambda index: f"{source}, row {index} (from 0) of those kept by their pass_rate"
    rates = dataset["pass_rate"]
    keep = [index for index, rate in enumerate(rates) if rate is not None and low <= rate <= high]
    if not keep:
        raise DataError(
            f"{source}: no row has a pass_rate from {low:g} to {high:g}. Widen min_pass_rate, max_pass_rate."
        )
    logger.warning("%s: %d of %d rows have a pass_rate from %g to %g.", source, len(keep), len(rates), low, high)
    return dataset.select(keep), lambda index: split.place(keep[index])


def _convert_all(
    dataset: AnyDataset, plan: Plan, split: Split, place: Callable[[int], str], renamed: list[str], on_bad_row: str
) -> AnyDataset:
    if isinstance(dataset, IterableDataset):
        if on_bad_row == "drop":
            dataset = dataset.filter(partial(_is_sound, plan=plan, place=place), with_indices=True)
        convert_row = partial(_convert_streamed, plan=plan, place=place)
        return dataset.map(convert_row, with_indices=True, remove_columns=renamed)
    sound, parsed = _check_rows(dataset.select_columns(plan.columns), plan, split.source, place, on_bad_row)
    dataset, plan = (
        dataset if len(sound) == len(dataset) else dataset.select(sound),
        replace(plan, parses_prompt=parsed),
    )
    if not plan.changes_prompt and not plan.changes_answer:
        return dataset
    # The cache knows a function by its name only: after an update it would return the old version's rows.
    return dataset.map(partial(convert, plan=plan), remove_columns=renamed, load_from_cache_file=False)


def _check_rows(
    dataset: Dataset, plan: Plan, source: str, place: Callable[[int], str], on_bad_row: str
) -> tuple[list[int], bool]:
    """Return the rows that can be used, and whether their prompts are conversations written as JSON text."""
    sound: list[int] = []
    bad: list[str] = []
    first_type, parsed = None, False
    for index, row in enumerate(dataset):
        try:
            convert(row, plan)
            prompt = parse_chat(row[plan.prompt_column], plan.prompt_column)
            first_type = first_type or type(prompt)
            if type(prompt) is not first_type:
                raise RowError(plan.prompt_column, "text and lists of messages are mixed. Use one of them.")
            parsed = parsed or prompt is not row[plan.prompt_column]
            sound.append(index)
        except RowError as error:
            if len(bad) < MAX_REPORTED:
                bad.append(f"{place(index)}, {error}")
    if bad:
        _tell_bad(bad, len(dataset) - len(sound), len(dataset), source, on_bad_row)
    if parsed:
        logger.warning(
            "%s: %r holds conversations as JSON text; they are parsed. Where the model is to read that text, write it "
            "as the content of a message.",
            *(source, plan.prompt_column),
        )
    return sound, parsed


def _tell_bad(bad: list[str], count: int, rows: int, source: str, on_bad_row: str) -> None:
    """Raise for malformed rows, or log how many are dropped."""
    if on_bad_row == "drop" and count < rows:
        logger.warning("%s: %d of %d rows are malformed: dropped. The first: %s", source, count, rows, bad[0])
        return
    if count > len(bad):
        bad.append(f"{source}: {count - len(bad)} more of its {rows} rows are malformed.")
    if on_bad_row == "error" and count < rows:
        bad[-1] += " `on_bad_row: drop` trains without malformed rows."
    raise DataError("\n".join(bad))


def _is_sound(row: dict[str, Any], index: int, *, plan: Plan, place: Callable[[int], str]) -> bool:
    """Whether a streamed row can be used; if not, log where it is."""
    try:
        convert(row, plan)
    except RowError as error:
        logger.warning("%s, %s The row is dropped.", place(index), error)
        return False
    return True


def _convert_streamed(row: dict[str, Any], index: int, *, plan: Plan, place: Callable[[int], str]) -> dict[str, Any]:
    try:
        return convert(row, plan)
    except RowError as error:
        raise DataError(f"{place(index)}, {error}") from None


def _drop_long(
    dataset: AnyDataset, config: DataConfig, tokenizer: Any, source: str, template_kwargs: dict[str, Any]
) -> AnyDataset:
    if config.max_prompt_length is None:
        return dataset
    limit = config.max_prompt_length
    if tokenizer is None:
        logger.warning("%s: max_prompt_length=%d is not applied: no tokenizer was given.", source, limit)
        return dataset
    length = partial(_prompt_length, tokenizer=tokenizer, template_kwargs=template_kwargs)
    if isinstance(dataset, IterableDataset):
        return dataset.filter(lambda row: length(row["prompt"]) <= limit)
    lengths = [length(prompt) for prompt in dataset["prompt"]]
    keep = [index for index, tokens in enumerate(lengths) if tokens <= limit]
    if not keep:
        raise DataError(
            f"{source}: max_prompt_length={limit} drops all {len(lengths)} rows; the shortest prompt has "
            f"{min(lengths)} tokens with the chat template. Set max_prompt_length: {max(lengths)}, or less."
        )
    logger.info("%s: %d of %d prompts are longer than %d tokens: dropped.", source, *_dropped(lengths, keep), limit)
    return dataset if len(keep) == len(lengths) else dataset.select(keep)


def _dropped(lengths: list[int], keep: list[int]) -> tuple[int, int]:
    return len(lengths) - len(keep), len(lengths)


def _prompt_length(prompt: str | list[dict[str, Any]], *, tokenizer: Any, template_kwargs: dict[str, Any]) -> int:
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    # Arrow fills the keys that only some messages have with None, which templates take for set.
    messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, **template_kwargs
    )
    return len(encoded["input_ids"])
