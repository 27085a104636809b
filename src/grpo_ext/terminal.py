"""The only way to the terminal: text of others cannot steer it, reorder what it shows, or flood it."""

import logging
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

LINE, WRITE = 10_000, 100_000
"""Most characters of a printed line, and of one write."""
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff"
    "\ud800-\udfff\U000e0000-\U000e0fff]"
)
"""Controls but newline and tab, bidi marks, invisible characters, surrogates; not the joiners of letters and emoji."""
_OWN = re.compile(r"(\A\r|\A(?:\x1b\[A)+\Z|\x1b\[[0-9;]*m)")
"""Passed to a terminal as it is: a progress bar's moves, colours."""


def printable(text: str) -> str:
    """Return `text` with symbols for control characters, and code points for bidi marks and invisible characters."""
    return _UNSAFE.sub(lambda c: chr(0x2400 + ord(c[0])) if c[0] < " " else f"\u27e8U+{ord(c[0]):04X}\u27e9", text)


def clipped(text: str, most: int, length: int = 0) -> str:
    """Return printable start and end of a long text; `length` is its length if its middle was already removed."""
    return printable(_cut(text, most, length))


def _cut(text: str, most: int, length: int = 0) -> str:
    length, end = length or len(text), most // 4
    gap = f"\n\u2026 [{length - most:,} of {length:,} characters left out] \u2026\n"
    return text if length <= most else text[: most - end] + gap + text[-end:]


class SafeStream:
    """A stream that writes `printable` text, and cuts long lines. On a terminal, colours and progress bars pass."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text`; return its length."""
        short = _cut(re.sub(rf"[^\n]{{{LINE + 1},}}", lambda line: _cut(line[0], LINE), text), WRITE)
        if self._stream.isatty():
            pieces = _OWN.split(short)  # every second one is a match
            reset = "\x1b[0m" if any(piece.endswith("m") for piece in pieces[1::2]) else ""
            safe = "".join(piece if i % 2 else printable(piece) for i, piece in enumerate(pieces)) + reset
        else:
            safe = printable(re.sub(r"\A\r", "\n", short))
        self._stream.write(safe)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each text."""
        for line in lines:
            self.write(line)


def protect() -> None:
    """Make stdout and stderr `SafeStream`s, also those that log handlers hold."""
    kept: list[Any] = [sys.stdout, sys.stderr]
    safe: list[Any] = [s if s is None or isinstance(s, SafeStream) else SafeStream(s) for s in kept]
    sys.stdout, sys.stderr = safe
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream in kept:
                handler.setStream(safe[kept.index(handler.stream)])


@contextmanager
def safe_output() -> Iterator[None]:
    """Protect stdout and stderr, and later the traceback of an exception that leaves the block."""
    kept = sys.stdout, sys.stderr
    protect()
    try:
        yield
    except Exception:
        if sys.stdout is not kept[0]:
            sys.excepthook = partial(_last_words, sys.excepthook)
        raise
    finally:
        sys.stdout, sys.stderr = kept


def _last_words(hook: Any, *error: Any) -> None:
    with safe_output():
        hook(*error)


_LOGGED = {
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "transformers.trainer_utils": "The tokenizer has new PAD/BOS/EOS tokens",
}
"""By logger, how its notice begins."""


def _asks_something(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_LOGGED[record.name])


@contextmanager
def without_notices() -> Iterator[None]:
    """Hide what other libraries print for each other; afterwards all filters are what they were."""
    loggers = [logging.getLogger(name) for name in _LOGGED]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*gradient_checkpointing\w*` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "TRL currently supports vLLM", UserWarning)  # versions.py warns, once
        for logger in loggers:
            logger.addFilter(_asks_something)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(_asks_something)
