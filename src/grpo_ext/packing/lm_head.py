"""Log-probabilities and entropies of labelled positions, where TRL's fused LM head has no kernel for them.

That is on a CPU, and over the tokens that a truncated sampler kept.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from trl.trainer import utils

from grpo_ext.config.temporary import temporarily
from grpo_ext.packing.kept import KeptSets

CHUNK = 2**25
"""Largest number of logits computed at a time; if one chunk suffices, the forward keeps it for the backward."""
LEFT_OUT = -1e9
"""Log-probability of a token outside of the set: it has no probability, and no product with it is NaN."""


def gather_trained_head(base: PreTrainedModel) -> None:
    """Let FSDP2 gather a trained output embedding once the body has run.

    TRL's LM head reads its weight without calling it. Of one that is still split, each process would get the gradient
    of its own rows only; accelerate gathers it together with the last norm, where that lies beside the layers.
    """

    def gather(module: nn.Module, args: object, found: object) -> None:
        head = base.get_output_embeddings()
        if torch.is_grad_enabled() and head is not None and any(p.requires_grad for p in head.parameters()):
            for part in head.modules():
                if isinstance(part, FSDPModule):
                    part.unshard()

    base.base_model.register_forward_hook(gather)


class LabelledLogProbs(torch.autograd.Function):
    """log p(label) and entropy of softmax(cap(scale x W^T) / T), chunk by chunk; arguments as TRL's.

    With `kept`, softmax and entropy are over the tokens of each position's set.
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
        kept: KeptSets | None = None,
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        ctx.set_materialize_grads(False)
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.form, ctx.sets = (dtype, temperature, softcap, scale), kept
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        logps = torch.empty(len(hidden), dtype=exact, device=hidden.device)
        entropies = torch.empty_like(logps) if "entropy" in outputs else None
        whole = []
        for rows in _chunks(len(hidden), len(weight)):
            log_p = _log_softmax(hidden[rows], weight, bias, _left_out(kept, rows, weight), *ctx.form)[0]
            logps[rows] = log_p.gather(1, labels[rows, None])[:, 0]
            if entropies is not None:
                entropies[rows] = -log_p.exp().mul_(log_p).sum(dim=1)
            if len(log_p) == len(hidden) and any(ctx.needs_input_grad):
                whole.append(log_p)
            del log_p  # a chunk at a time
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
        dtype, temperature, softcap, scale = ctx.form
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        matrix = weight.to(dtype)
        accumulated = torch.float64 if dtype == torch.float64 else torch.float32
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight: Tensor | None = None
        d_bias = torch.zeros_like(bias, dtype=accumulated) if wants_bias else None
        for rows in _chunks(len(hidden), len(weight)):
            if whole and softcap is None:
                log_p, slope = whole[0], None
            else:
                left_out = _left_out(ctx.sets, rows, weight)
                log_p, slope = _log_softmax(hidden[rows], weight, bias, left_out, *ctx.form)
            grad = _logit_gradient(
                log_p,
                labels[rows],
                None if grad_logps is None else grad_logps[rows],
                None if grad_entropies is None else grad_entropies[rows],
                None if entropies is None else entropies[rows],
            )
            grad = (grad if slope is None else grad * slope).mul_(scale / temperature)
            if d_bias is not None:
                d_bias += grad.sum(dim=0)
            grad = grad.to(dtype)
            if d_hidden is not None:
                d_hidden[rows] = (grad @ matrix).to(hidden.dtype)
            if wants_weight and d_weight is None:
                d_weight = (grad.T @ hidden[rows].to(dtype)).to(accumulated)
            elif d_weight is not None and dtype == accumulated:
                d_weight.addmm_(grad.T, hidden[rows].to(dtype))
            elif d_weight is not None:
                d_weight += (grad.T @ hidden[rows].to(dtype)).to(accumulated)
            del log_p, slope, grad
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden, d_weight, None if d_bias is None else d_bias.to(bias.dtype), *[None] * 7


def _chunks(positions: int, vocabulary: int) -> Iterator[slice]:
    count = -(-positions * vocabulary // CHUNK)
    size = max(1, -(-positions // max(1, count)))
    for start in range(0, positions, size):
        yield slice(start, start + size)


def _left_out(kept: KeptSets | None, rows: slice, weight: Tensor) -> Tensor | None:
    return None if kept is None else kept.left_out(rows, len(weight))


def _log_softmax(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    left_out: Tensor | None,
    dtype: torch.dtype,
    temperature: float,
    softcap: float | None,
    scale: float,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [positions, vocabulary], and the slope of the soft cap."""
    logits = torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits, slope = logits.mul_(scale) if scale != 1.0 else logits, None
    if softcap is not None:
        bent = torch.tanh(logits / softcap)
        logits, slope = bent * softcap, 1 - bent * bent
    logits = logits.div_(temperature) if temperature != 1.0 else logits
    if left_out is not None:
        logits = logits.masked_fill_(left_out, LEFT_OUT)
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


class _Head(NamedTuple):
    """Stands in for the autograd function that TRL's LM head calls."""

    apply: Callable[..., Any]


def labelled_positions_only(
    device: torch.device, kept: Callable[[int], KeptSets] | None = None
) -> AbstractContextManager[None]:
    """Make TRL's fused LM head compute through `LabelledLogProbs` where it would run tile by tile in torch.

    Args:
        device: of the LM head.
        kept: returns the sets of a forward's positions from their number; then on any device.
    """
    if kept is not None:

        def apply(hidden: Tensor, *args: Any) -> Any:
            return LabelledLogProbs.apply(hidden, *args, kept(len(hidden)))

        return temporarily(utils, _ChunkedLogProbFunction=_Head(apply))
    if device.type != "cpu":
        return nullcontext()
    return temporarily(utils, _ChunkedLogProbFunction=LabelledLogProbs)
