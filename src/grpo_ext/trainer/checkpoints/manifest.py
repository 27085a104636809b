"""The manifest of a checkpoint: size and hash of each file, to find damage before a file is read."""

import errno
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import reduce
from operator import or_
from pathlib import Path, PureWindowsPath
from typing import Any

from grpo_ext.safe_reading import read_json

MANIFEST = "manifest.json"
STATE = "trainer_state.json"
_FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d+)")
UNSEALED = f"it has no {MANIFEST}: it was written by another program, or is incomplete"
_THREADS = 4
_READ_IF_PRESENT = re.compile(
    r"(model|pytorch_model|adapter_model|adapter_config|optimizer|scheduler|scaler|rng_state|rank|global_step|trainer_"
    r"state|entropy_ctrl|run_state|reference)[^/]*(/.*)?"
)
"""Files and folders that loading reads, also if the manifest does not list them."""
_NO_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""Errors of file systems that cannot sync this kind of file (folders on some FUSE and CIFS mounts)."""


def step_of(checkpoint: Path) -> int | None:
    """Return N of `checkpoint-N`; None for any other name."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def seal(folder: Path, **facts: Any) -> None:
    """Sync all files, and write the manifest last, so that a folder with a manifest is complete.

    Raises:
        OSError: the disk refuses.
    """
    names = files_in(folder)
    content = {"format": _FORMAT, **facts, "written": time.time_ns(), "files": entries(folder, names)}
    write_synced(folder / MANIFEST, json.dumps(content | {"digest": _digest(content)}, indent=1))
    share(folder / name for name in names)
    for parent in {folder, *(path for path in folder.rglob("*") if path.is_dir())}:
        sync(parent)


def share(files: Iterable[Path]) -> None:
    """Give the weights among the files of a folder, which safetensors lets only their owner read, the others' mode."""
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in files}
    usual = reduce(or_, modes.values(), 0) & 0o666
    for path, mode in modes.items():
        if mode == 0o600 != usual:
            with suppress(OSError):  # a file system without modes
                path.chmod(usual)


def files_in(folder: Path) -> list[str]:
    """Return relative names of all files except the manifest and hidden ones, which file managers and NFS leave."""
    relative = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    return sorted(p.as_posix() for p in relative if p.as_posix() != MANIFEST and not p.name.startswith("."))


def entries(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Sync each file, and return its size and hash."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: _entry(folder / name), names), strict=True))


def _entry(path: Path) -> dict[str, Any]:
    sync(path)
    return {"size": path.stat().st_size, "sha256": _hash(path)}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk, if the file system can.

    Raises:
        OSError: the disk refuses.
    """
    windows = os.name == "nt"
    if windows and path.is_dir():
        return  # a folder cannot be opened there
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise
    finally:
        os.close(descriptor)


def write_synced(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    aside = path.with_name(f".{path.name}.part")
    try:
        aside.unlink(missing_ok=True)  # left by a kill, or a link of others
        aside.write_text(text)
        sync(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def read(path: Path) -> dict[str, Any] | str:
    """Return a manifest, or a message about what is wrong with it."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        return UNSEALED
    except (OSError, ValueError) as error:
        return f"its {path.name} cannot be read ({_reason(error)})"
    if not isinstance(content, dict) or not isinstance(content.get("files"), dict):
        return f"its {path.name} is not a manifest"
    if content.get("format") != _FORMAT:
        return f"its {path.name} has format {content.get('format')!r}, and this version reads {_FORMAT}"
    if content.pop("digest", None) != _digest(content):
        return f"its {path.name} has been changed"
    wrong = wrong_entry(content["files"])
    return content if wrong is None else f"its {path.name} {wrong}"


def wrong_entry(files: Mapping[str, Any]) -> str | None:
    """Return a message about the first malformed entry, or the first of a file outside the folder; None if sound."""
    for name, entry in files.items():
        path = PureWindowsPath(name)  # which splits at both kinds of slash
        if not path.parts or path.anchor or ".." in path.parts or "\0" in name:
            return f"names a file outside of its folder: {name!r}"
        sound = isinstance(entry, dict) and isinstance(entry.get("size"), int) and isinstance(entry.get("sha256"), str)
        if not sound:
            return f"has no size and sha256 for {name!r}"
    return None


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def damage(folder: Path, *, hashes: bool = True) -> list[str]:
    """Return messages about what is wrong with a checkpoint; without `hashes`, only names and sizes are compared."""
    if not folder.is_dir():
        return [
            "it is a broken link"
            if folder.is_symlink()
            else "it is not a folder"
            if folder.exists()
            else "it is missing"
        ]
    content = read(folder / MANIFEST)
    if isinstance(content, str):
        return [content]
    messages = []
    if step_of(folder) not in (None, content.get("step")):
        messages.append(f"its {MANIFEST} is that of checkpoint-{content.get('step')}")
    if content.get("weights_alone"):
        messages.append("it holds only weights (save_only_model), from which a run cannot resume")
    messages += changes(folder, content["files"], hashes=hashes)
    unlisted = sorted(set(files_in(folder)) - set(content["files"]))
    return messages + [f"{name} does not belong to it" for name in unlisted if _READ_IF_PRESENT.fullmatch(name)]


def changes(folder: Path, files: dict[str, dict[str, Any]], *, hashes: bool = True) -> list[str]:
    """Return messages about files that differ from a manifest."""
    with ThreadPoolExecutor(_THREADS) as pool:
        compared = pool.map(lambda item: _change(folder / item[0], item[0], item[1], hashes), files.items())
        return [change for change in compared if change]


def _change(path: Path, name: str, entry: dict[str, Any], hashes: bool) -> str | None:
    try:
        size = path.stat().st_size
        if not path.is_file():
            return f"{name} is not a file"
        if size != entry["size"]:
            return f"{name} has {size:,} bytes instead of {entry['size']:,}"
        if hashes and _hash(path) != entry["sha256"]:
            return f"{name} has been changed (its hash differs)"
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, ValueError) as error:
        return f"{name} cannot be read ({_reason(error)})"
    return None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
