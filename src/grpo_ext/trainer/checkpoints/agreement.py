"""One decision for all processes: the main one decides, the others hear of it, also of what went wrong."""

import hashlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from grpo_ext.errors import ConfigError
from grpo_ext.trainer.checkpoints.manifest import MANIFEST, STATE

T = TypeVar("T")


def agreed(decide: Callable[[], T]) -> T:
    """What `decide` returns on the main process, on all.

    Raises:
        ConfigError: on all processes, if it is raised on the main one, or if a file cannot be read there.
    """
    outcome: list[Any] = [None, None]
    if PartialState().is_main_process:
        try:
            outcome[0] = decide()
        except ConfigError as error:
            outcome[1] = error.problems
        except OSError as error:
            outcome[1] = [f"{error}. Give this user access to output_dir, or set another one."]
    broadcast_object_list(outcome, from_process=0)
    if outcome[1]:
        raise ConfigError(outcome[1])
    return outcome[0]


def everywhere(local: Any) -> list[Any]:
    """What each process has, in the order of their ranks."""
    return gather_object([local])


def check_seen_by_all(checkpoint: Path, *, same: bool = True) -> None:
    """Each process must see the checkpoint that was chosen; with `same`, to the byte of its manifest.

    Raises:
        ConfigError: naming those that do not.
    """
    seen = everywhere((socket.gethostname(), _identity(checkpoint)))
    wanted = seen[0][1]
    blind = [
        f"{rank} on {host} ({'another one of that name' if identity else 'no such folder'})"
        for rank, (host, identity) in enumerate(seen)
        if identity is None or (same and identity != wanted)
    ]
    if blind:
        raise ConfigError(
            [
                f"{checkpoint} is what process 0 on {seen[0][0]} goes on from, and these processes do not see it: "
                f"{', '.join(blind)}. Set output_dir to a folder that all machines share, or copy it to each."
            ]
        )


def _identity(checkpoint: Path) -> str | None:
    for name in (MANIFEST, STATE):  # plain TRL's checkpoints have no manifest
        try:
            return hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
        except OSError:
            continue
    return None
