"""Rows of json and jsonl files: every value as it is written, or refused with its line and column."""

import json
import math
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

MAX_DEPTH = 100
EXACT_DIGITS = 15  # a float gives back any number of so many digits


class Broken(str):
    """Reason why a line is not a row, and the column at fault where there is one."""

    column: str | None

    def __new__(cls, reason: str, column: str | None = None) -> "Broken":
        """`reason` holds the value and the cure."""
        self = super().__new__(cls, reason)
        self.column = column
        return self

    def at(self, place: str) -> str:
        """The whole message."""
        return f"{place}: {self}" if self.column is None else f"{place}, column {self.column!r}: {self}"


class Written(float):
    """A number of more digits than a float holds, which `str` gives back as they were written."""

    text: str

    def __new__(cls, text: Any) -> "Written":
        """`text` as it stands in the file."""
        self = super().__new__(cls, text)
        self.text = str(text)
        return self

    def __str__(self) -> str:
        return self.text


class _Decoder:
    """JSON in which no value is lost: what Python would pass over or round becomes a `Broken` in its place."""

    def __init__(self) -> None:
        self.found_broken = False
        self._decode = json.JSONDecoder(object_pairs_hook=self._object, parse_float=self._float).decode

    def __call__(self, text: str) -> Any:
        if text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
            raise ValueError(f"lists and objects inside each other more than {MAX_DEPTH} deep")
        self.found_broken = "\\ud" in text or "\\uD" in text  # perhaps half a surrogate pair
        return self._decode(text)

    def _broken(self, reason: str, column: str | None = None) -> Broken:
        self.found_broken = True
        return Broken(reason, column)

    def _object(self, pairs: list[tuple[str, Any]]) -> Any:
        row = dict(pairs)
        if len(row) == len(pairs):
            return row
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        return self._broken(f"the key {repeated!r} stands {keys.count(repeated)} times. Keep one.", repeated)

    def _float(self, text: str) -> Any:
        value = float(text)
        if math.isinf(value):
            return self._broken(f"{text:.60} is larger than any float. Write it as text, in quotes.")
        doubtful = len(text) > EXACT_DIGITS or abs(value) < sys.float_info.min
        return Written(text) if doubtful and Decimal(text) != Decimal(repr(value)) else value


def jsonl_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """(place, row or Broken) of each line that is not empty."""
    decoder = _Decoder()
    with open(file, "rb") as handle:
        for number, line in enumerate(handle, 1):
            if line.strip():
                yield f"{file}, line {number}", _parse(line, decoder)


def _parse(line: bytes, decoder: _Decoder) -> Any:
    cure = "Each line must hold one JSON object."
    try:
        row = decoder(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Broken(f"not UTF-8 ({error.reason} at byte {error.start}). Save the file as UTF-8.")
    except json.JSONDecodeError as error:
        text = line.decode(errors="replace").strip()
        return Broken(f"broken JSON {text!r:.60} ({error.msg} at character {error.pos + 1}). {cure}")
    except ValueError as error:  # too deep, or an integer of thousands of digits
        return Broken(f"{line[:60].decode(errors='replace')!r} cannot be read ({error}). {cure}")
    return _checked(row, decoder, cure)


def json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """(place, row or Broken) of each object of a list, or of each line under the name .json."""
    decoder = _Decoder()
    try:
        content = decoder(file.read_bytes().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" or not file.stat().st_size:  # one object a line under the name .json
            yield from jsonl_rows(file)
        else:
            yield f"{file}, line {error.lineno}", Broken(f"broken JSON ({error.msg}). Write a list of objects.")
        return
    except UnicodeDecodeError as error:
        yield str(file), Broken(f"not UTF-8 ({error.reason} at byte {error.start}). Save the file as UTF-8.")
        return
    except ValueError as error:
        yield str(file), Broken(f"cannot be read ({error}). Write a list of objects.")
        return
    for number, row in enumerate(content if isinstance(content, list) else [content]):
        yield f"{file}, row {number} (from 0)", _checked(row, decoder, "Write one per row.")


def _checked(row: Any, decoder: _Decoder, cure: str) -> Any:
    if isinstance(row, Broken):
        return row
    if not isinstance(row, dict):
        return Broken(f"{row!r:.60} is not a JSON object. {cure}")
    for column, value in row.items() if decoder.found_broken else ():
        reason = _first_broken(column) or _first_broken(value)
        if reason:
            return Broken(reason, column)
    return row


def _first_broken(value: Any) -> str | None:
    if isinstance(value, Broken):
        return str(value)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"{value!r:.60} holds half a surrogate pair. Write the whole character."
    inside = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((reason for part in inside if (reason := _first_broken(part))), None)


def _depth(text: str) -> int:
    """How deep lists and objects are nested, brackets inside strings not counted."""
    depth = deepest = 0
    quoted = escaped = False
    for character in text:
        if quoted:
            quoted = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            quoted = True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest
