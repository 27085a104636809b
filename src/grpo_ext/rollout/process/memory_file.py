"""Weights in a file that has no name: in memory on Linux, and gone with the processes that have it open."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import BinaryIO, cast

import torch
from torch import Tensor, nn

from grpo_ext.rollout.process.messages import Place, Table

ALIGNMENT = 64
"""Weights begin at multiples of this number of bytes."""


class MemoryFile:
    """A file for one version of the weights, written by the trainer and read by the process that samples."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):  # not limited by the size of /dev/shm
            self._file: BinaryIO = os.fdopen(os.memfd_create("weights"), "wb+", buffering=0)
        else:
            self._file = cast(BinaryIO, tempfile.TemporaryFile(buffering=0))  # noqa: SIM115 (it stays open)

    @property
    def descriptor(self) -> int:
        """The file descriptor."""
        return self._file.fileno()

    def write(self, named: Iterable[tuple[str, Tensor]]) -> Table:
        """Write tensors over what the file had; return where each is."""
        table, offset = [], 0
        for name, tensor in named:
            table.append(Place(name, tensor.dtype, tensor.shape, offset))
            data = _bytes(tensor.detach().cpu().contiguous())
            while data:
                written = os.pwrite(self.descriptor, data, offset)  # at most 2 GiB at once
                data, offset = data[written:], offset + written
            offset += -offset % ALIGNMENT
        return tuple(table)

    def close(self) -> None:
        """Close the file, which frees its memory."""
        self._file.close()


def load(model: nn.Module, table: Table, descriptor: int) -> None:
    """Set the weights and buffers of `model` to those in a file.

    Raises:
        ValueError: the file is of another model.
    """
    parameters, buffers = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    targets = dict(parameters) | dict(buffers)
    names = {place.name for place in table}
    loaded = {id(targets[name]) for name in names & targets.keys()}
    strange = names - targets.keys() or {name for name, target in targets.items() if id(target) not in loaded}
    strange |= {p.name for p in table if p.name in targets and p.shape != targets[p.name].shape}
    if strange:
        raise ValueError(
            f"the policy's weights are not those of a {type(model).__name__} that is built from its config: "
            f"{', '.join(sorted(strange)[:5])}"
        )
    for name, values in read(table, descriptor):
        targets[name].data = values.to(targets[name].device)


def read(table: Table, descriptor: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a file, with their names."""
    for name, dtype, shape, offset in table:
        values = torch.empty(shape, dtype=dtype, device="cpu")
        data = _bytes(values)
        while data:
            count = os.preadv(descriptor, [data], offset)
            data, offset = data[count:], offset + count
        yield name, values


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
