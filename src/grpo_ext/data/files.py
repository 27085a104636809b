"""Local dataset files: which of them make a split, and which line of which file is broken."""

import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..registry import did_you_mean
from .rows import MAX_REPORTED, DataError

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


class Broken(str):
    """Reason why a line is not a row."""


def is_path(name: str) -> bool:
    """Whether a dataset name means local files and not the hub."""
    return name.startswith(("./", "../", "/", "~", ".\\")) or Path(name).suffix in BUILDERS or Path(name).exists()


def path_problems(name: str) -> list[str]:
    """Problems with a local path, each with value, reason and cure."""
    path = Path(name).expanduser()
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, siblings)  # a whole folder's names would be too many
        cure = hint if hint.startswith("Did") else "Paths count from the working directory."
        return [f"dataset_name={name!r}: no such file or folder ({path.absolute()}). {cure}"]
    if path.is_file() and path.suffix not in BUILDERS:
        hint = did_you_mean(path.suffix, BUILDERS)
        return [f"dataset_name={name!r}: files ending in {path.suffix!r} cannot be read. {hint}"]
    return []


def is_saved_to_disk(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def split_files(path: Path, split: str) -> list[Path]:
    """Files of one split: `path` itself, or `train.jsonl`, `train-00000.parquet`, ... in it or its `data/`.

    Raises:
        DataError: files of several kinds make up the split.
    """
    if path.is_file():
        return [path]
    name = re.compile(re.escape(split) + r"(\W.*|_\d.*)?")
    found = [
        file
        for folder in (path, path / "data")
        for file in (sorted(folder.iterdir()) if folder.is_dir() else [])
        if file.suffix in BUILDERS and name.fullmatch(file.stem)
    ]
    if len({file.suffix for file in found}) > 1:
        names = ", ".join(file.name for file in found)
        raise DataError(f"{path}: split {split!r} is made up of {names}. Keep one kind, or name one file.")
    return found


def csv_columns(file: Path) -> list[str]:
    """Header of a csv file."""
    with open(file, encoding="utf-8-sig", newline="") as handle:
        return next(csv.reader(handle), [])


def check_files(files: Iterable[Path]) -> None:
    """Read every line of json, jsonl and csv files, before `datasets` fails on one without naming it.

    Raises:
        DataError: broken lines, a column of mixed types (which `datasets` converts silently), or no row at all.
    """
    problems: list[str] = []
    kinds: dict[str, tuple[str, str]] = {}
    count = 0
    for file in files:
        if file.suffix == ".parquet":
            return
        for place, row in _rows(file):
            count += 1
            problems += [f"{place}: {row}"] if isinstance(row, Broken) else _mixed_types(place, row, kinds)
            if len(problems) >= MAX_REPORTED:
                raise DataError("\n".join(problems[:MAX_REPORTED]))
    if problems:
        raise DataError("\n".join(problems))
    if not count:
        raise DataError(f"{', '.join(map(str, files))}: no rows. Write at least one.")


def place_of(files: Iterable[Path], index: int) -> str:
    """File and line of row `index` (from 0) of the files of one split; file and row where there are no lines."""
    files = list(files)
    if any(file.suffix == ".parquet" for file in files):
        return f"{', '.join(map(str, files))}, row {index} (from 0)"
    places = (place for file in files for place, _ in _rows(file))
    return next(place for number, place in enumerate(places) if number == index)


def _mixed_types(place: str, row: dict[str, Any], kinds: dict[str, tuple[str, str]]) -> list[str]:
    problems = []
    for column, value in row.items():
        if value is None:
            continue
        kind = _kind(value)
        known, first = kinds.setdefault(column, (kind, place))
        if kind != known:
            problems.append(
                f"{place}, column {column!r}: {kind} {value!r:.60}, but {known} in {first}. Use one type in a column."
            )
    return problems


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    return "text" if isinstance(value, str) else "a list" if isinstance(value, list) else "an object"


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    """(place, row or Broken) of each row of a file."""
    if file.suffix == ".csv":
        return _csv_rows(file)
    return _jsonl_rows(file) if file.suffix == ".jsonl" else _json_rows(file)


def _jsonl_rows(file: Path) -> Iterator[tuple[str, Any]]:
    with open(file, "rb") as handle:
        for number, line in enumerate(handle, 1):
            if line.strip():
                yield f"{file}, line {number}", _parse(line)


def _parse(line: bytes) -> Any:
    cure = "Each line must hold one JSON object."
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        return Broken(f"not UTF-8 ({error.reason} at byte {error.start}). Save the file as UTF-8.")
    except json.JSONDecodeError as error:
        text = line.decode(errors="replace").strip()
        return Broken(f"broken JSON {text!r:.60} ({error.msg} at character {error.pos + 1}). {cure}")
    return row if isinstance(row, dict) else Broken(f"{row!r:.60} is not a JSON object. {cure}")


def _json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        content = json.loads(file.read_bytes())
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" or not file.stat().st_size:  # one object a line under the name .json
            yield from _jsonl_rows(file)
        else:
            yield f"{file}, line {error.lineno}", Broken(f"broken JSON ({error.msg}). Write a list of objects.")
        return
    except UnicodeDecodeError as error:
        yield str(file), Broken(f"not UTF-8 ({error.reason} at byte {error.start}). Save the file as UTF-8.")
        return
    for number, row in enumerate(content if isinstance(content, list) else [content]):
        place = f"{file}, row {number} (from 0)"
        yield place, row if isinstance(row, dict) else Broken(f"{row!r:.60} is not a JSON object. Write one per row.")


def _csv_rows(file: Path) -> Iterator[tuple[str, Any]]:
    limit = csv.field_size_limit(2**31 - 1)
    line = 0
    try:
        with open(file, encoding="utf-8-sig", newline="") as handle:
            reader = csv.reader(handle, strict=True)
            header = next(reader, [])
            line = reader.line_num
            for record in reader:
                if record:  # an empty line is no row
                    yield f"{file}, line {line + 1}", _record(header, record)
                line = reader.line_num
    except csv.Error as error:
        yield f"{file}, line {line + 1}", Broken(f"broken CSV ({error}). Check the quotes.")
    except UnicodeDecodeError as error:
        place = f"{file}, after line {line}"
        yield place, Broken(f"not UTF-8 ({error.reason} at byte {error.start}). Save the file as UTF-8.")
    finally:
        csv.field_size_limit(limit)


def _record(header: list[str], record: list[str]) -> Any:
    if len(record) != len(header):
        cure = "Put values that hold commas in double quotes."
        return Broken(f"{len(record)} fields {record!r:.60}, but the header has {len(header)}. {cure}")
    return dict(zip(header, record, strict=True))
