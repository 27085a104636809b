"""One run for each `output_dir`: a lock that the kernel releases when its process ends.

`filelock` is not used: it may fall back to a file that stays after a kill, and it does not name the holder.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from grpo_ext.config.launch import rank
from grpo_ext.errors import ConfigError, Problem
from grpo_ext.safe_reading import appending

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = "_grpo_ext.lock"
"""transformers pushes no name with a leading `_` to the hub."""

_held: list[TextIO] = []
"""Open files of the locks of this process."""


def _close_in_child() -> None:
    """Close the locks in a forked child, such as a dataloader's worker, which may outlive the run."""
    for file in _held:
        os.close(file.fileno())
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def output_lock(folder: Path) -> Iterator[None]:
    """Create and lock a folder on the main process.

    Raises:
        ConfigError: another run has locked it, or it is not writable.
    """
    if rank() != 0:
        yield
        return
    with _opened(folder) as file:
        _lock(file, folder)
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T")}))
        file.flush()
        _held.append(file)
        try:
            yield
        finally:
            _held.remove(file)
        file.truncate(0)


def _opened(folder: Path) -> TextIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = appending(folder / LOCK_FILE)
        probe = folder / f"{LOCK_FILE}.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = f"it is not writable ({error.strerror or error})"
        raise ConfigError([Problem("output_dir", str(folder), reason, "Set it to another folder.")]) from error
    return file


def _lock(file: TextIO, folder: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        reason = f"another run writes there ({_holder(file)})"
        raise ConfigError([Problem("output_dir", str(folder), reason, "Set another one, or end that run.")]) from error
    except OSError:  # a file system without locks
        return


def _holder(file: TextIO) -> str:
    try:
        file.seek(0)
        held = json.loads(file.read())
        return f"process {held['pid']} on {held['host']}, since {held['since']}"
    except (OSError, ValueError, KeyError):
        return "its process is unknown"
