"""Tensors packed into byte buffers of bounded size, so that a large model travels in a few messages."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes; a view of a buffer as another dtype must begin at a multiple of that dtype's size."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of one tensor on the wire."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in a buffer, padding included."""
        size = prod(self.shape) * self.dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


def bucketed(specs: Iterable[TensorSpec], limit: int) -> Iterator[list[TensorSpec]]:
    """Consecutive specs of at most `limit` bytes together; a tensor beyond that has a bucket to itself."""
    bucket: list[TensorSpec] = []
    size = 0
    for spec in specs:
        if bucket and size + spec.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(spec)
        size += spec.nbytes
    if bucket:
        yield bucket


def bucket_bytes(bucket: Sequence[TensorSpec]) -> int:
    """Length of the buffer that holds a bucket."""
    return sum(spec.nbytes for spec in bucket)


def unpack(buffer: Tensor, bucket: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """Views of `buffer`, one for each spec."""
    offset = 0
    for spec in bucket:
        size = prod(spec.shape) * spec.dtype.itemsize
        yield spec.name, buffer[offset : offset + size].view(spec.dtype).view(spec.shape)
        offset += spec.nbytes


def pack(bucket: Sequence[TensorSpec], tensors: Iterator[tuple[str, Tensor]]) -> Tensor:
    """A buffer with the next tensors of the iterator, which must come as the bucket announces them.

    Raises:
        ValueError: a tensor is not the one announced.
    """
    buffer = torch.empty(bucket_bytes(bucket), dtype=torch.uint8)
    for (name, view), spec in zip(unpack(buffer, bucket), bucket, strict=True):
        sent, tensor = next(tensors)
        if (sent, tensor.dtype, tuple(tensor.shape)) != (name, spec.dtype, spec.shape):
            raise ValueError(
                f"{sent} {tuple(tensor.shape)} {tensor.dtype} where {name} {spec.shape} {spec.dtype} was announced"
            )
        view.copy_(tensor.detach())
    return buffer
