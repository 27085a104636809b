"""The weights of the last push, kept in the memory of the main process for a server that loses them."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


class HostCopy:
    """A copy of all weights on the CPU, written by each push; the policy itself has moved when a server dies."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def taking(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same tensors, each after it has been copied."""
        for name, tensor in named:
            if name not in self._tensors:
                self._tensors[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._tensors[name].copy_(tensor.detach())
            yield name, tensor

    def named(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield the copied tensors by name, each on `device`."""
        for name, tensor in self._tensors.items():
            yield name, tensor.to(device)
