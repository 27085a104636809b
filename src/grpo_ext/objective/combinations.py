"""Several reward functions: from rewards [groups, completions, functions] and weights to advantages."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_ext.objective.advantages import Rewards, _std, evened, extremes, only_signal
from grpo_ext.registry import Registry

combinations: Registry = Registry("multi_objective_aggregation")
FunctionRewards = Float[Tensor, "groups completions functions"]
Advantages = Rewards | Float[Tensor, "groups completions time"]
Estimator = Callable[[Rewards, int], Advantages]
"""An estimator with its options bound; the integer is the column of the history that belongs to these rewards."""


def weighted_total(rewards: FunctionRewards, weights: Float[Tensor, " functions"], *, missing: str) -> Rewards:
    r"""sum_k w_k r_k; NaN where no function scored the completion.

    A function that returned None for a completion is left out. With `missing="renormalize"` the others whose weights
    have its sign are scaled by sum |w| / sum of the |w| present: None is not a reward of 0, and a missing penalty
    does not raise the total of the others; a function of weight 0 is only logged. With `missing="zero"` None
    is a reward of 0 (stock TRL). Totals of a group that only rounding keeps apart become equal.
    """
    scored = ~rewards.isnan()
    if missing == "renormalize":
        scored = scored & (weights != 0)
        weights = _renormalized(rewards, weights)
    total = (rewards * weights).nansum(dim=-1)
    return _without_rounding(torch.where(scored.any(dim=-1), total, math.nan))


def _without_rounding(values: Rewards) -> Rewards:
    """Make the rewards of a group equal where only rounding keeps them apart."""
    highest, lowest = extremes(values)
    return evened(values, torch.maximum(highest.abs(), lowest.abs()))


def weighted_turns(
    turn_rewards: Float[Tensor, "groups completions functions turns"],
    rewards: FunctionRewards,
    weights: Float[Tensor, " functions"],
    *,
    missing: str,
) -> Float[Tensor, "groups completions turns"]:
    """Return the part of `weighted_total` that comes from turn rewards; NaN where there is no turn."""
    if missing == "renormalize":
        weights = _renormalized(rewards, weights)
    earned = (turn_rewards * weights[..., None]).nansum(dim=-2)
    return torch.where(turn_rewards.isnan().all(dim=-2), math.nan, earned)


def _renormalized(rewards: FunctionRewards, weights: Float[Tensor, " functions"]) -> FunctionRewards:
    """Weights of each completion's functions, scaled up for those of the same sign that did not score it."""
    scale = torch.ones_like(rewards)
    for sign in (weights > 0, weights < 0):
        size = weights.abs() * sign
        present = (~rewards.isnan() * size).sum(dim=-1, keepdim=True).clamp(min=1e-30)
        scale = torch.where(sign, size.sum() / present, scale)
    return weights * scale


@combinations.register("sum_then_normalize")
def sum_then_normalize(
    rewards: FunctionRewards,
    weights: Float[Tensor, " functions"],
    estimator: Estimator,
    *,
    missing: str = "renormalize",
) -> Advantages:
    """Apply the estimator to the weighted total."""
    return estimator(weighted_total(rewards, weights, missing=missing), -1)


@combinations.register("normalize_then_sum")
def normalize_then_sum(
    rewards: FunctionRewards,
    weights: Float[Tensor, " functions"],
    estimator: Estimator,
    *,
    eps: float = 1e-4,
    noise: float = 1e-2,
) -> Rewards:
    r"""Each function estimated alone, then the weighted sum, then (sum - mean) / (std + eps) over the batch.

    A batch in which no function's estimates have a std above `noise` holds no group with a real spread (one among
    thousands is enough) and is not scaled up again: stock TRL makes an advantage of 1.47 out of a reward of 1e-6.
    Sums of a group that only the rounding of its rewards keeps apart become equal: rewards that cancel have no signal.

    GDPO, arXiv:2601.05242.
    """
    # the rounding of one function, scaled up, would drown another's signal
    rewards = torch.stack([_without_rounding(values) for values in rewards.unbind(dim=-1)], dim=-1)
    columns = torch.stack([estimator(rewards[..., k], k) for k in range(rewards.shape[-1])])
    spread = torch.stack([_std(column, ddof=1) > noise for column in columns])
    scorable = ~rewards.isnan().all(dim=-1)
    total = torch.where(scorable, (columns * weights[:, None, None]).sum(dim=0), math.nan)
    total = evened(total, _estimated_sizes(rewards, columns, weights))
    centred = total - total.nanmean()
    whitened = centred / (_std(total, ddof=1) + eps)
    return only_signal(torch.where((spread & (weights != 0)).any(), whitened, centred), total)


def _estimated_sizes(
    rewards: FunctionRewards,
    columns: Float[Tensor, "functions groups completions"],
    weights: Float[Tensor, " functions"],
) -> Float[Tensor, " groups"]:
    """Size of a group's rewards after the scaling of an estimator, which scales their rounding too."""
    sizes = torch.zeros_like(rewards[:, 0, 0])
    for values, column, weight in zip(rewards.unbind(dim=-1), columns, weights.abs(), strict=True):
        (highest, lowest), (top, bottom) = extremes(values), extremes(column)
        size = torch.maximum(highest.abs(), lowest.abs()) * (top - bottom) / (highest - lowest)
        sizes = sizes + weight * torch.where(highest > lowest, size, 0.0)
    return sizes


@combinations.register("average_advantages")
def average_advantages(
    rewards: FunctionRewards, weights: Float[Tensor, " functions"], estimator: Estimator
) -> Advantages:
    r"""sum_k w_k A_k / sum_k |w_k|, each A_k estimated from its own function's rewards. BNPO, arXiv:2506.02864."""
    columns = [estimator(rewards[..., k], k) * weights[k] for k in range(rewards.shape[-1])]
    return torch.stack(columns).sum(dim=0) / weights.abs().sum().clamp(min=1e-30)
