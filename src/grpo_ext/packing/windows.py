"""Sliding windows over packed segments: a token sees the last tokens of its own path, not its neighbours in the row.

The window of a layer travels as its attention mask: transformers asks for a mask once for each kind of layer, and
`of_mask` answers with the window, which the model hands to the attention of the layers that have it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

NARROW = 4
"""Window of the startup check, whose rows are shorter than the windows of real models."""


@dataclass(frozen=True)
class Window:
    """A token sees itself and the `size` - 1 tokens before it; None: the mask asks for something else."""

    size: int | None


def of_mask(*args: object, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any) -> Window | None:
    """Describe the mask that transformers asks for: the window of a sliding one, None for a plain causal one.

    `use_vmap` marks a mask with further functions, such as one that looks ahead.
    """
    if use_vmap or (local_size is not None and local_size != getattr(kwargs.get("config"), "sliding_window", None)):
        return Window(None)
    return None if local_size is None else Window(local_size)


@contextmanager
def narrowed(model: nn.Module) -> Iterator[None]:
    """Narrow every window of `model` to `NARROW` tokens for a `with` block, so that a few tokens exceed it."""
    holders: list[Any] = [*model.modules(), *{id(c): c for c in map(_config, model.modules()) if c}.values()]
    found = [(holder, holder.sliding_window) for holder in holders if _wide(getattr(holder, "sliding_window", None))]
    try:
        for holder, _ in found:
            holder.sliding_window = NARROW
        yield
    finally:
        for holder, window in found:
            holder.sliding_window = window


def _config(module: nn.Module) -> Any:
    return getattr(module, "config", None)


def _wide(window: object) -> bool:
    return isinstance(window, int) and window > NARROW
