"""One run for each `output_dir`: a lock that the kernel takes away from a process that is gone."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_ext.config.launch import rank
from grpo_ext.errors import ConfigError

LOCK_FILE = "_grpo_ext.lock"
"""What begins with `_` transformers never pushes to the hub."""

_held: list[Any] = []
"""Open files of the locks of this process."""


def _forked() -> None:
    """A forked child, such as a dataloader's worker, would hold the lock for as long as it outlives the run."""
    for file in _held:
        os.close(file.fileno())
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@contextmanager
def output_lock(folder: Path) -> Iterator[None]:
    """Hold `folder`, which is created, for as long as it lasts; the main process alone does.

    Raises:
        ConfigError: another run holds it, or nothing can be written there.
    """
    if rank() != 0:
        yield
        return
    file = _opened(folder)
    with file:
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


def _opened(folder: Path) -> Any:
    path = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
        probe = folder / f"{LOCK_FILE}.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            [f"output_dir={str(folder)!r}: nothing can be written there ({reason}). Name a folder of yours."]
        ) from error
    return file


def _lock(file: Any, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            [f"output_dir={str(folder)!r}: another run writes there ({_holder(file)}). Name another, or end that run."]
        ) from error
    except OSError:  # a file system without locks
        return


def _holder(file: Any) -> str:
    try:
        file.seek(0)
        held = json.loads(file.read())
        return f"process {held['pid']} on {held['host']}, since {held['since']}"
    except (OSError, ValueError, KeyError):
        return "which has not said more"


def is_held(folder: Path) -> bool:
    """Whether a run goes on in `folder`; where there are no locks, whether one has left no end."""
    try:
        import fcntl

        with (folder / LOCK_FILE).open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False
    except ImportError:  # Windows
        return bool((folder / LOCK_FILE).exists() and (folder / LOCK_FILE).read_text(encoding="utf-8"))
    except OSError:
        return False
