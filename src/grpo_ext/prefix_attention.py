"""Attention over packed groups: every prompt once, each completion over its prompt and itself, never over a sibling.

Registered with transformers as "grpo_ext_shared_prefix". What attends to what travels in the forward's keyword
arguments (`LAYOUT`), so that gradient checkpointing sees the same layout again when it recomputes a layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "grpo_ext_shared_prefix"
LAYOUT = "grpo_ext_segments"

_FOREIGN = ("softcap", "s_aux", "position_bias", "sliding_window", "cache")
"""Arguments by which a model asks its attention for more than softmax(q k) v."""


class ForeignAttention(ValueError):
    """A model's attention is more than softmax(q k) v."""


@dataclass(frozen=True)
class Run:
    """`count` consecutive segments of `length` tokens from `start` on, each causal in itself."""

    start: int
    count: int
    length: int
    prefix: tuple[int, int] | None = None
    """The tokens before them that all of them see as well."""

    @property
    def stop(self) -> int:
        """The first token after them."""
        return self.start + self.count * self.length


@dataclass(frozen=True)
class Segments:
    """How one packed row falls into runs, in the order of their tokens, every token in exactly one."""

    runs: tuple[Run, ...]

    @property
    def crossings(self) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """(first query, last query + 1, (first key, last key + 1)): all completions of a prompt, and the prompt."""
        start: int | None = None
        for run, following in zip(self.runs, (*self.runs[1:], None), strict=True):
            start = run.start if start is None else start
            if following is None or following.prefix != run.prefix:
                if run.prefix is not None:
                    yield start, run.stop, run.prefix
                start = None


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
        return _MergedAttention.apply(query, key, value, segments, scale), None
    return by_sdpa(query, key, value, segments, scale), None


def by_sdpa(
    query: Float[Tensor, "1 heads tokens size"],
    key: Float[Tensor, "1 key_heads tokens size"],
    value: Float[Tensor, "1 key_heads tokens size"],
    segments: Segments,
    scale: float,
) -> Float[Tensor, "1 tokens heads size"]:
    """The same through torch's public SDPA on any device; copies a prompt's keys once per completion."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    pieces = []
    for run in segments.runs:
        q, k, v = (_split(x, run.start, run.count, run.length) for x in (query, key, value))
        if run.prefix is None:
            piece = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            before = slice(*run.prefix)
            k, v = (
                torch.cat([x[:, :, before].expand(run.count, -1, -1, -1), own], dim=2)
                for x, own in ((key, k), (value, v))
            )
            bias: Any = causal_lower_right(run.length, k.shape[2])
            piece = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        pieces.append(piece.transpose(1, 2).reshape(1, run.count * run.length, *piece.shape[1::2]))
    return torch.cat(pieces, dim=1)


def _split(x: Float[Tensor, "1 heads tokens size"], start: int, count: int, length: int) -> Tensor:
    """[count, heads, length, size]: a view of consecutive segments."""
    return x[0, :, start : start + count * length].unflatten(1, (count, length)).transpose(0, 1)


# On the CPU: torch's flash kernel on parts of the keys, merged by their log-sum-exp. With the merged output and
# log-sum-exp its backward gives each part's exact gradient, so no key is copied and no mask is made.


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, scale=scale
    )


def _queries(x: Tensor, start: int, count: int, length: int, key_heads: int) -> Tensor:
    """Segments of [1, heads, tokens, size] as [batch, heads, length, size], GQA's key heads moved into the batch."""
    x = _split(x, start, count, length)
    return x if x.shape[1] == key_heads else x.unflatten(1, (key_heads, -1)).flatten(0, 1)


def _keys(x: Tensor, start: int, count: int, length: int, repeats: int) -> Tensor:
    x = _split(x, start, count, length)
    return x if repeats == 1 else x.flatten(0, 1)[:, None].expand(-1, repeats, -1, -1)


