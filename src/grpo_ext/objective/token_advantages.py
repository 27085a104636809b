r"""Estimators that look into the completions: at their tokens, log-probabilities and entropies.

Notation and inputs as in `advantages`; n are the active tokens of a completion.
"""

import math
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_ext.objective.advantages import LogMetric, Mask, Rewards, _centred, _std, estimators, none, only_signal
from grpo_ext.objective.options import NotNegative, Within

Tokens = Float[Tensor, "groups completions time"]
Ids = Int[Tensor, "groups completions time"]
Live = Bool[Tensor, "groups completions time"]
Temperature = Annotated[float, Within(above=0.0, because="it divides the scores")]


@estimators.register("gtpo", per_token=True)
def gtpo(
    rewards: Rewards,
    mask: Mask,
    completion_ids: Ids,
    entropies: Tokens,
    log_metric: LogMetric | None = None,
    *,
    conflict_weight: NotNegative = 2.0,
    entropy_coef: NotNegative = 0.1,
    entropy_limit: NotNegative | None = 0.6931471805599453,
) -> Tokens:
    r"""(r - mean - entropy_coef H) lambda_t, and 0 for a completion with H > entropy_limit; H its mean entropy.

    A token conflicts where a completion of the group on the other side of the mean has the same id at the same place.
    The unbroken run of conflicting tokens from the first on, and likewise that up to the last, with places counted
    from there, have lambda = conflict_weight above the mean and 0 below it; all other tokens have 1. A token of both
    runs has both factors. Places count the policy's own tokens, not those of tools.

    Logs `advantages/gtpo_filtered`, the share of completions above `entropy_limit`, ln 2. The paper has this filter
    only where the entropy before training is below ln 2: else set `entropy_limit: null`. In the authors' code a group
    of equal rewards has -entropy_coef H, here no signal; their code divides the loss of a completion by its number of
    conflicting tokens, which their formula does not. GTPO, arXiv:2508.03772.
    """
    active, centred = mask.bool(), only_signal(none(rewards), rewards)
    side = centred.sign()[..., None]
    weights = torch.ones_like(centred[..., None].expand(mask.shape))
    for backward in (False, True):
        conflicts = conflict_runs(completion_ids, active, side, backward=backward)
        weights = weights * torch.where(conflicts, torch.where(side > 0, conflict_weight, 0.0), 1.0)
    entropy = torch.where(active, entropies.to(rewards.dtype), 0.0).sum(dim=-1) / active.sum(dim=-1).clamp(min=1)
    shaped = centred - entropy_coef * entropy
    kept = entropy <= (math.inf if entropy_limit is None else entropy_limit)
    if log_metric is not None:
        log_metric("advantages/gtpo_filtered", (~kept).double().mean().item())
    shaped = torch.where(kept, shaped, 0.0)
    return torch.where(active, shaped[..., None] * weights, 0.0)


def conflict_runs(ids: Ids, active: Live, side: Float[Tensor, "groups completions 1"], *, backward: bool) -> Live:
    """Return the unbroken run of conflicting tokens that each completion begins with, or ends with if `backward`.

    `side` is 1 above the mean, -1 below it and 0 for a completion that takes no part.
    """
    if backward:
        return conflict_runs(ids.flip(-1), active.flip(-1), side, backward=False).flip(-1)
    order = (~active).long().argsort(dim=-1, stable=True)  # active tokens first
    ids, active = ids.gather(-1, order), active.gather(-1, order)
    conflicts = torch.zeros_like(active)
    for other in range(ids.shape[1]):
        its = slice(other, other + 1)
        conflicts |= (side * side[:, its] < 0) & active & active[:, its] & (ids == ids[:, its])
    runs = conflicts.long().cumprod(dim=-1).bool()
    return torch.zeros_like(active).scatter(-1, order, runs)


@estimators.register("tpo", sums_to_zero=True)
def tpo(rewards: Rewards, mask: Mask, per_token_logps: Tokens, *, eta: Temperature = 1.0) -> Rewards:
    r"""G (q - p): p = softmax of log pi(o) within the group, q = softmax of log p + u / eta, u = (r - mean) / std.

    With surrogate and aggregation of the row `tpo` the gradient is that of the cross-entropy -sum_i q_i log p_i, for
    the first update of a generation: after it the paper computes p again and keeps q, while here both stay. The
    std is the population's. A completion without an active token takes no part. Target Policy Optimization,
    arXiv:2604.06159.
    """
    active = mask.bool()
    counted = active.any(dim=-1) & ~rewards.isnan()
    scores = torch.where(counted, rewards, math.nan)
    std = _std(scores, 0, dim=-1)[:, None]
    u = torch.where(counted & (std > 0), _centred(scores) / std, 0.0)
    logps = torch.where(active, per_token_logps.to(rewards.dtype), 0.0).sum(dim=-1)
    log_p = torch.where(counted, logps, -math.inf).log_softmax(dim=-1)
    change = counted.sum(dim=-1, keepdim=True) * ((log_p + u / eta).softmax(dim=-1) - log_p.exp())
    return torch.where(counted, change, 0.0)


@estimators.register("iw_opd", group_baseline=False, per_token=True)
def iw_opd(
    rewards: Rewards,
    mask: Mask,
    ref_per_token_logps: Tokens,
    old_per_token_logps: Tokens,
    *,
    gamma: NotNegative = 0.5,
) -> Tokens:
    r"""w_t a_t with a_t = l_ref - l_old: distillation from the reference, of whose gap early tokens count more.

    w_t = 1 + gamma (1 - sum_{s < t} |a_s| / sum_s |a_s|), as in `prefix_weights`; gamma 0 is on-policy distillation.
    The rewards have no part in it, but a completion that could not be scored has none either. IW-OPD,
    arXiv:2606.22600.
    """
    active = mask.bool()
    gaps = torch.where(active, (ref_per_token_logps - old_per_token_logps).to(rewards.dtype), 0.0)
    return torch.where(active, prefix_weights(gaps, gamma) * gaps, 0.0)


def prefix_weights(gaps: Tensor, gamma: float) -> Tensor:
    r"""w_t = 1 + gamma (1 - sum_{s < t} |a_s| / sum_s |a_s|) along the last axis of gaps a, 0 where not active.

    From 1 + gamma at the first token down to 1: the further teacher and student have come apart before a token, the
    less the teacher knows about it. IW-OPD, arXiv:2606.22600.
    """
    sizes = gaps.abs()
    before = sizes.cumsum(dim=-1) - sizes
    return 1 + gamma * (1 - before / sizes.sum(dim=-1, keepdim=True).clamp(min=1e-30))
