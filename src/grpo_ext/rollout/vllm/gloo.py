"""Weights from the trainer to vLLM's workers over TCP, by gloo: no GPU, no NCCL."""

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
    """The meeting point: the trainer's main process listens at `port`, vLLM's workers come to `address`."""
    return TCPStore(address, port, is_master=trainer, timeout=timedelta(seconds=timeout), wait_for_workers=False)


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
