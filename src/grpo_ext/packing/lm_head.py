"""Log-probabilities and entropies of labelled positions, where TRL's fused LM head has no kernel for them.

That is on a CPU, and over the tokens that a truncated sampler kept.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from trl.trainer import utils

from grpo_ext.config.temporary import temporarily
from grpo_ext.packing.sampling_support import SamplingSupport

CHUNK_BYTES = 2**28
"""Most bytes of logits at a time, in the precision of their product. A single chunk is kept for the backward."""
BLOCK = 2**25
"""Logits whose softmax is computed at a time, in float32."""
CPU_BLOCK = 2**19
"""The same on a CPU: a few rows, which its cache holds."""
PRODUCT = 2**22
"""Numbers of a weight's gradient that are computed at a time where it is added up in a wider precision."""
LEFT_OUT = -1e9
"""Log-probability of a token outside of the set: it has no probability, and no product with it is NaN."""


def gather_trained_head(base: PreTrainedModel) -> None:
    """Let FSDP2 gather a trained output embedding once the body has run.

    TRL's LM head reads its weight without calling it. Of one that is still split, each process would get the gradient
    of its own rows only; accelerate gathers it together with the last norm, where that lies beside the layers.
    """

    def gather(module: nn.Module, args: object, output: object) -> None:
        head = base.get_output_embeddings()
        if torch.is_grad_enabled() and head is not None and any(p.requires_grad for p in head.parameters()):
            for part in head.modules():
                if isinstance(part, FSDPModule):
                    part.unshard()

    base.base_model.register_forward_hook(gather)


