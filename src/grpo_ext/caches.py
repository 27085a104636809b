"""Folders for caches: the user's, or one for temporary files where the user's cannot be written."""

import os
import stat
import tempfile
from pathlib import Path


def usual_cache() -> Path:
    """Return the user's folder for caches; it is relative if the user has no home folder."""
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))


def temporary_cache() -> Path | None:
    """Return this user's folder for caches among the temporary files, and make it; None if others can write it."""
    folder = Path(tempfile.gettempdir(), f"grpo_ext-{os.getuid() if hasattr(os, 'getuid') else 'user'}")
    if not writable(folder, mode=0o700):
        return None
    status = folder.lstat()  # of a link too
    ours = not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
    return folder if stat.S_ISDIR(status.st_mode) and ours else None


def writable(folder: Path, mode: int = 0o777) -> bool:
    """Return whether an absolute folder can be written; it is made if it is not there."""
    try:
        folder.mkdir(mode, parents=True, exist_ok=True)
    except OSError:
        return False
    return folder.is_absolute() and os.access(folder, os.W_OK | os.X_OK)


def use_writable_caches() -> None:
    """Name folders that can be written to the libraries of this process, if those in the home folder cannot be.

    A folder that an environment variable names stays, and so does a folder of models that can only be read.
    """
    usual = usual_cache()
    if writable(usual) or (folder := temporary_cache()) is None:
        return
    names = {"MPLCONFIGDIR": "matplotlib", "TORCHINDUCTOR_CACHE_DIR": "torchinductor"}
    if "HF_HOME" not in os.environ:
        names |= {"HF_DATASETS_CACHE": "datasets", "HF_MODULES_CACHE": "modules"}
        names |= {} if os.path.isdir(usual / "huggingface" / "hub") else {"HF_HUB_CACHE": "hub"}
    for name, part in names.items():
        os.environ.setdefault(name, str(folder / part))
