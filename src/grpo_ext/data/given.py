"""A dataset that is handed over in Python: rows, a frame, a generator; made one of `datasets`, and looked at."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from datasets import Dataset, IterableDataset

from grpo_ext.data.rows import ANSWER_COLUMNS, PROMPT_COLUMNS, RowError, check_prompt
from grpo_ext.errors import ConfigError


def as_dataset(given: Any, name: str) -> Any:
    """`given` as TRL takes it: None and datasets as they are, else its rows, all read at once.

    Rows are mappings; a generator, or a function that returns one, is read to its end; a frame is pandas'.

    Raises:
        ConfigError: something is no row, or a column mixes types.
    """
    if given is None or isinstance(given, Dataset | IterableDataset):
        return given
    if isinstance(given, Mapping):  # an evaluation on several, by name
        return {key: as_dataset(value, f"{name}[{key!r}]") for key, value in given.items()}
    if hasattr(given, "to_dict") and hasattr(given, "columns"):
        return _made(Dataset.from_pandas, name, given, preserve_index=False)
    given = given() if callable(given) else given
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(
            [f"{name}={given!r:.60}: no dataset. Give a Dataset, a list of rows, a frame or a generator."]
        )
    rows = list(given)
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            cure = "Write {'prompt': ..., 'solution': ...}."
            raise ConfigError([f"{name}, row {index} (from 0): {row!r:.60} is no mapping from columns. {cure}"])
    columns = dict.fromkeys(column for row in rows for column in row)  # `from_list` knows the first row's alone
    return _made(Dataset.from_dict, name, {column: [row.get(column) for row in rows] for column in columns})


def _made(make: Any, name: str, *args: Any, **kwargs: Any) -> Dataset:
    try:
        return make(*args, **kwargs)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        cure = "Give each column values of one type, such as all text."
        raise ConfigError([f"{name}: the rows make no table ({error}). {cure}"]) from error


def prompt_problems(dataset: Any, name: str) -> Iterator[str]:
    """A dataset without prompts, or with rows that have none; a stream is told by its columns, if it says them."""
    columns = getattr(dataset, "column_names", None)
    if not columns:
        if isinstance(dataset, Dataset) and not len(dataset):
            yield f"{name} has no rows. Give some."
        return
    if "prompt" not in columns:
        renamed = _renamed(columns)
        cure = (
            f"Rename them: {name}.rename_columns({renamed})." if renamed else "Add it, or rename the one that is it."
        )
        yield f"{name} has no column 'prompt', only {', '.join(map(repr, columns))}. {cure}"
    elif isinstance(dataset, Dataset):
        yield from _row_problems(dataset, name)


def _renamed(columns: Iterable[str]) -> dict[str, str]:
    """What a recipe would take for prompts and answers."""
    found = {}
    for usual in (PROMPT_COLUMNS, ANSWER_COLUMNS):
        other = next((column for column in usual if column in columns), None)
        if other not in (None, usual[0]):
            found[str(other)] = usual[0]
    return found if "prompt" in found.values() else {}


def _row_problems(dataset: Dataset, name: str) -> Iterator[str]:
    """The first row whose prompt cannot be used."""
    for index, prompt in enumerate(dataset.select_columns(["prompt"])["prompt"]):
        try:
            check_prompt(prompt, "prompt")
        except RowError as error:
            yield f"{name}, row {index} (from 0), {error}"
            return
