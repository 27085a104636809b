"""Files of completions: written by `log_completions`, `score` and `sample`, read by `score` and training.

A row has `prompt` and `completion` (text or messages) and the dataset's columns, such as `solution`; then the columns
`rewards/<name>` for each reward, `reward` (their weighted total) and `advantage`, None where there is none. Several
rows of one prompt are a group.
"""

import datetime
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

import pyarrow
from pyarrow import parquet

from grpo_ext.data.config import DataConfig
from grpo_ext.data.json_rows import jsonl_rows
from grpo_ext.data.messages import without_none
from grpo_ext.data.rows import (
    ANSWER_COLUMNS,
    MAX_REPORTED,
    PROMPT_COLUMNS,
    Plan,
    Row,
    RowError,
    extract_answer,
    unusable,
)
from grpo_ext.errors import ABSENT, DataError, Problem, without_secrets
from grpo_ext.rewards.columns import CALLBACKS, PLURALS
from grpo_ext.safe_reading import replacing, write_text

SUFFIXES = (".jsonl", ".parquet")
_RESERVED = (*CALLBACKS, "trainer_state")


def read_completions(path: str | Path, config: DataConfig | None = None) -> list[Row]:
    """Rows of a jsonl or parquet file, of a folder of such files, or of a run's folder with its `completions/`.

    With the settings of a recipe's data, columns are found and answers are read as in training; an answer in which
    `answer_format` finds no match is taken for one that was read already.

    Raises:
        DataError: no such file, or rows without prompt or completion; file, line and column are named.
    """
    config = config or DataConfig()
    rows: list[Row] = []
    problems: list[Problem] = []
    for place, row in (pair for file in _files(Path(path)) for pair in _rows(file)):
        if isinstance(row, RowError):
            problems.append(row.at(place))
        else:
            rows.append(_as_trained(row, config))
            problems += [error.at(place) for error in _errors(rows[-1])]
        if len(problems) >= MAX_REPORTED:
            break
    if not rows and not problems:
        problems.append(Problem(str(path), ABSENT, "no rows", "Give at least one."))
    if problems:
        raise DataError(problems[:MAX_REPORTED])
    return rows


def check_output(path: str | Path) -> Path:
    """Return the path of a file that `write_completions` can write.

    Raises:
        DataError: it has another ending, or its folder does not exist.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        cure = f"Give a name that ends in {' or '.join(SUFFIXES)}."
        raise unusable(path, "a file of completions has another ending", cure)
    if not path.parent.is_dir():
        raise unusable(path, f"no folder {path.parent}", "Make it, or name another.")
    return path


def write_completions(path: str | Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows as jsonl or parquet, by the ending of the name; NaN becomes None.

    Raises:
        DataError: the name has another ending, or a column of a parquet file has values of several types.
    """
    path = check_output(path)
    rows = without_secrets(list(rows))
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = {name: [_without_nan(row.get(name)) for row in rows] for name in names}
    if path.suffix == ".jsonl":
        rows_of_values = zip(*table.values(), strict=True)
        lines = (json.dumps(dict(zip(names, values, strict=True)), default=_as_text) for values in rows_of_values)
        write_text(path, "".join(f"{line}\n" for line in lines))
        return
    columns = {}
    for name, values in table.items():
        try:
            columns[name] = pyarrow.array(values)
        except pyarrow.ArrowException as error:
            mixed = RowError(str(error), "Write a .jsonl file, or one type.", name)
            raise DataError([mixed.at(str(path))]) from None
    with replacing(path) as aside:
        parquet.write_table(pyarrow.table(columns), aside)


def check_row(path: Path, row: Mapping[str, object]) -> None:
    """Refuse, before anything is sampled, a row that `write_completions` could not write.

    Raises:
        DataError: a column of it holds a value that the file cannot have.
    """
    for name, value in row.items():
        try:
            pyarrow.array([value]) if path.suffix == ".parquet" else json.dumps(value, default=_as_text)
        except (TypeError, pyarrow.ArrowException):
            reason, other = f"{path.suffix} cannot hold a {type(value).__name__}", "Write a .parquet file, or leave"
            held = RowError(reason, f"{other if path.suffix == '.jsonl' else 'Leave'} the column out.", name)
            raise DataError([held.at(str(path))]) from None


def _as_text(value: object) -> str:
    """Return a date, a time or a decimal number as text.

    Raises:
        TypeError: it is another kind of value.
    """
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta | Decimal):
        return str(value)
    raise TypeError(f"a {type(value).__name__} is no value of JSON")


def _without_nan(value: object) -> object:
    return None if isinstance(value, float) and math.isnan(value) else value


def row_with_rewards(
    row: Mapping[str, object],
    rewards: Mapping[str, float | None],
    reward: float | None,
    advantage: float | None = None,
) -> Row:
    """Return a row with its rewards, total and advantage in the columns of such a file."""
    named = {f"rewards/{name}": value for name, value in rewards.items()}
    return {**row, **named, "reward": reward, "advantage": advantage}


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        folder = path / "completions" if (path / "completions").is_dir() else path
        files = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES)
        if not files:
            raise unusable(path, f"no {' or '.join(SUFFIXES)} file in it", "Train with log_completions: true.")
        return files
    if not path.is_file():
        cure = "Name a jsonl or parquet file, or a folder of them."
        raise unusable(path, "cannot be read (no such file)", cure)
    return [path]


def _rows(file: Path) -> Iterator[tuple[str, Row | RowError]]:
    """Yield the place and the row, or what is wrong with it."""
    if file.suffix != ".parquet":
        yield from jsonl_rows(file)
        return
    try:
        rows = parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise unusable(file, f"cannot be read ({error})", "Write it again.") from None
    for number, row in enumerate(rows):
        yield (
            f"{file}, row {number} (from 0)",
            {name: without_none(value) if isinstance(value, list) else value for name, value in row.items()},
        )


def _as_trained(row: Row, config: DataConfig) -> Row:
    """Return the row with `prompt` and `solution` as training has them."""
    for setting, usual in ((config.prompt_column, PROMPT_COLUMNS), (config.answer_column, ANSWER_COLUMNS)):
        column = next((name for name in (setting, *usual) if name in row), None)
        if column is not None and column != usual[0]:
            row = {**row, usual[0]: row[column]}
    if "solution" in row:
        row["solution"] = extract_answer(row["solution"], Plan("prompt", "solution"))  # numbers become text
        with suppress(RowError):  # `log_completions` has written the answer itself
            row["solution"] = extract_answer(row["solution"], Plan("prompt", "solution", config.answer_format))
    return row


def _errors(row: Row) -> Iterator[RowError]:
    """Yield what is wrong with a row."""
    for name in PLURALS.values():
        value = row.get(name)
        if value is None:
            yield RowError("missing", "Every row needs it.", name)
        elif not (isinstance(value, str) or _is_chat(value)):
            yield RowError(f"{value!r:.80} is not text", "Give a string or a list of messages.", name)
    for name in (name for name in _RESERVED if name in row):
        yield RowError(f"the trainer passes its own {name} to rewards", "Rename the column.", name)


def _is_chat(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("content"), str | list | None) for m in value
    )
