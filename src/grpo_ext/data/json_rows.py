"""Rows of json and jsonl files, without loss: a value that would be altered is refused with its line and column."""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

from grpo_ext.bounded import check_depth
from grpo_ext.data.rows import Row, RowError, WrittenFloat

EXACT_DIGITS = 15  # a float reproduces every number of at most so many digits


class _Decoder:
    """A JSON decoder in which no value is lost.

    A number of more digits than a float holds keeps its text. Where Python would overwrite a key or round to infinity,
    a `RowError` takes the place of the value.
    """

    def __init__(self) -> None:
        self.plain = True
        """Whether the last text held no `RowError` and no half of a surrogate pair."""
        self._decode = json.JSONDecoder(object_pairs_hook=self._object, parse_float=self._float).decode

    def __call__(self, text: str) -> object:
        """Return the value of a JSON text."""
        check_depth(text)
        self.plain = "\\ud" not in text and "\\uD" not in text
        return self._decode(text)

    def _object(self, pairs: list[tuple[str, object]]) -> Row | RowError:
        row = dict(pairs)
        if len(row) == len(pairs):
            return row
        self.plain = False
        repeated, count = Counter(key for key, _ in pairs).most_common(1)[0]
        return RowError(f"the key {repeated!r} occurs {count} times", "Keep one.", repeated)

    def _float(self, text: str) -> float | RowError:
        value = float(text)
        doubtful = len(text) > EXACT_DIGITS or abs(value) < sys.float_info.min
        if not doubtful and math.isfinite(value):
            return value
        if math.isinf(value):
            self.plain = False
            return RowError(f"{text:.60} is larger than any float", "Write it as text, in quotes.")
        return value if Decimal(text) == Decimal(repr(value)) else WrittenFloat(text)


def jsonl_rows(file: Path) -> Iterator[tuple[str, Row | RowError]]:
    """Yield the place and the row, or what is wrong with it, of each line that is not empty."""
    decoder = _Decoder()
    with open(file, "rb") as handle:
        for number, line in enumerate(handle, 1):
            if line.strip():
                yield f"{file}, line {number}", _of_line(line, decoder)


def _of_line(line: bytes, decoder: _Decoder) -> Row | RowError:
    cure = "Each line must hold one JSON object."
    try:
        row = decoder(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return not_utf8(error)
    except json.JSONDecodeError as error:
        text = line.decode(errors="replace").strip()
        return RowError(f"broken JSON {text!r:.60} ({error.msg} at character {error.pos + 1})", cure)
    except ValueError as error:  # too deep, or an integer of thousands of digits
        return RowError(f"{line[:60].decode(errors='replace')!r} cannot be read ({error})", cure)
    return row if decoder.plain and isinstance(row, dict) else _checked(row, cure)


def not_utf8(error: UnicodeDecodeError) -> RowError:
    """Return what is wrong with a line that cannot be decoded."""
    return RowError(f"not UTF-8 ({error.reason} at byte {error.start})", "Save the file as UTF-8.")


def json_rows(file: Path) -> Iterator[tuple[str, Row | RowError]]:
    """Yield the place and the row, or what is wrong with it, of a list's objects, or of each line under this name."""
    decoder = _Decoder()
    try:
        content = decoder(file.read_bytes().decode("utf-8-sig"))
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
        place = f"{file}, row {number} (from 0)"
        yield place, row if decoder.plain and isinstance(row, dict) else _checked(row, "Write one per row.")


def _checked(row: object, cure: str) -> Row | RowError:
    """Return a row, or what is wrong with it."""
    if isinstance(row, RowError):
        return row
    if not isinstance(row, dict):
        return RowError(f"{row!r:.60} is not a JSON object", cure)
    for column, value in row.items():
        if found := _first_error(column) or _first_error(value):
            return RowError(found.reason, found.cure, column)
    return row


def _first_error(value: object) -> RowError | None:
    if isinstance(value, RowError):
        return value
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return RowError(f"{value!r:.60} holds half a surrogate pair", "Write the whole character.")
    inside = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, map(_first_error, inside)), None)
