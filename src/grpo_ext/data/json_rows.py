"""Rows of json and jsonl files; a line that cannot be read is named by its number."""

import json
from collections.abc import Iterator
from pathlib import Path

from grpo_ext.data.rows import Row, RowError
from grpo_ext.safe_reading import parse_json


def jsonl_rows(file: Path) -> Iterator[tuple[str, Row | RowError]]:
    """Yield the place and the row, or what is wrong with it, of each line that is not empty."""
    with open(file, "rb") as handle:
        for number, line in enumerate(handle, 1):
            if line.strip():
                yield f"{file}, line {number}", _of_line(line)


def _of_line(line: bytes) -> Row | RowError:
    cure = "Each line must hold one JSON object."
    try:
        row = parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return not_utf8(error)
    except json.JSONDecodeError as error:
        text = line.decode(errors="replace").strip()
        return RowError(f"broken JSON {text!r:.60} ({error.msg} at character {error.pos + 1})", cure)
    except ValueError as error:  # too deep, or an integer of thousands of digits
        return RowError(f"{line[:60].decode(errors='replace')!r} cannot be read ({error})", cure)
    return _checked(row, cure)


def not_utf8(error: UnicodeDecodeError) -> RowError:
    """Return what is wrong with a line that cannot be decoded."""
    return RowError(f"not UTF-8 ({error.reason} at byte {error.start})", "Save the file as UTF-8.")


def json_rows(file: Path) -> Iterator[tuple[str, Row | RowError]]:
    """Yield the place and the row, or what is wrong with it, of a list's objects, or of each line under this name."""
    try:
        content = parse_json(file.read_bytes().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" or not file.stat().st_size:  # one object a line under the name .json
            yield from jsonl_rows(file)
        else:
            yield f"{file}, line {error.lineno}", RowError(f"broken JSON ({error.msg})", "Write a list of objects.")
        return
    except UnicodeDecodeError as error:
        yield str(file), not_utf8(error)
        return
    except ValueError as error:
        yield str(file), RowError(f"cannot be read ({error})", "Write a list of objects.")
        return
    for number, row in enumerate(content if isinstance(content, list) else [content]):
        yield f"{file}, row {number} (from 0)", _checked(row, "Write one per row.")


def _checked(row: object, cure: str) -> Row | RowError:
    return row if isinstance(row, dict) else RowError(f"{row!r:.60} is not a JSON object", cure)
