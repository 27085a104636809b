r"""From a loss per token to the scalar that is minimised, with the denominators of the whole optimizer step.

Each function returns one micro-batch's share of the step's loss: its numerator over a denominator that counts all
micro-batches of the accumulation window on all processes. Shares add up to the step's loss, so the gradient does not
depend on how the same completions are split over processes, micro-batches and accumulation steps.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from grpo_ext.objective.options import Count
from grpo_ext.objective.ratios import active_tokens
from grpo_ext.registry import Registry


@dataclass(frozen=True)
class AggregationTraits:
    """Properties of an aggregation that other modules use."""

    additive: bool = False
    """True if a step's loss does not depend on how its rows are split, so that they may be regrouped."""
    local: bool = False
    """True if it depends on the split by definition."""
    token_mean: bool = False
    """True if a completion counts by its length."""
    completion_mean: bool = False
    """True if every completion counts the same."""


aggregations: Registry = Registry("loss_aggregation", AggregationTraits)


class StepTotals(NamedTuple):
    """Totals of one optimizer step over all processes: the denominators."""

    tokens: Tensor
    """Live completion tokens."""
    sequences: Tensor
    """Completions that have an active token."""
    micro_batches: Tensor
    """Forward passes."""


def step_totals(masks: list[Shaped[Tensor, "_ _"]]) -> StepTotals:
    """Count one process's micro-batches (of any shapes); the caller sums over processes."""
    active = [mask.bool() for mask in masks]
    return StepTotals(
        tokens=torch.stack([m.sum() for m in active]).sum(),
        sequences=torch.stack([m.any(dim=-1).sum() for m in active]).sum(),
        micro_batches=torch.tensor(len(active), device=active[0].device),
    )


def token_sums(
    per_token_loss: Float[Tensor, " batch #time"], mask: Shaped[Tensor, "batch time"]
) -> Float[Tensor, " batch"]:
    """Sum over the active tokens of each completion; values under the mask are ignored."""
    return torch.where(mask.bool(), per_token_loss, torch.zeros_like(per_token_loss)).sum(dim=-1)


@aggregations.register("seq-mean-token-mean", additive=True, completion_mean=True)
def seq_mean_token_mean(
    per_token_loss: Float[Tensor, " batch #time"], mask: Shaped[Tensor, "batch time"], totals: StepTotals
) -> Float[Tensor, ""]:
    r"""(1/B) sum_i (1/n_i) sum_t loss_it: every completion counts the same. GRPO, arXiv:2402.03300."""
    n = active_tokens(mask, per_token_loss.dtype).squeeze(-1)
    return (token_sums(per_token_loss, mask) / n).sum() / totals.sequences.clamp(min=1)


@aggregations.register("token-mean", additive=True, token_mean=True)
def token_mean(
    per_token_loss: Float[Tensor, " batch #time"], mask: Shaped[Tensor, "batch time"], totals: StepTotals
) -> Float[Tensor, ""]:
    r"""(1/N) sum_it loss_it, N the active tokens of the step: every token counts the same. DAPO, arXiv:2503.14476."""
    return token_sums(per_token_loss, mask).sum() / totals.tokens.clamp(min=1)


@aggregations.register("seq-mean-token-sum", additive=True)
def seq_mean_token_sum(
    per_token_loss: Float[Tensor, " batch #time"], mask: Shaped[Tensor, "batch time"], totals: StepTotals
) -> Float[Tensor, ""]:
    r"""(1/B) sum_i sum_t loss_it: a completion is one action. RLOO, arXiv:2402.14740."""
    return token_sums(per_token_loss, mask).sum() / totals.sequences.clamp(min=1)


@aggregations.register("seq-mean-token-sum-norm", additive=True)
def seq_mean_token_sum_norm(
    per_token_loss: Float[Tensor, " batch #time"],
    mask: Shaped[Tensor, "batch time"],
    totals: StepTotals,
    *,
    max_completion_length: Count,
) -> Float[Tensor, ""]:
    r"""(1/B) sum_i sum_t loss_it / L_max, L_max the generation limit. Dr. GRPO, arXiv:2503.20783."""
    return seq_mean_token_sum(per_token_loss, mask, totals) / max_completion_length


@aggregations.register("micro-batch-token-mean", local=True, token_mean=True)
def micro_batch_token_mean(
    per_token_loss: Float[Tensor, " batch #time"], mask: Shaped[Tensor, "batch time"], totals: StepTotals
) -> Float[Tensor, ""]:
    r"""Token mean over each micro-batch, averaged over micro-batches (TRL's `bnpo`).

    By definition it depends on the micro-batch size; `token-mean` does not.
    """
    tokens = mask.bool().sum().clamp(min=1).to(per_token_loss.dtype)
    return token_sums(per_token_loss, mask).sum() / tokens / totals.micro_batches.clamp(min=1)
