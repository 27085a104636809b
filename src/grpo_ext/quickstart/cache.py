"""The folder of warm models: where it is if the home folder cannot be written, and what killed warm-ups left in it."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo_ext.errors import ABSENT, ConfigError, Problem

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

VARIABLE = "GRPO_EXT_CACHE"
_CURE = f"Set the environment variable {VARIABLE} to a folder that can be written."
_BUILDING = ".building-"


def cached(name: str) -> Path:
    """Return the folder of a warm model if it is in a cache, else the one to build it in, whose parent can be written.

    The cache is $GRPO_EXT_CACHE if that is set; else `grpo_ext` in the user's folder for caches, or if that cannot be
    written one of this user in the folder for temporary files.

    Raises:
        ConfigError: the model is not there, and no cache can be written.
    """
    if named := os.environ.get(VARIABLE):
        folder = Path(os.path.expanduser(named))
        if os.path.isdir(folder / name) or _writable(folder):
            return folder / name
        raise ConfigError([Problem(VARIABLE, named, "it cannot be written", _CURE)])
    usual = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "grpo_ext")
    temporary = Path(tempfile.gettempdir(), f"grpo_ext-{os.getuid() if hasattr(os, 'getuid') else 'models'}")
    if usual.is_absolute() and (os.path.isdir(usual / name) or _writable(usual)):
        return usual / name
    if _writable(temporary, mode=0o700) and _only_ours(temporary):
        return temporary / name
    reason = f"{usual} cannot be written, and {temporary} is not a folder that only this user can write"
    raise ConfigError([Problem(VARIABLE, ABSENT, reason, _CURE)])


def _writable(folder: Path, mode: int = 0o777) -> bool:
    """Return whether a folder can be written; it is made if it is not there."""
    try:
        folder.mkdir(mode, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _only_ours(folder: Path) -> bool:
    """Return whether a folder, not a link to one, belongs to this user and cannot be written by others."""
    found = folder.lstat()
    ours = not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)
    return stat.S_ISDIR(found.st_mode) and ours


@contextmanager
def building(root: Path) -> Iterator[Path]:
    """Make a folder in `root` to build something in, and remove it at the end, with those of killed processes."""
    for left in root.glob(f"{_BUILDING}*"):
        with suppress(OSError), _locked(left) as ended:
            if ended:
                shutil.rmtree(left, ignore_errors=True)
    folder = tempfile.TemporaryDirectory(dir=root, prefix=_BUILDING, ignore_cleanup_errors=True)
    with folder as made, _locked(Path(made)):
        yield Path(made)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder, if no other process has; the kernel releases the lock when this process ends."""
    if fcntl is None:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)
