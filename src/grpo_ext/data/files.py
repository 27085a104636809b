"""Local dataset files: the files of a split, and the broken lines in them."""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns
from pyarrow import ArrowException, parquet

from grpo_ext.data.json_rows import json_rows, jsonl_rows, not_utf8
from grpo_ext.data.rows import MAX_REPORTED, Row, RowError, unusable
from grpo_ext.errors import DataError, Problem
from grpo_ext.registry import did_you_mean

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def is_path(name: str) -> bool:
    """Return whether a dataset name means local files and not the hub."""
    return name.startswith(("./", "../", "/", "~", ".\\")) or Path(name).suffix in BUILDERS or Path(name).exists()


def data_path_problems(name: str, field: str = "dataset_name") -> list[Problem]:
    """Return what is wrong with a local path, the value of `field`."""
    path = Path(name).expanduser()
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, siblings)  # a whole folder's names would be too many
        cure = hint if hint.startswith("Did") else "Paths count from the working directory."
        whole = "" if "://" in name else f" ({path.absolute()})"  # an address may hold a password
        return [Problem(field, name, f"no such file or folder{whole}", cure)]
    if path.is_file() and path.suffix not in BUILDERS:
        reason = f"files ending in {path.suffix!r} cannot be read"
        return [Problem(field, name, reason, did_you_mean(path.suffix, BUILDERS))]
    return []