class LabelledLogProbs(torch.autograd.Function):
    """log p(label) and entropy of softmax(cap(scale x W^T) / T), chunk by chunk; arguments as TRL's.

    With `support`, softmax and entropy are over the tokens of each position's set.
    """

    @staticmethod
    def forward(  # noqa: D102 (torch's own)
        ctx: Any,
        hidden: Float[Tensor, "positions hidden"],
        weight: Float[Tensor, "vocabulary hidden"],
        bias: Float[Tensor, " vocabulary"] | None,
        labels: Int[Tensor, " positions"],
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        scale: float = 1.0,
        outputs: tuple[str, ...] = (),
        support: SamplingSupport | None = None,
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        ctx.set_materialize_grads(False)
        ctx.form = Form.of(hidden, temperature, softcap, scale, support)
        dtype = ctx.form.dtype
        logps = torch.empty(len(hidden), dtype=ctx.form.exact, device=hidden.device)
        entropies = torch.empty_like(logps) if "entropy" in outputs else None
        head, whole = head_of(weight, bias, dtype), []
        for rows in chunks(hidden, weight, dtype):
            logits = nn.functional.linear(hidden[rows].to(dtype), *head)
            for part in blocks(rows, logits):
                log_p, _ = log_softmax(logits, rows, part, ctx.form)
                logps[part] = log_p.gather(1, labels[part, None])[:, 0]
                if entropies is not None:
                    entropies[part] = -log_p.exp().mul_(log_p).sum(dim=1)
            if len(logits) == len(hidden) and any(ctx.needs_input_grad):
                whole.append(logits)
            del logits  # a chunk at a time
        ctx.save_for_backward(hidden, weight, bias, labels, entropies, *whole)
        return logps, entropies, None, None, None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: D102
        _, weight, bias, *_ = ctx.saved_tensors
        with utils.maybe_gather_lm_head_ctx(weight, bias):  # under ZeRO 3 they are sharded again after the forward
            return LabelledLogProbs._backward(ctx, *grads)

    @staticmethod
    def _backward(ctx: Any, *grads: Tensor) -> Any:
        grad_logps, grad_entropies, *_ = grads
        hidden, weight, bias, labels, entropies, *whole = ctx.saved_tensors
        dtype, exact = ctx.form.dtype, ctx.form.exact
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        head = head_of(weight, bias, dtype)
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        d_bias = torch.zeros_like(bias, dtype=exact) if wants_bias else None
        for rows in chunks(hidden, weight, dtype):
            logits = whole[0] if whole else nn.functional.linear(hidden[rows].to(dtype), *head)
            d_logits = torch.empty_like(logits) if whole else logits
            for part in blocks(rows, logits):
                log_p, slope = log_softmax(logits, rows, part, ctx.form)
                grad = _logit_gradient(
                    log_p,
                    labels[part],
                    None if grad_logps is None else grad_logps[part],
                    None if grad_entropies is None else grad_entropies[part],
                    None if entropies is None else entropies[part],
                )
                grad = (grad if slope is None else grad * slope).mul_(ctx.form.scale / ctx.form.temperature)
                if d_bias is not None:
                    d_bias += grad.sum(dim=0)
                d_logits[within(part, rows)] = grad
            if d_hidden is not None:
                d_hidden[rows] = (d_logits @ head[0]).to(hidden.dtype)
            if d_weight is not None:
                add_product(d_weight, d_logits, hidden[rows].to(dtype))
            del logits, d_logits
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden, d_weight, None if d_bias is None else d_bias.to(bias.dtype), *[None] * 7


def add_product(
    total: Float[Tensor, "vocabulary hidden"],
    left: Float[Tensor, "positions vocabulary"],
    right: Float[Tensor, "positions hidden"],
) -> None:
    """Add left^T right to `total`; a product in 16 bits is added a block at a time, and never there whole."""
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
        return
    rows = max(1, PRODUCT // total.shape[1])
    for first in range(0, len(total), rows):
        part = slice(first, first + rows)
        total[part] += left[:, part].T @ right


class Form(NamedTuple):
    """How log-probabilities come from logits."""

    dtype: torch.dtype
    temperature: float
    softcap: float | None
    scale: float
    support: SamplingSupport | None

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        temperature: float,
        softcap: float | None,
        scale: float,
        support: SamplingSupport | None = None,
    ) -> "Form":
        """Return the form of a forward, whose products are in autocast's precision."""
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        return cls(dtype, temperature, softcap, scale, support)

    @property
    def exact(self) -> torch.dtype:
        """Precision of all but the products."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def head_of(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of an LM head in the precision of its product."""
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def chunk_size(positions: int, vocabulary: int, width: int) -> int:
    """Return the number of positions whose logits, of `width` bytes a number, are computed at a time."""
    count = -(-positions * vocabulary * width // CHUNK_BYTES)
    return max(1, -(-positions // max(1, count)))


def chunks(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Iterator[slice]:
    """Yield the positions whose logits are computed at a time."""
    positions = len(hidden)
    size = chunk_size(positions, len(weight), dtype.itemsize)
    for start in range(0, positions, size):
        yield slice(start, min(start + size, positions))


def blocks(rows: slice, logits: Tensor) -> Iterator[slice]:
    """Positions of a chunk whose softmax is computed at a time."""
    size = max(1, (CPU_BLOCK if logits.device.type == "cpu" else BLOCK) // logits.shape[1])
    for start in range(rows.start, rows.stop, size):
        yield slice(start, min(start + size, rows.stop))


def within(part: slice, rows: slice) -> slice:
    """Return the place of positions in the chunk `rows`."""
    return slice(part.start - rows.start, part.stop - rows.start)


def log_softmax(chunk: Tensor, rows: slice, part: slice, form: Form) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [positions, vocabulary] of a part of a chunk, and the slope of the soft cap."""
    logits, slope = chunk[within(part, rows)].to(form.exact, copy=True), None
    logits = logits.mul_(form.scale) if form.scale != 1.0 else logits
    if form.softcap is not None:
        bent = torch.tanh(logits / form.softcap)
        logits, slope = bent * form.softcap, 1 - bent * bent
    logits = logits.div_(form.temperature) if form.temperature != 1.0 else logits
    if form.support is not None:
        logits = logits.masked_fill_(form.support.left_out(part, logits.shape[1]), LEFT_OUT)
    return torch.log_softmax(logits, dim=-1), slope


def _logit_gradient(
    log_p: Tensor, labels: Tensor, grad_logps: Tensor | None, grad_entropies: Tensor | None, entropies: Tensor | None
) -> Tensor:
    """d log p_y / d z_j = 1[j = y] - p_j;  d H / d z_j = -p_j (log p_j + H)."""
    grad = log_p.exp()
    if grad_entropies is not None and entropies is not None:
        share = (log_p + entropies[:, None]).mul_(grad_entropies[:, None])
        grad.mul_((share if grad_logps is None else share.add_(grad_logps[:, None])).neg_())
    elif grad_logps is not None:
        grad.mul_(-grad_logps[:, None])
    if grad_logps is not None:
        grad.scatter_add_(1, labels[:, None], grad_logps[:, None].to(grad.dtype))
    return grad


def head_function(apply: Callable[..., Any]) -> AbstractContextManager[None]:
    """Let TRL's LM head call `apply` in place of its autograd function, for a `with` block."""
    return temporarily(utils, _ChunkedLogProbFunction=SimpleNamespace(apply=apply))


def labelled_positions_only(
    device: torch.device, support: Callable[[int], SamplingSupport] | None = None
) -> AbstractContextManager[None]:
    """Make TRL's fused LM head compute through `LabelledLogProbs` where it would run tile by tile in torch.

    Args:
        device: of the LM head.
        support: returns the sets of a forward's positions from their number; then on any device.
    """
    if support is not None:

        def apply(hidden: Tensor, *args: Any) -> Any:
            return LabelledLogProbs.apply(hidden, *args, support(len(hidden)))

        return head_function(apply)
    if device.type != "cpu":
        return nullcontext()
    return head_function(LabelledLogProbs.apply)
