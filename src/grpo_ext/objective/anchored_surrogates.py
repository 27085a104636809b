r"""Surrogates that pull the policy back to the one that sampled: for stale data and several updates a generation.

Notation and tensors as in `surrogates`. The pull has a gradient also where A = 0, so that rows of these surrogates may
not skip a completion without an advantage.
"""

from typing import Annotated

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from grpo_ext.objective.kl import k3
from grpo_ext.objective.options import Within
from grpo_ext.objective.ratios import active_tokens
from grpo_ext.objective.surrogate_traits import surrogates

Strength = Annotated[float, Within(above=0.0, because="without the pull it has no bound on how far the policy moves")]


@surrogates.register("dro")
def dro(
    advantages: Float[Tensor, " batch #time"],
    per_token_logps: Float[Tensor, "batch time"],
    old_per_token_logps: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    tau: Strength = 1.0,
) -> Float[Tensor, "batch time"]:
    r"""-A l + (tau / 2) (log S)^2 / n per token: of a completion -A log pi(o) + (tau / 2) (log S)^2.

    The gradient of (R - V - tau log(pi / pi_0))^2 / (2 tau), the squared error of the optimum of R - tau KL. Direct
    Reward Optimisation, arXiv:2405.19107, has a fixed pi_0 and learns V. Here, as in Kimi k1.5, arXiv:2501.12599, pi_0
    is the policy that sampled and V the mean reward of the group (`advantage_estimator: none`). log S is not bounded:
    nothing is exponentiated, and the pull grows with it.
    """
    log_s = (per_token_logps - old_per_token_logps).sum(dim=-1, keepdim=True)
    return tau / 2 * log_s.square() / active_tokens(mask, log_s.dtype) - advantages * per_token_logps


@torch.no_grad()
def effective_size(
    log_ratio: Float[Tensor, "batch time"], mask: Shaped[Tensor, "batch time"]
) -> Float[Tensor, "batch 1"]:
    r"""(sum_t r)^2 / (n sum_t r^2) of each completion, from 1/n to 1, where all its ratios are equal."""
    ratio = torch.where(mask.bool(), log_ratio.exp(), 0.0)
    squares = (active_tokens(mask, ratio.dtype) * ratio.square().sum(dim=-1, keepdim=True)).clamp(min=1e-30)
    return torch.where(mask.bool().any(dim=-1, keepdim=True), ratio.sum(dim=-1, keepdim=True).square() / squares, 1.0)


def p3o_metrics(
    log_ratio: Float[Tensor, "batch time"], mask: Shaped[Tensor, "batch time"]
) -> dict[str, Float[Tensor, "batch 1"]]:
    """Return `p3o/ess`, the effective sample size of each completion."""
    return {"p3o/ess": effective_size(log_ratio, mask)}


@surrogates.register("p3o", metrics=p3o_metrics)
def p3o(
    log_ratio: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch #time"],
    per_token_logps: Float[Tensor, "batch time"],
    old_per_token_logps: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    r"""-stopgrad(min(r, e)) A l + (1 - e) k3, e the effective sample size of the completion's ratios.

    e = (sum_t r)^2 / (n sum_t r^2) has no gradient; k3 = exp(d) - d - 1 with d = l_old - l estimates KL(pi, pi_old).
    Equal ratios leave the policy gradient, uneven ones cap it and pull back; nothing is to be set. In the paper e is
    that of the batch's tokens; the authors' code computes it for each micro-batch on all processes, so that their
    gradient depends on the split. Here it is each completion's own. P3O, arXiv:2605.12380.
    """
    size = effective_size(log_ratio, mask)
    weight = torch.minimum(log_ratio.exp(), size).detach()
    return (1 - size) * k3(old_per_token_logps - per_token_logps) - weight * advantages * per_token_logps
