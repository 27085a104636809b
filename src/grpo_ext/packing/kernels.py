"""softmax(q k) v where each segment sees itself and its ancestors in a tree: merged calls on CPU, SDPA elsewhere.

On a CPU no key of a prompt is copied: a completion attends to itself and to each of its ancestors, such as its prompt,
in separate calls, which are merged by their log-sum-exp,

    out = sigmoid(lse_own - lse_prompt) out_own + sigmoid(lse_prompt - lse_own) out_prompt;

given the merged output and log-sum-exp, the backward kernel gives each call's exact share of the gradient, as in ring
attention (arXiv:2310.01889).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

Span = tuple[int, int]
"""(first token, last token + 1)."""
Crossing = tuple[int, int, Span]
"""(first query, last query + 1, (first key, last key + 1))."""


@dataclass(frozen=True)
class Run:
    """`count` consecutive segments of `length` tokens from `start` on, each causal in itself."""

    start: int
    count: int
    length: int
    prefix: Span | None = None
    """Parent segment: all of them see it and its ancestors."""

    @property
    def stop(self) -> int:
        """First token after the run."""
        return self.start + self.count * self.length

    @property
    def segments(self) -> list[Span]:
        """Span of each segment."""
        return [(start, start + self.length) for start in range(self.start, self.stop, self.length)]


@dataclass(frozen=True)
class Segments:
    """Runs of one packed row in the order of their tokens; each token is in exactly one."""

    runs: tuple[Run, ...]

    @cached_property
    def _before(self) -> dict[Span, Span | None]:
        """Parent of each segment."""
        return {span: run.prefix for run in self.runs for span in run.segments}

    def seen_by(self, run: Run) -> list[Span]:
        """Ancestors of a run, from the root on."""
        span, found = run.prefix, list[Span]()
        while span is not None:
            found.append(span)
            span = self._before.get(span)
        return found[::-1]

    @cached_property
    def levels(self) -> tuple[tuple[Crossing, ...], ...]:
        """Pairs of queries and an ancestor, by the ancestor's depth: a token is a query once per level."""
        found: list[list[Crossing]] = []
        for run in self.runs:
            for depth, span in enumerate(self.seen_by(run)):
                if depth == len(found):
                    found.append([])
                level, first = found[depth], run.start
                if level and level[-1][1:] == (run.start, span):
                    first = level.pop()[0]
                level.append((first, run.stop, span))
        return tuple(map(tuple, found))

    @property
    def crossings(self) -> Iterator[Crossing]:
        """Pairs of all levels."""
        return chain.from_iterable(self.levels)


def by_sdpa(
    query: Float[Tensor, "1 heads tokens size"],
    key: Float[Tensor, "1 key_heads tokens size"],
    value: Float[Tensor, "1 key_heads tokens size"],
    segments: Segments,
    scale: float,
) -> Float[Tensor, "1 tokens heads size"]:
    """Compute the attention by torch's public SDPA on any device; copies a prefix's keys once per segment."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    pieces = []
    for run in segments.runs:
        q, k, v = (_split(x, run.start, run.count, run.length) for x in (query, key, value))
        spans = segments.seen_by(run)
        if not spans:
            piece = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            k, v = (
                torch.cat([*(x[:, :, slice(*s)].expand(run.count, -1, -1, -1) for s in spans), own], dim=2)
                for x, own in ((key, k), (value, v))
            )
            bias: Any = causal_lower_right(run.length, k.shape[2])
            piece = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        pieces.append(piece.transpose(1, 2).reshape(1, run.count * run.length, *piece.shape[1::2]))
    return torch.cat(pieces, dim=1)


def _split(x: Float[Tensor, "1 heads tokens size"], start: int, count: int, length: int) -> Tensor:
    """View consecutive segments as [count, heads, length, size]."""
    return x[0, :, start : start + count * length].unflatten(1, (count, length)).transpose(0, 1)


# On a CPU: torch's flash kernel, run by run and prompt by prompt.


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, scale=scale
    )


def _queries(x: Tensor, start: int, count: int, length: int, key_heads: int) -> Tensor:
    """View segments of [1, heads, tokens, size] as [batch, heads, length, size], with GQA's key heads in the batch."""
    x = _split(x, start, count, length)
    return x if x.shape[1] == key_heads else x.unflatten(1, (key_heads, -1)).flatten(0, 1)


def _keys(x: Tensor, start: int, count: int, length: int, repeats: int) -> Tensor:
    x = _split(x, start, count, length)
    return x if repeats == 1 else x.flatten(0, 1)[:, None].expand(-1, repeats, -1, -1)


def _as_tokens(x: Tensor, count: int) -> Tensor:
    """View [batch, heads, length, size] of `_queries` or `_keys` as [heads, count, length, size]."""
    return (x if x.shape[0] == count else x.unflatten(0, (count, -1)).flatten(1, 2)).transpose(0, 1)


def _summed(grad: Tensor, repeats: int) -> Tensor:
    """Sum the gradients of the copies of keys."""
    return grad if repeats == 1 else grad.sum(dim=1, keepdim=True)


class MergedAttention(torch.autograd.Function):
    """softmax(q k) v over `segments`; returns [1, tokens, heads, size]."""

    @staticmethod
    def forward(  # noqa: D102 (torch's own)
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
    ) -> Tensor:
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
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: D102
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
    """q, k, v, gradient, output, log-sum-exp for one call of the backward kernel."""
    repeats = query.shape[1] // key_heads
    q, g, o, norm = (_queries(x, *asking, key_heads) for x in (query, grad, out, lse))
    k, v = (_keys(x, *answering, repeats) for x in (key, value))
    return q, k, v, g, o, norm[..., 0].contiguous()
