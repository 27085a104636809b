"""The folder of warm models: where it is if the home folder cannot be written, and what killed warm-ups left in it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo_ext.caches import temporary_cache, usual_cache, writable
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
        folder = Path(os.path.expanduser(named)).absolute()
        if os.path.isdir(folder / name) or writable(folder):
            return folder / name
        raise ConfigError([Problem(VARIABLE, named, "it cannot be written", _CURE)])
    usual = usual_cache() / "grpo_ext"
    if os.path.isdir(usual / name) or writable(usual):
        return usual / name
    if temporary := temporary_cache():
        return temporary / name
    reason = f"{usual} cannot be written, nor can a folder in {tempfile.gettempdir()} that only this user can write"
    raise ConfigError([Problem(VARIABLE, ABSENT, reason, _CURE)])


@contextmanager
def building(root: Path) -> Iterator[Path]:
    """Make a folder in `root` to build something in, and remove it at the end, with those of killed processes."""
    for left in root.glob(f"{_BUILDING}*"):
        with suppress(OSError), _locked(left) as ended:
            if ended:
                shutil.rmtree(left, ignore_errors=True)
    folder = tempfile.TemporaryDirectory(dir=root, prefix=_BUILDING, ignore_cleanup_errors=True)
    with folder as path, _locked(Path(path)):
        yield Path(path)


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
