"""A device that calls itself `mps` and computes on the CPU: as on Apple's GPU, numbers of 64 bits are refused.

Its tensors are wrappers of CPU tensors. An operation that makes one in float64, or that mixes them with tensors on the
CPU, raises. Memory, speed, autocast and kernels are not Apple's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate.state
import pytest
import torch
import transformers.training_args
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from grpo_ext.packing import kernels

NAME, STANDS_FOR = "mps", torch.device("meta")
"""What the device is called, and what it is to torch's own code, which has no Apple GPU here."""

_aten = torch.ops.aten
_MAY_MIX = {_aten.copy_.default, _aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default}


class OnApple(Tensor):
    """A tensor on the device."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnApple":
        shape = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        return Tensor._make_wrapper_subclass(cls, inner.size(), **shape, device=STANDS_FOR)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @property
    def device(self) -> torch.device:
        return torch.device(NAME)

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU and put its results where they belong."""
    leaves = tree_leaves((args, kwargs))
    ours = [x for x in leaves if isinstance(x, OnApple)]
    to = kwargs.get("device")
    there = torch.device(to).type in (NAME, STANDS_FOR.type) if to is not None else bool(ours)
    if ours and func not in _MAY_MIX and any(type(x) is Tensor and x.dim() for x in leaves):
        raise RuntimeError(f"{func}: tensors of two devices, {NAME} and cpu")
    if there and to is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    args, kwargs = tree_map_only(OnApple, lambda x: x.inner, (args, kwargs))
    found = func(*args, **kwargs)
    known = {id(x.inner): x for x in ours}  # of operations in place
    if not there:
        return found
    return tree_map_only(Tensor, lambda x: known[id(x)] if id(x) in known else wrapped(func, x), found)


def wrapped(func: Any, inner: Tensor) -> OnApple:
    if inner.dtype in (torch.float64, torch.complex128):
        raise TypeError(f"{func}: Apple's GPU has no numbers of 64 bits")
    return OnApple(inner)


class _Generator(torch.Generator):
    def __new__(cls, *_device: Any) -> "_Generator":
        return super().__new__(cls)


class _Event:
    def __init__(self, **_options: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _Computing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})


class _Naming(TorchFunctionMode):
    """Gives torch's own code a device that it knows."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if func is Tensor.backward:
            with self:  # for the Python code that it calls
                return torch.autograd.backward(args[0])
        args, kwargs = tree_map(_known, (args, kwargs))
        if func is torch.tensor and kwargs.get("device") == STANDS_FOR:
            return func(*args, **kwargs | {"device": None}).to(STANDS_FOR)
        return func(*args, **kwargs)


def _known(x: Any) -> Any:
    named = x.type if isinstance(x, torch.device) else x
    return STANDS_FOR if isinstance(named, str) and named.split(":")[0] == NAME else x


@contextmanager
def apple(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let transformers and accelerate see an Apple GPU, and compute on it, inside the block."""
    for module, name in (
        (accelerate.state, "is_mps_available"),
        (transformers.training_args, "is_torch_mps_available"),
    ):
        patch.setattr(module, name, lambda *_: True)
    patch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    patch.setattr(torch, "Generator", _Generator)
    patch.setattr(torch, "Event", _Event)
    for name in ("get_rng_state", "set_rng_state"):
        patch.setattr(torch.mps, name, getattr(torch, name))
    patch.setattr(kernels, "causal_lower_right", _lower_right)  # a tensor class of torch's, which a wrapper cannot be
    with _Computing(), _Naming():
        yield


def _lower_right(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=NAME).tril(keys - queries)
