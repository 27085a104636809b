"""Attention over packed groups: each prompt once, each completion over its prompt and itself, never over a sibling.

Registered with transformers as "grpo_ext_shared_prefix". The segments travel in the forward's keyword arguments
(`LAYOUT`), so that gradient checkpointing sees the same layout when it recomputes a layer.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from grpo_ext.config.temporary import each_temporarily
from grpo_ext.packing.flash import FlashAttention, flash_is_exact
from grpo_ext.packing.kernels import by_sdpa
from grpo_ext.packing.merged import MergedAttention, calls_of
from grpo_ext.packing.windows import Window, configs_of, of_mask

NAME = "grpo_ext_shared_prefix"
LAYOUT = "grpo_ext_segments"
INSTEAD = "grpo_ext_instead_of"
"""The forward's argument with the name of the attention that this one replaces."""

_FOREIGN = ("position_bias", "cache")
"""Arguments of attention functions that ask for more than softmax(q k) v, a window, capped scores and sinks."""


class ForeignAttention(ValueError):
    """The attention of a model computes more than softmax(q k) v."""


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
    """Compute attention over packed segments; called by transformers.

    Raises:
        ForeignAttention: the model asks for something that packing does not support, such as a mask of its own.
    """
    foreign = [name for name in _FOREIGN if kwargs.get(name) is not None]
    seen = attention_mask if isinstance(attention_mask, Window) else Window()
    window, chunk = seen.size, seen.chunk
    masked = attention_mask is not None and window is None and chunk is None
    differs = kwargs.get("sliding_window", window) != window  # the one in the mask holds for sdpa and eager
    asks = ("dropout", dropout), ("a mask", masked), ("a window that is not its mask's", differs)
    foreign += [name for name, is_asked in asks if is_asked]
    if LAYOUT not in kwargs or foreign:
        wanted = ", ".join(foreign) or "an attention other than softmax(q k) v"
        raise ForeignAttention(f"{type(module).__name__} asks for {wanted}, which shared_prefix does not support")
    _follow(module)
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:  # as torch's own attention under autocast
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    segments, scale = kwargs[LAYOUT], query.shape[-1] ** -0.5 if scaling is None else scaling
    window, chunk = (None if size is None or segments.longest <= size else size for size in (window, chunk))
    stock_ignores = kwargs.get(INSTEAD) == "sdpa"
    softcap, sinks = (None, None) if stock_ignores else (kwargs.get("softcap"), kwargs.get("s_aux"))
    kernel = softcap is None and chunk is None and value.shape[-1] == query.shape[-1]
    if kernel and device == "cpu":
        return MergedAttention.apply(query, key, value, calls_of(segments, window), scale, sinks), None
    plain = kernel and sinks is None and window is None
    if plain and flash_is_exact(query.device, query.dtype, query.shape[-1]):
        return FlashAttention.apply(query, key, value, segments, scale), None
    return by_sdpa(query, key, value, segments, scale, window, softcap, sinks, chunk), None


# The config selects the attention during a forward; a layer that is recomputed in the backward selects it itself.


def selected(model: nn.Module) -> AbstractContextManager[None]:
    """Run `model`'s attention through this module for a `with` block."""
    return each_temporarily((config, "_attn_implementation_internal", NAME) for config in configs_of(model))


def _follow(module: nn.Module) -> None:
    """Make `module` select its attention by its own arguments when checkpointing calls it again.

    Needed without a gradient too: reentrant checkpointing runs its first forward so.
    """
    if _choose not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_choose, with_kwargs=True)
        module.register_forward_hook(_restore, with_kwargs=True, always_call=True)


def _choose(module: Any, args: object, kwargs: dict[str, Any]) -> None:
    if LAYOUT in kwargs and module.config._attn_implementation_internal != NAME:
        module._grpo_ext_before = module.config._attn_implementation_internal
        module.config._attn_implementation_internal = NAME


def _restore(module: Any, args: object, kwargs: dict[str, Any], output: object) -> None:
    if hasattr(module, "_grpo_ext_before"):
        module.config._attn_implementation_internal = module._grpo_ext_before
        del module._grpo_ext_before


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, of_mask)
