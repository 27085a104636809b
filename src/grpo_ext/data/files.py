"""Local dataset files: which of them make a split, and which line of which file is broken."""

import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns
from pyarrow import ArrowException, parquet

from grpo_ext.data.json_rows import Broken, json_rows, jsonl_rows
from grpo_ext.data.rows import MAX_REPORTED
from grpo_ext.errors import DataError
from grpo_ext.registry import did_you_mean

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


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


def folder_splits(path: Path) -> dict[str, list[Path]]:
    """Files of each split by the rules of `datasets`; nothing where a README has its own, or other kinds lie there."""
    readme = path / "README.md"
    if readme.exists() and re.search(r"^(configs|dataset_info):", readme.read_text(errors="replace"), re.MULTILINE):
        return {}
    try:
        patterns = get_data_patterns(path.absolute().as_posix())
        resolved = DataFilesDict.from_patterns(patterns, base_path=path.absolute().as_posix())
    except (EmptyDatasetError, FileNotFoundError):
        return {}
    splits = {
        str(split): [path / Path(file).relative_to(path.absolute()) for file in resolved[split]] for split in resolved
    }
    kinds = {file.suffix for files in splits.values() for file in files if file != readme}
    if len(kinds) != 1 or not kinds <= set(BUILDERS):
        return {}
    return {split: [file for file in files if file != readme] for split, files in splits.items()}


def csv_columns(file: Path) -> list[str]:
    """Header of a csv file.

    Raises:
        DataError: there is none, it is no text, or it names a column twice.
    """
    try:
        with open(file, encoding="utf-8-sig", newline="") as handle:
            header = next(csv.reader(handle), [])
    except UnicodeDecodeError:
        number, reason = _first_line_not_utf8(file)
        raise DataError(f"{file}, line {number}: {reason}") from None
    if not header:
        raise DataError(f"{file}: no rows. Write a header and at least one.")
    for name in header:
        if header.count(name) > 1:
            reason = f"{header.count(name)} columns of that name. Rename or remove one."
            raise DataError(f"{file}, line 1, column {name!r}: {reason}")
    return header


def filled_parquet(files: list[Path]) -> list[Path]:
    """The parquet files that have rows: `datasets` fails on the others.

    Raises:
        DataError: none has.
    """
    filled = [file for file in files if _parquet_rows(file) != 0]
    if not filled:
        raise DataError(f"{', '.join(map(str, files))}: no rows. Write at least one.")
    return filled


def _parquet_rows(file: Path) -> int | None:
    """None where the file is broken, which `datasets` tells."""
    try:
        return parquet.read_metadata(file).num_rows
    except (ArrowException, OSError):
        return None


def check_files(files: Iterable[Path]) -> None:
    """Read every line of csv files, before `datasets` fails on one without naming it.

    Raises:
        DataError: broken lines, or no row at all.
    """
    for _ in checked_rows(files):
        pass


def checked_rows(files: Iterable[Path], limit: int = MAX_REPORTED) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of each row of json, jsonl and csv files.

    Raises:
        DataError: broken lines (the first `limit`), a column of mixed types, or no row at all.
    """
    files = list(files)
    problems: list[str] = []
    kinds: dict[str, tuple[str, str]] = {}
    count = 0
    for place, row in (pair for file in files for pair in _rows(file)):
        count += 1
        found = [row.at(place)] if isinstance(row, Broken) else _mixed_types(place, row, kinds)
        problems += found
        if len(problems) >= limit:
            raise DataError("\n".join(problems[:limit]))
        if not found:
            yield place, row
    if problems:
        raise DataError("\n".join(problems))
    if not count:
        raise DataError(f"{', '.join(map(str, files))}: no rows. Write at least one.")


def place_of(files: Iterable[Path], index: int) -> str:
    """File and line of row `index` (from 0) of the files of one split; file and row where there are no lines."""
    files = list(files)
    for file in files if files[0].suffix == ".parquet" else ():
        count = _parquet_rows(file) or 0
        if index < count:
            return f"{file}, row {index} (from 0)"
        index -= count
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
    return jsonl_rows(file) if file.suffix == ".jsonl" else json_rows(file)


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
    except UnicodeDecodeError:
        number, reason = _first_line_not_utf8(file)
        yield f"{file}, line {number}", Broken(reason)
    finally:
        csv.field_size_limit(limit)


def _first_line_not_utf8(file: Path) -> tuple[int, str]:
    """Number of that line and the reason; the text layer decodes whole blocks and cannot tell."""
    with open(file, "rb") as handle:
        for number, line in enumerate(handle, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return number, f"not UTF-8 ({error.reason} at byte {error.start}). Save the file as UTF-8."
    raise AssertionError(f"{file} is UTF-8")


def _record(header: list[str], record: list[str]) -> Any:
    if len(record) != len(header):
        cure = "Put values that hold commas in double quotes."
        return Broken(f"{len(record)} fields {record!r:.60}, but the header has {len(header)}. {cure}")
    return dict(zip(header, record, strict=True))
