"""softmax(q k) v over packed segments on a CPU: torch's flash kernel, several calls merged for each token.

No key of a prompt is copied: a completion attends to itself and to each of its ancestors, such as its prompt, in
separate calls, which are merged by their log-sum-exp,

    out = sigmoid(lse_own - lse_prompt) out_own + sigmoid(lse_prompt - lse_own) out_prompt;

given the merged output and log-sum-exp, the backward kernel gives each call's exact share of the gradient, as in ring
attention (arXiv:2310.01889).
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_ext.packing.kernels import Segments, Span, Where, blocks, split


class Band(NamedTuple):
    """Query i of a slice sees keys from i + `low` on, to i + `high`; None: to the last one."""

    low: int
    high: int | None


class Call(NamedTuple):
    """One call of a kernel: each slice of queries over one slice of keys."""

    asking: Where
    answering: Where
    causal: bool = False
    band: Band | None = None

    def mask(self, like: Tensor) -> Tensor | None:
        """Return what the kernel adds to the scores, [queries, keys]."""
        return None if self.band is None else _added(self.band, self.asking[2], self.answering[2], like.dtype)


@lru_cache(maxsize=16)
def _added(band: Band, queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    seen = torch.ones(queries, keys, dtype=torch.bool).triu(band.low)
    seen = seen if band.high is None else seen.tril(band.high)
    return torch.zeros(queries, keys, dtype=dtype).masked_fill(~seen, -torch.inf)


@lru_cache(maxsize=8)
def calls_of(segments: Segments, window: int | None) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """Return the calls over a token's own segment, in exactly one of which it is a query, and those over ancestors.

    A call over a window leaves out queries without a key that they see, and keys that no query sees.
    """
    if window is None or segments.longest <= window:
        own = tuple(Call(run.where, run.where, causal=True) for run in segments.runs)
        return own, tuple(Call((first, 1, last - first), (a, 1, b - a)) for first, last, (a, b) in segments.crossings)
    inner, outer = list[Call](), list[Call]()
    for run in segments.runs:
        if run.length <= window:
            inner.append(Call(run.where, run.where, causal=True))
        else:
            inner += [call for first, last in run.segments for call in _blocks(first, last, window)]
        distance = 0
        for span in reversed(segments.seen_by(run, window)):
            outer += [_crossing(first, run.length, span, distance, window) for first, _ in run.segments]
            distance += span[1] - span[0]
    return tuple(inner), tuple(outer)


def _blocks(first: int, last: int, window: int) -> Iterator[Call]:
    """Yield the calls of a segment longer than its window over itself."""
    for a, b in blocks(last - first, window):
        begin = max(0, a - window + 1)
        band = Band(a - begin - window + 1, a - begin)
        yield Call((first + a, 1, b - a), (first + begin, 1, b - begin), band=band)


def _crossing(first: int, length: int, span: Span, distance: int, window: int) -> Call:
    """Return the call of a segment over tokens of an ancestor, all seen by its first token, `distance` before it."""
    begin, end = span
    queries = min(length, window - 1 - distance)
    low = end - begin + distance - window + 1  # of query 0; not above 0
    return Call((first, 1, queries), (begin, 1, end - begin), band=Band(low, None) if queries - 1 + low > 0 else None)


def _queries(x: Tensor, start: int, count: int, length: int, key_heads: int) -> Tensor:
    """View segments of [1, heads, tokens, size] as [batch, heads, length, size], with GQA's key heads in the batch."""
    x = split(x, start, count, length)
    return x if x.shape[1] == key_heads else x.unflatten(1, (key_heads, -1)).flatten(0, 1)


def _keys(x: Tensor, start: int, count: int, length: int, repeats: int) -> Tensor:
    x = split(x, start, count, length)
    return x if repeats == 1 else x.flatten(0, 1)[:, None].expand(-1, repeats, -1, -1)


