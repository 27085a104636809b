"""Attention over packed groups: every prompt once, each completion over its prompt and itself, never over a sibling.

Registered with transformers as "grpo_ext_shared_prefix". What attends to what travels in the forward's keyword
arguments (`LAYOUT`), so that gradient checkpointing sees the same layout again when it recomputes a layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from grpo_ext.packing.flash import FlashAttention, flash_is_exact
from grpo_ext.packing.kernels import MergedAttention, by_sdpa

NAME = "grpo_ext_shared_prefix"
LAYOUT = "grpo_ext_segments"

_FOREIGN = ("softcap", "s_aux", "position_bias", "sliding_window", "cache")
"""Arguments by which a model asks its attention for more than softmax(q k) v."""


class ForeignAttention(ValueError):
    """A model's attention is more than softmax(q k) v."""


def attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads tokens size"],
    key: Float[Tensor, "1 key_heads tokens size"],
    value: Float[Tensor, "1 key_heads tokens size"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Float[Tensor, "1 tokens heads size"], None]:
    """An attention function as transformers calls it.

    Raises:
        ForeignAttention: the model asks for something that shared prefixes do not know, such as a sliding window.
    """
    foreign = [name for name in _FOREIGN if kwargs.get(name) is not None]
    foreign += [name for name, asked in (("dropout", dropout), ("a mask", attention_mask is not None)) if asked]
    if LAYOUT not in kwargs or foreign or value.shape[-1] != query.shape[-1]:
        asked = ", ".join(foreign) or "an attention of its own"
        raise ForeignAttention(f"{type(module).__name__} asks for {asked}, which shared_prefix does not know")
    _follow(module)
    device = query.device.type
    if torch.is_autocast_enabled(device):  # as torch's own attention under autocast
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    segments, scale = kwargs[LAYOUT], query.shape[-1] ** -0.5 if scaling is None else scaling
    if device == "cpu":
        return MergedAttention.apply(query, key, value, segments, scale), None
    if flash_is_exact(query.device, query.dtype, query.shape[-1]):
        return FlashAttention.apply(query, key, value, segments, scale), None
    return by_sdpa(query, key, value, segments, scale), None


# Which attention runs: the config says so during a forward; a layer that is recomputed in the backward says so itself.


@contextmanager
def selected(model: nn.Module) -> Iterator[None]:
    """Run `model`'s attention through this module, and what it ran through before afterwards, whatever happens."""
    configs = {id(c): c for c in (getattr(m, "config", None) for m in model.modules()) if c is not None}
    before = [(c, c._attn_implementation_internal) for c in configs.values()]
    try:
        for config, _ in before:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def _follow(module: nn.Module) -> None:
    """Have `module` choose its attention by its own arguments when checkpointing calls it again.

    Also without a gradient, which is how reentrant checkpointing runs its first forward.
    """
    if _choose not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_choose, with_kwargs=True)
        module.register_forward_hook(_restore, with_kwargs=True, always_call=True)


def _choose(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if LAYOUT in kwargs and module.config._attn_implementation_internal != NAME:
        module._grpo_ext_before = module.config._attn_implementation_internal
        module.config._attn_implementation_internal = NAME


def _restore(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    if hasattr(module, "_grpo_ext_before"):
        module.config._attn_implementation_internal = module._grpo_ext_before
        del module._grpo_ext_before


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Segments say it all."""


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _no_mask)
