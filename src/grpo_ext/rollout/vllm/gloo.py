"""Weights from the trainer to vLLM's workers over TCP, by gloo: no GPU, no NCCL."""

import socket
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from grpo_ext.rollout.vllm.buckets import TensorSpec, bucket_bytes, bucketed, pack, unpack

BACKEND = "gloo"
"""Name of the engine in vLLM's registry, and in `vllm_weight_transfer`."""

BUCKET_BYTES = 256 * 2**20
TRAINER_RANK = 0


def open_store(address: str, port: int, timeout: float, *, trainer: bool) -> TCPStore:
    """The meeting point: the trainer's main process listens at `address` alone, vLLM's workers come there."""
    limit = timedelta(seconds=timeout)
    if not trainer:
        return TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
    listening = _listening(address, port)  # a store would listen at every address of the machine
    port = listening.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _listening(address: str, port: int) -> socket.socket:
    """A socket that listens at `address`.

    Raises:
        RuntimeError: the port is taken, or the address none of this machine's.
    """
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen()
    except OSError as error:
        listening.close()
        raise RuntimeError(f"{address}:{port}: {error.strerror}") from error
    return listening


def open_group(store: TCPStore, name: str, rank: int, size: int, timeout: float) -> ProcessGroupGloo:
    """A group of its own, beside whatever group the process is in.

    Args:
        store: where the members meet.
        name: no two groups of a store may have the same.
        rank: 0 for the trainer, from 1 on for vLLM's workers.
        size: 1 + number of workers.
        timeout: seconds that meeting, and then each message, may take.
    """
    return ProcessGroupGloo(PrefixStore(name, store), rank, size, timedelta(seconds=timeout))


def _broadcast(group: Any, buffer: Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank = TRAINER_RANK
    options.rootTensor = 0
    group.broadcast([buffer], options).wait()


def send(
    group: ProcessGroupGloo, specs: Iterable[TensorSpec], tensors: Iterator[tuple[str, Tensor]], limit: int
) -> None:
    """Broadcast tensors in buckets of `limit` bytes; one bucket is in memory at a time."""
    for bucket in bucketed(specs, limit):
        _broadcast(group, pack(bucket, tensors))


def receive(group: ProcessGroupGloo, specs: Iterable[TensorSpec], limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    """The other end of `send`: the tensors of each bucket, as views of its buffer."""
    for bucket in bucketed(specs, limit):
        buffer = torch.empty(bucket_bytes(bucket), dtype=torch.uint8)
        _broadcast(group, buffer)
        yield list(unpack(buffer, bucket))


def specs_of(metadata: Iterable[tuple[str, str, Any]]) -> list[TensorSpec]:
    """Specs from (name, dtype name, shape), the form in which they are announced to a server."""
    return [TensorSpec(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in metadata]