def _as_tokens(x: Tensor, count: int) -> Tensor:
    """[batch, heads, length, size] of `_queries` or `_keys` back as [heads, count, length, size]."""
    return (x if x.shape[0] == count else x.unflatten(0, (count, -1)).flatten(1, 2)).transpose(0, 1)


def _summed(grad: Tensor, repeats: int) -> Tensor:
    """The gradient of keys from that of their copies."""
    return grad if repeats == 1 else grad.sum(dim=1, keepdim=True)


class _MergedAttention(torch.autograd.Function):
    """softmax(q k) v over `segments`; returns [1, tokens, heads, size]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
        _, heads, tokens, size = query.shape
        key_heads = key.shape[1]
        repeats = heads // key_heads
        out = query.new_empty(1, tokens, heads, size).transpose(1, 2)
        lse = query.new_empty(1, heads, tokens, 1, dtype=max(query.dtype, torch.float32, key=lambda d: d.itemsize))
        for run in segments.runs:
            where = run.start, run.count, run.length
            q, k, v = (
                _queries(query, *where, key_heads),
                _keys(key, *where, repeats),
                _keys(value, *where, repeats),
            )
            part, part_lse = _flash(q, k, v, True, scale)
            _split(out, *where).transpose(0, 1).copy_(_as_tokens(part, run.count))
            _split(lse, *where).transpose(0, 1).copy_(_as_tokens(part_lse[..., None], run.count))
        for first, last, (begin, end) in segments.crossings:
            q = _queries(query, first, 1, last - first, key_heads)
            k, v = (_keys(x, begin, 1, end - begin, repeats) for x in (key, value))
            part, part_lse = _flash(q, k, v, False, scale)
            part, part_lse = _as_tokens(part, 1)[:, 0], _as_tokens(part_lse[..., None], 1)[:, 0]
            own, own_lse = out[0, :, first:last], lse[0, :, first:last]
            # sigmoid(a - b) = exp(a) / (exp(a) + exp(b)): the share of the prompt
            own.lerp_(part, torch.sigmoid(part_lse - own_lse).to(own.dtype))
            own_lse.copy_(torch.logaddexp(own_lse, part_lse))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        grad, segments, scale = grads[0].transpose(1, 2), ctx.segments, ctx.scale
        key_heads = key.shape[1]
        repeats = query.shape[1] // key_heads
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (query, key, value))
        for run in segments.runs:
            where = run.start, run.count, run.length
            q, k, v, g, o, norm = _pieces(query, key, value, grad, out, lse, where, where, key_heads)
            parts = _flash_backward(g, q, k, v, o, norm, True, scale)
            for target, part, n in zip((grad_q, grad_k, grad_v), parts, (1, repeats, repeats), strict=True):
                _split(target, *where).transpose(0, 1).copy_(_as_tokens(_summed(part, n), run.count))
        for first, last, (begin, end) in segments.crossings:
            asking, answering = (first, 1, last - first), (begin, 1, end - begin)
            q, k, v, g, o, norm = _pieces(query, key, value, grad, out, lse, asking, answering, key_heads)
            dq, dk, dv = _flash_backward(g, q, k, v, o, norm, False, scale)
            grad_q[0, :, first:last] += _as_tokens(dq, 1)[:, 0]
            grad_k[0, :, begin:end] += _as_tokens(_summed(dk, repeats), 1)[:, 0]
            grad_v[0, :, begin:end] += _as_tokens(_summed(dv, repeats), 1)[:, 0]
        return grad_q, grad_k, grad_v, None, None


def _pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    asking: tuple[int, int, int],
    answering: tuple[int, int, int],
    key_heads: int,
) -> tuple[Tensor, ...]:
    """q, k, v, gradient, output, log-sum-exp of one call of the backward kernel."""
    repeats = query.shape[1] // key_heads
    q, g, o, norm = (_queries(x, *asking, key_heads) for x in (query, grad, out, lse))
    k, v = (_keys(x, *answering, repeats) for x in (key, value))
    return q, k, v, g, o, norm[..., 0].contiguous()


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