def is_saved_to_disk(path: Path) -> bool:
    """Return whether a folder was written by `save_to_disk`."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def split_files(path: Path, split: str) -> list[Path]:
    """Files of one split: `path` itself, or `train.jsonl`, `train-00000.parquet`, ... in it or its `data/`.

    Raises:
        DataError: files of several kinds make up the split.
    """
    if path.is_file():
        return [path]
    name = re.compile(re.escape(split) + r"(\W.*|_\d.*)?")
    folders = [folder for folder in (path, path / "data") if folder.is_dir()]
    files = [file for folder in folders for file in sorted(folder.iterdir()) if file.suffix in BUILDERS]
    of_split = [file for file in files if name.fullmatch(file.stem)]
    if len({file.suffix for file in of_split}) > 1:
        reason = f"split {split!r} is made up of {', '.join(file.name for file in of_split)}"
        raise unusable(path, reason, "Keep one kind, or name one file.")
    return of_split


def folder_splits(path: Path) -> dict[str, list[Path]]:
    """Files of each split by the rules of `datasets`; empty if a README defines the splits, or kinds are mixed."""
    readme = path / "README.md"
    if readme.exists() and re.search(r"^(configs|dataset_info):", readme.read_text(errors="replace"), re.MULTILINE):
        return {}
    root = path.absolute().as_posix()
    try:
        resolved = DataFilesDict.from_patterns(get_data_patterns(root), base_path=root)
    except (EmptyDatasetError, FileNotFoundError):
        return {}
    splits = {str(split): [path / Path(file).relative_to(root) for file in resolved[split]] for split in resolved}
    splits = {split: [file for file in files if file != readme] for split, files in splits.items()}
    kinds = {file.suffix for files in splits.values() for file in files}
    return splits if len(kinds) == 1 and kinds <= set(BUILDERS) else {}


def csv_columns(file: Path) -> list[str]:
    """Header of a csv file.

    Raises:
        DataError: the file is empty or not text, or its header names a column twice.
    """
    try:
        with open(file, encoding="utf-8-sig", newline="") as handle:
            header = next(csv.reader(handle), [])
    except UnicodeDecodeError:
        number, error = _first_line_not_utf8(file)
        raise DataError([error.at(f"{file}, line {number}")]) from None
    if not header:
        raise unusable(file, "no rows", "Write a header and at least one.")
    for name in header:
        if (count := header.count(name)) > 1:
            error = RowError(f"{count} columns of that name", "Rename or remove one.", name)
            raise DataError([error.at(f"{file}, line 1")])
    return header


def no_rows(files: Iterable[Path]) -> DataError:
    """Return the error for files without a row."""
    return unusable(", ".join(map(str, files)), "no rows", "Write at least one.")


def filled_parquet(files: list[Path]) -> list[Path]:
    """Return the parquet files that have rows; `datasets` fails on the others.

    Raises:
        DataError: all are empty.
    """
    filled = [file for file in files if _parquet_rows(file) != 0]
    if not filled:
        raise no_rows(files)
    return filled


def _parquet_rows(file: Path) -> int | None:
    """Return None for a broken file, which `datasets` reports."""
    try:
        return parquet.read_metadata(file).num_rows
    except (ArrowException, OSError):
        return None


def checked_rows(files: Sequence[Path], limit: int = MAX_REPORTED) -> Iterator[tuple[str, Row]]:
    """Yield the place and the row of each row of json, jsonl and csv files.

    Raises:
        DataError: broken lines (the first `limit`), a column of mixed types, or no row at all.
    """
    problems: list[Problem] = []
    kinds: dict[str, tuple[str, str]] = {}
    empty = True
    for place, row in _rows_of(files):
        empty = False
        row_problems = [row.at(place)] if isinstance(row, RowError) else _mixed_types(place, row, kinds)
        problems += row_problems
        if len(problems) >= limit:
            raise DataError(problems[:limit])
        if not row_problems and not isinstance(row, RowError):
            yield place, row
    if problems:
        raise DataError(problems)
    if empty:
        raise no_rows(files)


def place_of(files: Sequence[Path], index: int) -> str:
    """File and line of row `index` (from 0) of the files of one split; of parquet files the file and row."""
    for file in files if files[0].suffix == ".parquet" else ():
        count = _parquet_rows(file) or 0
        if index < count:
            return f"{file}, row {index} (from 0)"
        index -= count
    return next(place for number, (place, _) in enumerate(_rows_of(files)) if number == index)


def _mixed_types(place: str, row: Row, kinds: dict[str, tuple[str, str]]) -> list[Problem]:
    """Return a problem for each value whose type differs from the first of its column, kept in `kinds`."""
    problems = []
    for column, value in row.items():
        if value is None:
            continue
        kind = _kind(value)
        first_kind, first = kinds.setdefault(column, (kind, place))
        if kind != first_kind:
            error = RowError(f"{kind} {value!r:.60}, but {first_kind} in {first}", "Use one type in a column.", column)
            problems.append(error.at(place))
    return problems


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    return "text" if isinstance(value, str) else "a list" if isinstance(value, list) else "an object"


def _rows_of(files: Iterable[Path]) -> Iterator[tuple[str, Row | RowError]]:
    readers = {".csv": _csv_rows, ".jsonl": jsonl_rows, ".json": json_rows}
    for file in files:
        yield from readers[file.suffix](file)


def _csv_rows(file: Path) -> Iterator[tuple[str, Row | RowError]]:
    limit = csv.field_size_limit(2**31 - 1)
    line = 0
    try:
        with open(file, encoding="utf-8-sig", newline="") as handle:
            reader = csv.reader(handle, strict=True)
            header = next(reader, [])
            line = reader.line_num
            for record in reader:
                if record:  # an empty line is not a row
                    yield f"{file}, line {line + 1}", _record(header, record)
                line = reader.line_num
    except csv.Error as error:
        yield f"{file}, line {line + 1}", RowError(f"broken CSV ({error})", "Check the quotes.")
    except UnicodeDecodeError:
        number, undecodable = _first_line_not_utf8(file)
        yield f"{file}, line {number}", undecodable
    finally:
        csv.field_size_limit(limit)


def _record(header: list[str], record: list[str]) -> Row | RowError:
    if len(record) != len(header):
        reason = f"{len(record)} fields {record!r:.60}, but the header has {len(header)}"
        return RowError(reason, "Put values that hold commas in double quotes.")
    return dict(zip(header, record, strict=True))


def _first_line_not_utf8(file: Path) -> tuple[int, RowError]:
    """Return the number of that line and what is wrong; the text layer decodes blocks and does not know the line."""
    with open(file, "rb") as handle:
        for number, line in enumerate(handle, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return number, not_utf8(error)
    raise AssertionError(f"{file} is UTF-8")
