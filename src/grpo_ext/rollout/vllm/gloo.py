"""Weights from the trainer to vLLM's workers over TCP by gloo, without GPU or NCCL; one tensor at a time."""

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

BACKEND = "gloo"
"""Name of the engine in vLLM's registry, and in `vllm_weight_transfer`."""
TRAINER_RANK = 0
TAKEN = "this server gets weights"
"""Begins the answer of a server to a second run."""
_OWNER = "owner"
"""Key that a trainer's store has while it trains; its value is the run."""
JOIN_SECONDS = 30.0
"""In which a server's worker joins a trainer, which waits for it: longer only if the trainer has ended meanwhile."""
SHORTEST_PAUSE, LONGEST_PAUSE = 2e-5, 1e-3
"""Seconds between two looks at a broadcast."""


class TensorSpec(NamedTuple):
    """Name, dtype and shape of a tensor, announced before it is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def specs_of(metadata: Iterable[tuple[str, str, Sequence[int]]]) -> list[TensorSpec]:
    """Convert (name, dtype name, shape), the form in which tensors are announced to a server."""
    return [TensorSpec(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in metadata]


def open_store(address: str, port: int, timeout: float, *, trainer: bool) -> TCPStore:
    """Return the store where the processes meet: the trainer listens at `address` only, vLLM's workers connect."""
    limit = timedelta(seconds=timeout)
    if not trainer:
        return TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
    listening = _listening(address, port)  # a store by itself would listen at every address of the machine
    port = listening.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def _listening(address: str, port: int) -> socket.socket:
    """Return a socket that listens at `address`."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(place, family=family)
    except OSError as error:
        raise RuntimeError(f"{address}:{port}: {error.strerror}") from error


def mark(store: TCPStore, owner: str | None) -> None:
    """Note in a trainer's store the run that trains; None: it does not, or not yet again."""
    if owner is None:
        store.delete_key(_OWNER)
    else:
        store.set(_OWNER, owner)


def trains(store: TCPStore, owner: str) -> bool:
    """Return whether a store belongs to this run, which lives and trains."""
    try:
        return store.check([_OWNER]) and store.get(_OWNER).decode() == owner
    except RuntimeError:  # its process has ended
        return False


def join(
    address: str, port: int, owner: str, name: str, rank: int, size: int, timeout: float
) -> tuple[TCPStore, ProcessGroupGloo]:
    """Return store and group of the trainer that has asked a server's worker to join; see `open_group`.

    Raises:
        RuntimeError: it has ended meanwhile, also where another trainer listens at its address by now.
    """
    seconds = min(timeout, JOIN_SECONDS)
    store = open_store(address, port, seconds, trainer=False)
    if not trains(store, owner):
        raise RuntimeError(f"the trainer that asked for a transfer group ({owner}) has ended")
    group = open_group(store, name, rank, size, seconds)
    group._set_default_timeout(timedelta(seconds=timeout))
    return store, group


def open_group(store: TCPStore, name: str, rank: int, size: int, timeout: float) -> ProcessGroupGloo:
    """Return a process group that is independent of the default group.

    Args:
        store: where the members meet.
        name: unique among the groups of the store.
        rank: 0 for the trainer, 1 or more for vLLM's workers.
        size: 1 + number of workers.
        timeout: limit in seconds for the rendezvous, and for each tensor.
    """
    return ProcessGroupGloo(PrefixStore(name, store), rank, size, timedelta(seconds=timeout))


def _broadcast(group: Any, buffer: Tensor) -> Any:
    options = BroadcastOptions()
    options.rootRank = TRAINER_RANK
    options.rootTensor = 0
    return group.broadcast([buffer], options)


def send(
    group: ProcessGroupGloo,
    specs: Iterable[TensorSpec],
    tensors: Iterator[tuple[str, Tensor]],
    refused: Callable[[], object],
) -> None:
    """Broadcast tensors as they come; one is in memory at a time.

    Args:
        group: also of the workers that receive.
        specs: announced tensors.
        tensors: in the same order.
        refused: returns whether the workers will not receive them.

    Raises:
        ValueError: a tensor is not the one that was announced.
        RuntimeError: the connection broke, or the workers will not receive them.
    """
    for spec in specs:
        name, tensor = next(tensors)
        if (name, tensor.dtype, tuple(tensor.shape)) != spec:
            sent = f"{name} {tuple(tensor.shape)} {tensor.dtype}"
            raise ValueError(f"{sent} where {spec.name} {spec.shape} {spec.dtype} was announced")
        work, pause = _broadcast(group, tensor.detach().cpu().reshape(-1).view(torch.uint8)), SHORTEST_PAUSE
        while not work.is_completed():
            if refused():
                threading.Thread(target=_hold, args=(group, work), daemon=True).start()
                raise RuntimeError("the request for them failed")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        work.wait()


def _hold(group: ProcessGroupGloo, work: Any) -> None:
    """Keep a group until a broadcast has timed out: gloo has no abort, and destroying the group would wait for it."""
    with suppress(RuntimeError):
        work.wait()


def receive(group: ProcessGroupGloo, specs: Iterable[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """Yield what `send` broadcasts: names and tensors on the CPU."""
    for spec in specs:
        buffer = torch.empty(spec.nbytes, dtype=torch.uint8)
        _broadcast(group, buffer).wait()
        yield spec.name, buffer.view(spec.dtype).view(spec.shape)
