"""Attention over packed segments on CUDA, by torch's flash kernel over sequences of different lengths.

One causal call and one call for each level of prefixes, for any number of segments, merged as in `kernels`. Half
precision only, as the kernel.
"""

import logging
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from grpo_ext.packing.kernels import Crossing, Run, Segments, by_sdpa

logger = logging.getLogger(__name__)


Bounds = tuple[Tensor, Tensor, int, int]
"""Cumulative lengths of the sequences of queries and of keys, and the longest of each."""


class _Level(NamedTuple):
    """A call for prefixes of one depth."""

    bounds: Bounds
    asking: Tensor
    """Tokens after a prefix."""
    answering: Tensor
    """Tokens of the prefixes."""


class _Plan(NamedTuple):
    """The calls of one layout."""

    own: Bounds
    levels: list[_Level]


@lru_cache(maxsize=4)
def _plan(segments: Segments, device: torch.device) -> _Plan:
    def bounds(lengths: list[int]) -> tuple[Tensor, int]:
        return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device, torch.int32), max(lengths)

    def tokens(spans: list[tuple[int, int]]) -> Tensor:
        return torch.tensor([t for span in spans for t in range(*span)], dtype=torch.long, device=device)

    def both(queries: list[int], keys: list[int]) -> Bounds:
        (q, longest_q), (k, longest_k) = bounds(queries), bounds(keys)
        return q, k, longest_q, longest_k

    def level(crossings: tuple[Crossing, ...]) -> _Level:
        asking = [(first, last) for first, last, _ in crossings]
        answering = [prefix for *_, prefix in crossings]
        lengths = ([last - first for first, last in side] for side in (asking, answering))
        return _Level(both(*lengths), tokens(asking), tokens(answering))

    own = [run.length for run in segments.runs for _ in range(run.count)]
    return _Plan(both(own, own), [level(crossings) for crossings in segments.levels])


def flash_forward(
    q: Float[Tensor, "tokens heads size"],
    k: Float[Tensor, "tokens key_heads size"],
    v: Float[Tensor, "tokens key_heads size"],
    segments: Segments,
    scale: float,
) -> tuple[Float[Tensor, "tokens heads size"], Float[Tensor, "heads tokens"], list[Tensor]]:
    """Output, log-sum-exp, and the state that the backward kernel needs."""
    call = torch.ops.aten._flash_attention_forward
    p = _plan(segments, q.device)
    out, lse, *state, _ = call(q, k, v, *p.own, 0.0, True, False, scale=scale)
    for bounds, asking, answering in p.levels:
        of_level = q[asking], k[answering], v[answering]
        part, part_lse, *_ = call(*of_level, *bounds, 0.0, False, False, scale=scale)
        own_lse = lse[:, asking]
        share = torch.sigmoid(part_lse - own_lse).T[..., None]
        out[asking] = torch.lerp(out[asking].to(lse.dtype), part.to(lse.dtype), share).to(out.dtype)
        lse[:, asking] = torch.logaddexp(own_lse, part_lse)
    return out, lse, state


def flash_backward(
    grad: Float[Tensor, "tokens heads size"],
    q: Float[Tensor, "tokens heads size"],
    k: Float[Tensor, "tokens key_heads size"],
    v: Float[Tensor, "tokens key_heads size"],
    out: Float[Tensor, "tokens heads size"],
    lse: Float[Tensor, "heads tokens"],
    state: list[Tensor],
    segments: Segments,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v."""
    call = torch.ops.aten._flash_attention_backward
    p = _plan(segments, q.device)
    dq, dk, dv = call(grad, q, k, v, out, lse, *p.own, 0.0, True, *state, scale=scale)
    for bounds, asking, answering in p.levels:
        of_level = grad[asking], q[asking], k[answering], v[answering]
        merged = out[asking], lse[:, asking].contiguous()
        parts = call(*of_level, *merged, *bounds, 0.0, False, *state, scale=scale)
        for target, where, part in zip((dq, dk, dv), (asking, answering, answering), parts, strict=True):
            target.index_add_(0, where, part)
    return dq, dk, dv


class FlashAttention(torch.autograd.Function):
    """softmax(q k) v over `segments`; returns [1, tokens, heads, size]."""

    @staticmethod
    def forward(  # noqa: D102 (torch's own)
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
    ) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out, lse, state = flash_forward(q, k, v, segments, scale)
        ctx.save_for_backward(q, k, v, out, lse, *state)
        ctx.segments, ctx.scale = segments, scale
        return out[None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: D102
        q, k, v, out, lse, *state = ctx.saved_tensors
        input_grads = flash_backward(grads[0][0].contiguous(), q, k, v, out, lse, state, ctx.segments, ctx.scale)
        return *(x.transpose(0, 1)[None] for x in input_grads), None, None


EXAMPLE = Segments(
    (
        Run(0, 1, 150),
        Run(150, 1, 3),
        Run(153, 2, 40, (0, 150)),
        Run(233, 1, 200, (0, 150)),
        Run(433, 1, 50, (233, 433)),
        Run(483, 3, 2, (150, 153)),
        Run(489, 1, 20),
    )
)
"""Two prompts, completions shorter and longer than a tile of the kernel, one after another, and a plain row."""
TOLERANCE = 0.02
"""Relative error of values and gradients in the Euclidean norm; bfloat16 rounds to 0.004."""


@lru_cache(maxsize=8)
def flash_is_exact(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Return whether `FlashAttention` runs here and gives SDPA's values and gradients on `EXAMPLE`."""
    g = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(509, heads, size, generator=g).to(device, dtype) for heads in (4, 2, 2, 4))
    scale = size**-0.5
    try:
        with torch.no_grad():
            out, lse, state = flash_forward(q, k, v, EXAMPLE, scale)
            results = out, *flash_backward(grad, q, k, v, out, lse, state, EXAMPLE, scale)
        expected = _by_sdpa(q, k, v, grad, scale)
        off = max(((f - e).norm() / e.norm()).item() for f, e in zip(results, expected, strict=True))
        reason = f"it is off by {off:.2g}" if not off < TOLERANCE else None
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
    if reason is not None:
        logger.info("shared_prefix: SDPA instead of flash attention on %s in %s: %s", device, dtype, reason)
    return reason is None


@torch.enable_grad()
def _by_sdpa(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Output and gradients of q, k, v on `EXAMPLE` in float32, by torch's SDPA."""
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    query, key, value = (x.transpose(0, 1)[None] for x in leaves)
    with torch.autocast(q.device.type, enabled=False):
        out = by_sdpa(query, key, value, EXAMPLE, scale)[0]
    return out.detach(), *torch.autograd.grad(out, leaves, grad.float())
