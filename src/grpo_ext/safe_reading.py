"""Read and write where others may have written: regular files, bounded in size and depth; no link is written to."""

import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any, TextIO

MAX_DEPTH = 100
"""Most lists and objects inside each other."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
"""Colours and other control characters, without tabs and ends of lines."""
LARGEST = 2**26
"""Most bytes of a file of settings or records."""
_VALUE = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[^][{},"]++', re.DOTALL)
"""A string of JSON, to the end of the text if it has no end, or what is neither bracket nor comma."""
_BRACKETS = str.maketrans("{}", "[]", ",")


def finite(value: object) -> float | None:
    """Return a finite number as a float; None for any other value, also for a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def read_text(path: Path, largest: int = LARGEST) -> str:
    """Return the text of a regular file.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more than `largest` bytes.
        UnicodeDecodeError: it is not UTF-8.
    """
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):  # a pipe would block, a device has no end
        raise OSError("not a regular file")
    if facts.st_size > largest:
        raise OSError(f"{facts.st_size:,} bytes, more than the {largest:,} that are read")
    return path.read_text(encoding="utf-8")


def read_end(path: Path, most: int) -> str:
    """Return the last bytes of a regular file as printable text with lines; "" without such a file."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                return ""
            file.seek(max(0, facts.st_size - most))
            return _CONTROL.sub("", file.read(most).decode(errors="replace")).strip()
    except OSError:
        return ""


def parse_json(text: str, most: int | None = None) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, or nested more than `MAX_DEPTH` deep, or has more than `most` values.
    """
    check_depth(text, most)
    return json.loads(text)


def read_json(path: Path, largest: int = LARGEST) -> Any:
    """Return the value in a JSON file; it raises what `read_text` and `parse_json` do."""
    return parse_json(read_text(path, largest))


def check_depth(text: str, most: int | None = None) -> None:
    """Refuse a JSON text with lists and objects more than `MAX_DEPTH` deep, or with more than `most` values.

    Raises:
        ValueError: it has them.
    """
    if most is None and text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    marks = _VALUE.sub("", text)
    if most is not None and (values := len(marks) - marks.count("]") - marks.count("}")) > most:
        raise ValueError(f"{values:,} values, more than {most:,}")
    brackets, depth = marks.translate(_BRACKETS), 0
    while "[]" in brackets and depth <= MAX_DEPTH:
        brackets, depth = brackets.replace("[]", ""), depth + 1
    if depth + brackets.count("[") > MAX_DEPTH:
        raise ValueError(f"lists and objects inside each other more than {MAX_DEPTH} deep")


# Writing.


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new path beside a file, which takes its place at the end: a link is replaced, half a file never seen."""
    if path.absolute().parts[1:2] == ("dev",):  # /dev/stdout is no file to be replaced
        yield path
        return
    aside = path.with_name(f".{path.stem[:100]}.{token_hex(4)}{path.suffix}")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


def remove_link(path: Path) -> None:
    """Remove a link, for a writer of others that would follow it."""
    if path.is_symlink():
        path.unlink()


def appending(path: Path) -> TextIO:
    """Open a regular file to add text to it, and to read it.

    Raises:
        OSError: it is a link or no regular file, or cannot be written.
    """
    return open(path, "a+", encoding="utf-8", opener=_regular)


def _regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor
