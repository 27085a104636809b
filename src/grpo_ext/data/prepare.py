"""From a loaded dataset to one that GRPO can train on: columns, system prompt, answers, length."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias, Union

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from grpo_ext.data import files as local_files
from grpo_ext.data.chat_template import prompt_ids
from grpo_ext.data.config import DataConfig
from grpo_ext.data.images import as_read, image_columns, with_opened_images
from grpo_ext.data.messages import without_gaps
from grpo_ext.data.rows import (
    ANSWER_COLUMNS,
    MAX_REPORTED,
    PROMPT_COLUMNS,
    Plan,
    Prompt,
    Row,
    RowError,
    check_columns,
    convert,
    parse_chat,
    unusable,
)
from grpo_ext.errors import ABSENT, DataError, Problem
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.signatures import TRL_ARGUMENTS

logger = logging.getLogger(__name__)

AnyDataset: TypeAlias = Union[Dataset, IterableDataset]  # noqa: UP007  mypy takes no other form
Tokenizer: TypeAlias = PreTrainedTokenizerBase | None
_Place: TypeAlias = Callable[[int], str]
"""Maps the number of a row to its place in an error message."""


@dataclass(frozen=True)
class Split:
    """A dataset as it was loaded, with the source and the files that name its rows in an error."""

    dataset: AnyDataset
    source: str = "dataset"
    files: tuple[Path, ...] = ()

    def place(self, index: int) -> str:
        """File and line of a row, or the source and its number."""
        return local_files.place_of(self.files, index) if self.files else f"{self.source}, row {index} (from 0)"


def prepare(
    split: Split, config: DataConfig, tokenizer: Tokenizer = None, template_kwargs: Mapping[str, object] = {}
) -> AnyDataset:
    """Return a split with prompts and answers by the settings; one that TRL takes as it is stays untouched.

    Raises:
        DataError: columns are missing or collide with TRL's, rows are malformed, or none is left.
    """
    dataset, source = split.dataset, split.source
    names = _column_names(dataset, source)
    plan, problems = _plan(names, config, source)
    renamed = [name for name in TRL_ARGUMENTS if name in (plan.prompt_column, plan.answer_column)]
    collisions = check_columns(name for name in names if name not in renamed)
    problems += [replace(problem, field=f"{source}: {problem.field}") for problem in collisions]
    if problems:
        raise DataError(problems)
    if config.max_samples is not None:
        counted = isinstance(dataset, Dataset)  # `take` before datasets 5.2 fails beyond the number of rows
        dataset = dataset.take(min(config.max_samples, len(dataset)) if counted else config.max_samples)
    dataset, place = _keep_pass_rates(dataset, names, config, split)
    dataset = _convert_all(dataset, plan, source, place, renamed, config.on_bad_row)
    dataset = with_opened_images(dataset, source, split.files[0].parent if split.files else None)
    if config.max_prompt_length is not None and image_columns(dataset):
        reason = "the tokens of images would not be counted"
        cure = "Remove it, and drop long prompts from the data."
        raise DataError([Problem("max_prompt_length", config.max_prompt_length, reason, cure)])
    return _drop_long(as_read(dataset), config, tokenizer, source, template_kwargs)


def _column_names(dataset: AnyDataset, source: str) -> list[str]:
    if isinstance(dataset, Dataset) and len(dataset):
        return list(dataset.column_names)
    first = None if isinstance(dataset, Dataset) else next(iter(dataset), None)
    if first is None:
        raise unusable(source, "no rows", "Check the file and the split.")
    return list(dataset.column_names or first)


def _plan(names: Collection[str], config: DataConfig, source: str) -> tuple[Plan, list[Problem]]:
    """Return which columns are used, and what is wrong with the settings of columns."""
    problems: list[Problem] = []
    prompt = _pick("prompt_column", config.prompt_column, PROMPT_COLUMNS, names, source, problems)
    answer = _pick("answer_column", config.answer_column, ANSWER_COLUMNS, names, source, problems)
    columns = f"one of its columns: {', '.join(names)}."
    if prompt is None and config.prompt_column is None:
        reason = f"{source} has none of the columns {', '.join(PROMPT_COLUMNS)}"
        problems.append(Problem("prompt_column", None, reason, f"Set prompt_column to {columns}"))
    if answer is None and config.answer_format is not None and config.answer_column is None:
        reason = f"no column of {source} holds answers"
        problems.append(Problem("answer_format", config.answer_format, reason, f"Set answer_column to {columns}"))
    required = config.answer_column is not None or config.answer_format is not None
    return Plan(prompt or "", answer, config.answer_format, required, config.system_prompt), problems


def _pick(
    setting: str,
    chosen: str | None,
    usual: tuple[str, ...],
    names: Collection[str],
    source: str,
    problems: list[Problem],
) -> str | None:
    """Return the column that a setting names, else the first usual one; add to `problems` one that is missing."""
    target = usual[0]
    if chosen is None:
        column = next((name for name in usual if name in names), None)
        if column not in (None, target):
            logger.info("%s: column %r is used as %r (set %s to choose another).", source, column, target, setting)
        return column
    if chosen not in names:
        problems.append(Problem(setting, chosen, f"not a column of {source}", did_you_mean(chosen, names)))
        return None
    if chosen != target and target in names:
        logger.warning("%s: %s=%r replaces the column %r.", source, setting, chosen, target)
    return chosen


def _keep_pass_rates(
    dataset: AnyDataset, names: Collection[str], config: DataConfig, split: Split
) -> tuple[AnyDataset, _Place]:
    """Return the rows with a pass rate in the bounds, and the function that gives the place of one of them."""
    low, high, source = config.min_pass_rate, config.max_pass_rate, split.source
    if low is None and high is None:
        return dataset, split.place
    beside = {"max_pass_rate": high}
    if "pass_rate" not in names:
        cure = "Set dataset_name to a file that `grpo-ext sample` has written, or remove both."
        raise DataError([Problem("min_pass_rate", low, f"{source} has no column pass_rate", cure, beside)])
    low, high = 0.0 if low is None else low, 1.0 if high is None else high

    def fits(rate: object, index: int) -> bool:
        if isinstance(rate, str):
            raise DataError([RowError(f"{rate!r} is text", "Write numbers.", "pass_rate").at(split.place(index))])
        return isinstance(rate, int | float) and low <= rate <= high

    if isinstance(dataset, IterableDataset):
        kept = dataset.filter(fits, with_indices=True, input_columns="pass_rate")
        return kept, lambda index: f"{source}, row {index} (from 0) of those kept by their pass_rate"
    rates = dataset["pass_rate"]
    keep = [index for index, rate in enumerate(rates) if fits(rate, index)]
    if not keep:
        reason = f"no row of {source} has a pass_rate from {low:g} to {high:g}"
        raise DataError([Problem("min_pass_rate", low, reason, "Widen min_pass_rate, max_pass_rate.", beside)])
    logger.warning("%s: %d of %d rows have a pass_rate from %g to %g.", source, len(keep), len(rates), low, high)
    return dataset.select(keep), lambda index: split.place(keep[index])


def _convert_all(
    dataset: AnyDataset, plan: Plan, source: str, place: _Place, renamed: list[str], on_bad_row: str
) -> AnyDataset:
    if isinstance(dataset, IterableDataset):
        if on_bad_row == "drop":
            dataset = dataset.filter(partial(_is_sound, plan=plan, place=place), with_indices=True)
        convert_row = partial(_convert_streamed, plan=plan, place=place)
        return dataset.map(convert_row, with_indices=True, remove_columns=renamed)
    sound, parsed = _check_rows(dataset.select_columns(plan.columns), plan, source, place, on_bad_row)
    dataset = dataset if len(sound) == len(dataset) else dataset.select(sound)
    plan = replace(plan, parses_prompt=parsed)
    if not plan.changes_prompt and not plan.changes_answer:
        return dataset
    # The cache knows a function by its name only: after an update it would return the old version's rows.
    return dataset.map(partial(convert, plan=plan), remove_columns=renamed, load_from_cache_file=False)


def _check_rows(dataset: Dataset, plan: Plan, source: str, place: _Place, on_bad_row: str) -> tuple[list[int], bool]:
    """Return the rows that can be used, and whether their prompts are conversations written as JSON text."""
    sound: list[int] = []
    bad: list[Problem] = []
    first_type, parsed = None, False
    for index, row in enumerate(dataset):
        try:
            convert(row, plan)
            prompt = parse_chat(row[plan.prompt_column], plan.prompt_column)
            first_type = first_type or type(prompt)
            if type(prompt) is not first_type:
                raise RowError("text and lists of messages are mixed", "Use one of them.", plan.prompt_column)
            parsed = parsed or prompt is not row[plan.prompt_column]
            sound.append(index)
        except RowError as error:
            if len(bad) < MAX_REPORTED:
                bad.append(error.at(place(index)))
    if bad:
        _report_bad(bad, len(dataset) - len(sound), len(dataset), source, on_bad_row)
    if parsed:
        logger.warning(
            "%s: %r holds conversations as JSON text; they are parsed. Where the model is to read that text, write it "
            "as the content of a message.",
            *(source, plan.prompt_column),
        )
    return sound, parsed


def _report_bad(bad: list[Problem], count: int, rows: int, source: str, on_bad_row: str) -> None:
    """Raise for malformed rows, or log how many are dropped."""
    if on_bad_row == "drop" and count < rows:
        logger.warning("%s: %d of %d rows are malformed: dropped. The first: %s", source, count, rows, bad[0])
        return
    if count > len(bad):
        bad.append(Problem(source, ABSENT, f"{count} of its {rows} rows are malformed", "Correct them all."))
    if on_bad_row == "error" and count < rows:
        bad[-1] = replace(bad[-1], cure=f"{bad[-1].cure} `on_bad_row: drop` trains without malformed rows.")
    raise DataError(bad)


def _is_sound(row: Row, index: int, *, plan: Plan, place: _Place) -> bool:
    """Return whether a streamed row can be used; if not, log where it is."""
    try:
        convert(row, plan)
    except RowError as error:
        logger.warning("%s The row is dropped.", error.at(place(index)))
        return False
    return True


def _convert_streamed(row: Row, index: int, *, plan: Plan, place: _Place) -> Row:
    try:
        converted = convert(row, plan)
    except RowError as error:
        raise DataError([error.at(place(index))]) from None
    return {**converted, "prompt": without_gaps(converted.get("prompt", row.get("prompt")))}


def _drop_long(
    dataset: AnyDataset, config: DataConfig, tokenizer: Tokenizer, source: str, template_kwargs: Mapping[str, object]
) -> AnyDataset:
    limit = config.max_prompt_length
    if limit is None:
        return dataset
    if tokenizer is None:
        logger.warning("%s: max_prompt_length=%d is not applied: no tokenizer was given.", source, limit)
        return dataset

    def length(prompt: Prompt) -> int:
        return len(prompt_ids(prompt, tokenizer, template_kwargs))

    if isinstance(dataset, IterableDataset):
        return dataset.filter(lambda row: length(row["prompt"]) <= limit)
    lengths = [length(prompt) for prompt in dataset["prompt"]]
    keep = [index for index, tokens in enumerate(lengths) if tokens <= limit]
    dropped = len(lengths) - len(keep)
    if not keep:
        reason = (
            f"drops all {dropped} rows of {source}; the shortest prompt has {min(lengths)} tokens with the chat "
            "template"
        )
        raise DataError(
            [Problem("max_prompt_length", limit, reason, f"Set max_prompt_length: {max(lengths)}, or less.")]
        )
    logger.info("%s: %d of %d prompts are longer than %d tokens: dropped.", source, dropped, len(lengths), limit)
    return dataset.select(keep) if dropped else dataset