def _as_tokens(x: Tensor, count: int) -> Tensor:
    """View [batch, heads, length, size] of `_queries` or `_keys` as [heads, count, length, size]."""
    return (x if x.shape[0] == count else x.unflatten(0, (count, -1)).flatten(1, 2)).transpose(0, 1)


class MergedAttention(torch.autograd.Function):
    """softmax(q k) v by `calls`: over each token's own segment, and over its ancestors; [1, tokens, heads, size].

    `sinks` [heads] are scores of one more key for each query, whose value is zero.
    """

    @staticmethod
    def forward(  # noqa: D102 (torch's own)
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        calls: tuple[tuple[Call, ...], tuple[Call, ...]],
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        _, heads, tokens, size = query.shape
        key_heads = key.shape[1]
        repeats = heads // key_heads
        out = query.new_empty(1, tokens, heads, size).transpose(1, 2)
        lse = query.new_empty(1, heads, tokens, 1, dtype=max(query.dtype, torch.float32, key=lambda d: d.itemsize))
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

        def called(call: Call) -> tuple[Tensor, Tensor]:
            q = _queries(query, *call.asking, key_heads)
            k, v = (_keys(x, *call.answering, repeats) for x in (key, value))
            part, part_lse = flash(q, k, v, 0.0, call.causal, attn_mask=call.mask(q), scale=scale)
            return _as_tokens(part, call.asking[1]), _as_tokens(part_lse[..., None], call.asking[1])

        inner, outer = calls
        for call in inner:
            for target, part in zip((out, lse), called(call), strict=True):
                split(target, *call.asking).transpose(0, 1).copy_(part)
        for call in outer:
            first, _, length = call.asking
            part, part_lse = (x[:, 0] for x in called(call))
            own, own_lse = out[0, :, first : first + length], lse[0, :, first : first + length]
            # sigmoid(a - b) = exp(a) / (exp(a) + exp(b)): the share of the prompt
            own.lerp_(part, torch.sigmoid(part_lse - own_lse).to(own.dtype))
            own_lse.copy_(torch.logaddexp(own_lse, part_lse))
        if sinks is not None:
            by_head = sinks.to(lse.dtype)[None, :, None, None]
            out *= torch.sigmoid(lse - by_head).to(out.dtype)
            lse = torch.logaddexp(lse, by_head)
        ctx.save_for_backward(query, key, value, out, lse, sinks)
        ctx.calls, ctx.scale = calls, scale
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: D102
        *saved, lse, sinks = ctx.saved_tensors
        dtype, wide = saved[0].dtype, lse.dtype  # its kernel is up to four times faster in float32 than in bfloat16
        query, key, value, out, grad = (x.to(wide) for x in (*saved, grads[0].transpose(1, 2)))
        scale = ctx.scale
        calls: tuple[tuple[Call, ...], ...] = ctx.calls
        key_heads = key.shape[1]
        repeats = query.shape[1] // key_heads
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (query, key, value))
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        for call in chain(*calls):
            q, g, o, norm = (_queries(x, *call.asking, key_heads) for x in (query, grad, out, lse))
            k, v = (_keys(x, *call.answering, repeats) for x in (key, value))
            inputs = g, q, k, v, o, norm[..., 0].contiguous(), 0.0, call.causal
            dq, dk, dv = flash(*inputs, attn_mask=call.mask(q), scale=scale)
            parts = (grad_q, call.asking, dq), (grad_k, call.answering, dk), (grad_v, call.answering, dv)
            for target, where, part in parts:
                if target is not grad_q and repeats > 1:
                    part = part.sum(dim=1, keepdim=True)  # over the copies of keys
                split(target, *where).transpose(0, 1).add_(_as_tokens(part, where[1]))
        grad_sinks = None
        if sinks is not None:
            shares = torch.exp(sinks.to(lse.dtype)[None, :, None, None] - lse)
            grad_sinks = -(shares * (grad * out).sum(-1, keepdim=True)).sum((0, 2, 3)).to(sinks.dtype)
        return grad_q.to(dtype), grad_k.to(dtype), grad_v.to(dtype), None, None, grad_sinks
