"""Sliding windows and chunks over packed segments: a token sees the last tokens of its own path, not its neighbours.

The window of a layer travels as its attention mask: transformers asks for a mask once for each kind of layer, and
`of_mask` answers with the window, which the model hands to the attention of the layers that have it.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from grpo_ext.config.temporary import each_temporarily

NARROW = 4
"""Window of the startup check, whose rows are shorter than the windows of real models."""
_SIZES = ("sliding_window", "attention_chunk_size")
"""Names in configs of the sizes of windows and of chunks."""


@dataclass(frozen=True)
class Window:
    """The part of its path that a token sees; without `size` and `chunk` the mask asks for something else."""

    size: int | None = None
    """Itself and the `size` - 1 tokens before it."""
    chunk: int | None = None
    """Itself and the tokens before it since the last position that is a multiple of `chunk`, as in Llama 4."""


def of_mask(*args: object, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any) -> Window | None:
    """Describe the mask that transformers asks for: its window or its chunks, None for a plain causal one.

    `use_vmap` marks a mask with further functions, such as one that looks ahead.
    """
    if local_size is None and not use_vmap:
        return None
    size, chunk = (getattr(kwargs.get("config"), name, None) for name in _SIZES)
    if use_vmap or local_size not in (size, chunk) or (size is not None and chunk is not None):
        return Window()
    return Window(size, chunk)


def configs_of(model: nn.Module) -> list[Any]:
    """Return the configs of all modules, each once."""
    return [*{id(config): config for m in model.modules() if (config := getattr(m, "config", None))}.values()]


def narrowed(model: nn.Module) -> AbstractContextManager[None]:
    """Narrow windows and chunks of `model` to `NARROW` tokens for a `with` block, so that few tokens exceed them."""
    return each_temporarily(
        (holder, name, NARROW)
        for holder in (*model.modules(), *configs_of(model))
        for name in _SIZES
        if isinstance(window := getattr(holder, name, None), int) and window > NARROW
    )
