"""Datasets that are given in Python, as rows, a frame or a generator: converted to those of `datasets` and checked."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from datasets import Dataset, IterableDataset

from grpo_ext.data.images import as_read, with_opened_images
from grpo_ext.data.rows import ANSWER_COLUMNS, PROMPT_COLUMNS, RowError, check_columns, check_prompt
from grpo_ext.errors import ABSENT, ConfigError, DataError, Problem


@dataclass(frozen=True)
class Data:
    """The datasets of a run, whose rows are prepared.

    Args:
        train: the training data.
        evaluation: None, a dataset, or several by name, as TRL takes them.
        named: all data by the name that messages use, the training data first.
        problems: what is wrong with their rows.
    """

    train: Any
    evaluation: Any
    named: Mapping[str, Any]
    problems: Sequence[Problem] = ()


def python_data(train: Any, evaluation: Any, *, continued: bool) -> Data:
    """Return datasets that are given in Python as TRL takes them, with opened images.

    `continued`: `environment_factory` is given, for which TRL starts a row without a prompt with an empty one.

    Raises:
        ConfigError: as `as_dataset`.
    """
    problems, clashes = list[Problem](), dict[Problem, None]()
    train = _opened(train, "train_dataset", problems)
    evaluation = _opened(evaluation, "eval_dataset", problems)
    several = evaluation if isinstance(evaluation, Mapping) else {"eval_dataset": evaluation}
    named = {"train_dataset": train, **several}
    for name, dataset in named.items():
        columns = getattr(dataset, "column_names", None) or ()
        if not continued or "prompt" in columns:
            problems += prompt_problems(dataset, name, continued=continued)
        if isinstance(dataset, Dataset):
            clashes |= dict.fromkeys(check_columns(columns))
    return Data(train, evaluation, named, [*problems, *clashes])


def _opened(data: Any, name: str, problems: list[Problem]) -> Any:
    """Return a dataset, or several by name, with pictures where its columns of images hold paths or bytes.

    If the images cannot be read they stay as they are, and the problems are added to `problems`.
    """
    if isinstance(data, Mapping):
        return {key: _opened(value, f"{name}[{key!r}]", problems) for key, value in data.items()}
    dataset = as_dataset(data, name)
    try:
        return as_read(with_opened_images(dataset, name))
    except DataError as error:
        problems += error.problems
        return dataset


def as_dataset(data: Any, name: str) -> Any:
    """Return `data` as TRL takes it: None and datasets unchanged, else its rows, all read at once.

    Rows are mappings; a generator, or a function that returns one, is read to its end; a frame is pandas'.

    Raises:
        ConfigError: an entry is not a row, or a column mixes types.
    """
    if data is None or isinstance(data, Dataset | IterableDataset):
        return data
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        return _table(Dataset.from_pandas, name, data, preserve_index=False)
    data = data() if callable(data) else data
    if isinstance(data, str) or not isinstance(data, Iterable):
        cure = "Give a Dataset, a list of rows, a frame or a generator."
        raise ConfigError([Problem(name, ABSENT, f"{data!r:.60} is not a dataset", cure)])
    rows = list(data)
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            error = RowError(f"{row!r:.60} does not map columns to values", "Write {'prompt': ..., 'solution': ...}.")
            raise ConfigError([error.at(f"{name}, row {index} (from 0)")])
    columns = dict.fromkeys(column for row in rows for column in row)  # `from_list` reads those of the first row only
    return _table(Dataset.from_dict, name, {column: [row.get(column) for row in rows] for column in columns})


def _table(make: Callable[..., Dataset], name: str, *args: object, **kwargs: object) -> Dataset:
    try:
        return make(*args, **kwargs)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        cure = "Give each column values of one type, such as all text."
        raise ConfigError([Problem(name, ABSENT, f"the rows cannot form a table ({error})", cure)]) from error


def prompt_problems(dataset: object, name: str, *, continued: bool = False) -> Iterator[Problem]:
    """Yield what is wrong with the prompts of a dataset: no rows, no column, or the first row that cannot be used.

    Only the columns of a stream are checked, if it has any names for them. `continued`: an environment adds to
    each prompt.
    """
    columns = getattr(dataset, "column_names", None)
    if not columns:
        if isinstance(dataset, Dataset) and not len(dataset):
            yield Problem(name, ABSENT, "no rows", "Give some.")
    elif "prompt" not in columns:
        reason = f"no column 'prompt', only {', '.join(map(repr, columns))}"
        renamed = _renamed(columns)
        cure = f"Rename them: {name}.rename_columns({renamed})." if renamed else "Add it, or rename the right one."
        yield Problem(name, ABSENT, reason, cure)
    elif isinstance(dataset, Dataset):
        for index, prompt in enumerate(dataset.select_columns(["prompt"])["prompt"]):
            try:
                check_prompt(prompt, "prompt", continued=continued)
            except RowError as error:
                yield error.at(f"{name}, row {index} (from 0)")
                return


def _renamed(columns: Iterable[str]) -> dict[str, str]:
    """Return new names for the columns from which a recipe would take prompts and answers."""
    names = {}
    for usual in (PROMPT_COLUMNS, ANSWER_COLUMNS):
        other = next((column for column in usual if column in columns), None)
        if other not in (None, usual[0]):
            names[str(other)] = usual[0]
    return names if "prompt" in names.values() else {}
