"""Files of completions: what `log_completions`, `score` and `sample` write, and `score` and training read.

A row has `prompt` and `completion` (text or messages) and the dataset's columns, such as `solution`; behind them what
was made of it: `rewards/<name>` for each reward, `reward` (their weighted total) and `advantage`, None where there is
none. Several rows of one prompt are a group.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from grpo_ext.data.config import DataConfig
from grpo_ext.data.json_rows import Broken, jsonl_rows
from grpo_ext.data.rows import ANSWER_COLUMNS, MAX_REPORTED, PROMPT_COLUMNS, Plan, RowError, extract_answer
from grpo_ext.errors import DataError
from grpo_ext.rewards.columns import CALLBACKS, PLURALS

SUFFIXES = (".jsonl", ".parquet")
_RESERVED = (*CALLBACKS, "trainer_state")


def read_completions(path: str | Path, config: DataConfig | None = None) -> list[dict[str, Any]]:
    """Rows of a jsonl or parquet file, of a folder of such files, or of a run's folder with its `completions/`.

    With the settings of a recipe's data, columns are found and answers are read as in training; an answer in which
    `answer_format` finds nothing is taken for one that was read already.

    Raises:
        DataError: no such file, or rows without prompt or completion; file, line and column are named.
    """
    config = config or DataConfig()
    rows, problems = [], []
    for place, row in (pair for file in _files(Path(path)) for pair in _rows(file)):
        found = [row.at(place)] if isinstance(row, Broken) else []
        if not found:
            rows.append(_as_trained(row, config))
            found = [f"{place}, {problem}" for problem in _row_problems(rows[-1])]
        problems += found
        if len(problems) >= MAX_REPORTED:
            break
    if not rows and not problems:
        problems.append(f"{path}: no rows. Give at least one.")
    if problems:
        raise DataError("\n".join(problems[:MAX_REPORTED]))
    return rows


def check_output(path: str | Path) -> Path:
    """The path of a file that `write_completions` can write.

    Raises:
        DataError: it ends in something else, or its folder is none.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: a file of completions ends in {' or '.join(SUFFIXES)}. Name it so.")
    if not path.parent.is_dir():
        raise DataError(f"{path}: no folder {path.parent}. Make it, or name another.")
    return path


def write_completions(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as jsonl or parquet, as the name says; NaN becomes None.

    Raises:
        DataError: the name ends in something else, or a column of a parquet file has values of several types.
    """
    path = check_output(path)
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = {name: [_plain(row.get(name)) for row in rows] for name in names}
    if path.suffix == ".jsonl":
        lines = (json.dumps(dict(zip(names, values, strict=True))) for values in zip(*table.values(), strict=True))
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return
    columns = {}
    for name, values in table.items():
        try:
            columns[name] = pyarrow.array(values)
        except pyarrow.ArrowException as error:
            raise DataError(f"{path}, column {name!r}: {error}. Write a .jsonl file, or one type.") from None
    parquet.write_table(pyarrow.table(columns), path)


def with_rewards(
    row: Mapping[str, Any], rewards: Mapping[str, float | None], reward: float | None, advantage: float | None = None
) -> dict[str, Any]:
    """A row with what was made of it, in the columns of such a file."""
    made = {f"rewards/{name}": value for name, value in rewards.items()}
    return {**row, **made, "reward": reward, "advantage": advantage}


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        folder = path / "completions" if (path / "completions").is_dir() else path
        found = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES)
        if not found:
            raise DataError(f"{path}: no {' or '.join(SUFFIXES)} file in it. Train with log_completions: true.")
        return found
    if not path.is_file():
        raise DataError(f"{path}: cannot be read (no such file). Name a jsonl or parquet file, or a folder of them.")
    return [path]


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    """(place, row or Broken) of each row of a file."""
    if file.suffix != ".parquet":
        yield from jsonl_rows(file)
        return
    try:
        rows = parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read ({error}). Write it anew.") from None
    for number, row in enumerate(rows):
        yield f"{file}, row {number} (from 0)", {name: _without_gaps(value) for name, value in row.items()}


def _without_gaps(value: Any) -> Any:
    """Messages without the keys that a parquet file fills with None where only some messages have them."""
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        return [{key: part for key, part in message.items() if part is not None} for message in value]
    return value


def _as_trained(row: dict[str, Any], config: DataConfig) -> dict[str, Any]:
    """The row with `prompt` and `solution` as training has them."""
    for setting, usual in ((config.prompt_column, PROMPT_COLUMNS), (config.answer_column, ANSWER_COLUMNS)):
        found = next((name for name in (setting, *usual) if name in row), None)
        if found is not None and found != usual[0]:
            row = {**row, usual[0]: row[found]}
    if "solution" in row:
        row["solution"] = extract_answer(row["solution"], Plan("prompt", "solution"))  # numbers become text
        with suppress(RowError):  # what `log_completions` has written is an answer already
            row["solution"] = extract_answer(row["solution"], Plan("prompt", "solution", config.answer_format))
    return row


def _row_problems(row: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a row: column, reason, cure."""
    for name in PLURALS.values():
        value = row.get(name)
        if value is None:
            yield f"column {name}: missing. Every row needs it."
        elif not (isinstance(value, str) or _is_chat(value)):
            yield f"column {name}: {value!r:.80} is no text. Give a string or a list of messages."
    for name in _RESERVED:
        if name in row:
            yield f"column {name}: the trainer hands a {name} of its own to rewards. Rename the column."


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("content"), str | list | None) for m in value
    )


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value
