"""Segments of a packed row, a tree in which each sees itself and its ancestors, and attention over them by SDPA."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
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
Where = tuple[int, int, int]
"""(first token, count, length) of consecutive slices."""


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
    def where(self) -> "Where":
        """Its segments as slices."""
        return self.start, self.count, self.length

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

    def seen_by(self, run: Run, window: int | None = None) -> list[Span]:
        """Ancestors of a run, from the root on; with a window the tokens of them that its first token sees."""
        span, spans = run.prefix, list[Span]()
        left = math.inf if window is None else window - 1
        while span is not None and left > 0:
            begin, end = span
            spans.append((max(begin, end - int(min(left, end))), end))
            left -= end - begin
            span = self._before.get(span)
        return spans[::-1]

    @cached_property
    def longest(self) -> int:
        """Number of tokens on the longest path."""
        return max(run.length + sum(end - begin for begin, end in self.seen_by(run)) for run in self.runs)

    @cached_property
    def levels(self) -> tuple[tuple[Crossing, ...], ...]:
        """Pairs of queries and an ancestor, by the ancestor's depth: a token is a query once per level."""
        levels: list[list[Crossing]] = []
        for run in self.runs:
            for depth, span in enumerate(self.seen_by(run)):
                if depth == len(levels):
                    levels.append([])
                level, first = levels[depth], run.start
                if level and level[-1][1:] == (run.start, span):
                    first = level.pop()[0]
                level.append((first, run.stop, span))
        return tuple(map(tuple, levels))

    @property
    def crossings(self) -> Iterator[Crossing]:
        """Pairs of all levels."""
        return chain.from_iterable(self.levels)


BLOCK = 128
"""Fewest queries of one call over a window, where a segment is longer than its window."""


def blocks(length: int, window: int | None) -> list[Span]:
    """Split a segment so that a block of its queries sees at most about twice as many keys as it needs."""
    size = length if window is None or length <= window else max(window, BLOCK)
    return [(first, min(first + size, length)) for first in range(0, length, size)]


def chunks(before: int, length: int, size: int) -> list[Span]:
    """Split a segment after `before` tokens at the positions that are multiples of `size`."""
    inner = range(size - before % size, length, size)
    return list(pairwise([0, *inner, length]))


def by_sdpa(
    query: Float[Tensor, "1 heads tokens size"],
    key: Float[Tensor, "1 key_heads tokens size"],
    value: Float[Tensor, "1 key_heads tokens size"],
    segments: Segments,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    chunk: int | None = None,
) -> Float[Tensor, "1 tokens heads size"]:
    """Compute the attention by torch's public functions on any device; copies the keys of ancestors once per segment.

    `window` and `chunk` as in `windows.Window`; at most one is given. `softcap` bounds the scores, and `sinks` are
    scores of one more key for each query, whose value is zero; with either the scores are computed as a matrix, as in
    transformers' eager attention.
    """
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    pieces = []
    for run in segments.runs:
        q, own_k, own_v = (split(x, *run.where) for x in (query, key, value))
        spans = segments.seen_by(run, window)
        k, v = (
            torch.cat([*(x[:, :, slice(*s)].expand(run.count, -1, -1, -1) for s in spans), own], dim=2)
            if spans
            else own
            for x, own in ((key, own_k), (value, own_v))
        )
        before, parts = k.shape[2] - run.length, []
        for first, last in blocks(run.length, window) if chunk is None else chunks(before, run.length, chunk):
            begin = 0 if window is None else max(0, before + first - window + 1)
            begin = begin if chunk is None else (before + first) // chunk * chunk
            seen = k[:, :, begin : before + last], v[:, :, begin : before + last]
            parts.append(_attend(q[:, :, first:last], *seen, scale, window, softcap, sinks))
        piece = torch.cat(parts, dim=2)
        pieces.append(piece.transpose(1, 2).reshape(1, run.count * run.length, *piece.shape[1::2]))
    return torch.cat(pieces, dim=1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend from the last positions of [batch, heads, keys, size], each to those before it within the window."""
    queries, keys = q.shape[2], k.shape[2]
    bounded = window is not None and keys > window
    if softcap is None and sinks is None and not bounded:
        bias: Any = causal_lower_right(queries, keys)
        causal = {"is_causal": True} if queries == keys else {"attn_mask": bias}
        return F.scaled_dot_product_attention(q, k, v, **causal, scale=scale)
    seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    if window is not None:
        seen = seen.triu(keys - queries - window + 1)
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    scores = q @ k.mT * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    shares = scores.softmax(-1, dtype=max(q.dtype, torch.float32, key=lambda d: d.itemsize)).to(v.dtype)
    return shares[..., :keys] @ v


def split(x: Float[Tensor, "1 heads tokens size"], start: int, count: int, length: int) -> Tensor:
    """View consecutive segments as [count, heads, length, size]."""
    return x[0, :, start : start + count * length].unflatten(1, (count, length)).transpose(0, 1)
