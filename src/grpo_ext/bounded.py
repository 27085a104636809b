"""Read what somebody else may have written: regular files only, bounded in size and in depth; finite numbers."""

import json
import os
import re
import stat
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

MAX_DEPTH = 100
"""Most lists and objects inside each other."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
"""Colours and other control characters, without tabs and ends of lines."""
LARGEST = 2**26
"""Most bytes of a file of settings or records."""


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


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, or nested more than `MAX_DEPTH` deep.
    """
    check_depth(text)
    return json.loads(text)


def read_json(path: Path, largest: int = LARGEST) -> Any:
    """Return the value in a JSON file; it raises what `read_text` and `parse_json` do."""
    return parse_json(read_text(path, largest))


def check_depth(text: str) -> None:
    """Refuse a JSON text with lists and objects more than `MAX_DEPTH` deep; brackets inside strings do not count.

    Raises:
        ValueError: it has them.
    """
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    brackets = re.findall(r"[\[\]{}]", re.sub(r'"(?:[^"\\]|\\.)*"', "", text))
    if max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0) > MAX_DEPTH:
        raise ValueError(f"lists and objects inside each other more than {MAX_DEPTH} deep")
