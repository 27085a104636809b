r"""Surrogates that treat the tokens apart whose covariance of log-probability and advantage drives the entropy down.

c_t = (A_t - mean A) (l_t - mean l), the means over the active tokens of the whole generation, l of the policy before
it trains on it. Such tokens are chosen once for a generation, by `marks`, so that the gradient does not depend on how
it is split. The authors' code takes means and choice from each micro-batch, by the policy of the moment. The paper:
arXiv:2505.22617.
"""

from typing import Annotated, Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from grpo_ext.objective.options import NotNegative, Within
from grpo_ext.objective.surrogate_traits import Regions, surrogates

Share = Annotated[float, Within(above=0.0, most=1.0, because="it is a share of all tokens")]
Advantages = Float[Tensor, "groups completions #time"] | Float[Tensor, "groups completions"]
Logps = Float[Tensor, "groups completions time"]
Mask = Shaped[Tensor, "groups completions time"]
Ids = Int[Tensor, "groups completions time"]
Marks = Bool[Tensor, "groups completions time"]


def covariances(advantages: Advantages, per_token_logps: Logps, mask: Mask) -> Logps:
    """Return c_t of each active token of a generation, 0 of the others, in float64: the sums run over all tokens."""
    active = mask.bool()
    a = (advantages if advantages.dim() == 3 else advantages[..., None]).expand(mask.shape)
    centred = []
    for values in (a.double(), per_token_logps.double()):
        mean = torch.where(active, values, 0.0).sum() / active.sum().clamp(min=1)
        centred.append(torch.where(active, values - mean, 0.0))
    return centred[0] * centred[1]


def _count(mask: Mask, share: float) -> int:
    return max(1, int(share * int(mask.bool().sum())))


def highest(advantages: Advantages, per_token_logps: Logps, mask: Mask, *, share: Share = 2e-3, **_: Any) -> Marks:
    """Return the `share` of active tokens, at least one, with the highest c_t above 0; equal ones together."""
    c = covariances(advantages, per_token_logps, mask)
    return (c > 0) & (c >= c.flatten().sort(descending=True).values[_count(mask, share) - 1])


@surrogates.register("kl_cov", marks=highest)
def kl_cov(
    log_ratio: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch #time"],
    marks: Shaped[Tensor, "batch time"],
    *,
    share: Share = 2e-3,
    kl_coef: NotNegative = 1.0,
) -> Float[Tensor, "batch time"]:
    r"""-r A, and kl_coef |log r| more on the `share` of tokens with the highest covariance.

    c_t = (A_t - mean A) (l_t - mean l) over the generation. The paper's share is 2e-3 for 7B, 2e-4 for 32B parameters.
    KL-Cov, arXiv:2505.22617.
    """
    penalty = torch.where(marks.bool(), log_ratio.abs(), 0.0)
    return kl_coef * penalty - log_ratio.exp() * advantages


def clip_cov_marks(
    advantages: Advantages,
    per_token_logps: Logps,
    mask: Mask,
    completion_ids: Ids,
    *,
    share: Share = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    **_: Any,
) -> Marks:
    """Return as many of the tokens with c_t in (cov_low, cov_high) as make up `share` of active ones, at least one.

    The draw is a hash of the ids up to the token: the same on every process and after a resume, and alike for tokens
    that are alike.
    """
    c = covariances(advantages, per_token_logps, mask)
    among = mask.bool() & (c > cov_low) & (c < cov_high)
    lots = torch.where(among, _lots(completion_ids, mask), torch.iinfo(torch.int64).max)
    return among & (lots <= lots.flatten().sort().values[_count(mask, share) - 1])


def _lots(completion_ids: Ids, mask: Mask) -> Ids:
    """Return an evenly spread number for each sequence of active tokens, that of splitmix64."""
    place = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
    return _mixed(torch.where(mask.bool(), _mixed(completion_ids.long() * 1_000_003 + place), 0).cumsum(dim=-1))


def _mixed(bits: Ids) -> Ids:
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits = (bits ^ (bits >> shift)) * factor
    return bits ^ (bits >> 31)


def clip_cov_regions(
    log_ratio: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch #time"],
    *,
    epsilon_low: float = 1.0,
    epsilon_high: float = 1.0,
    **_: Any,
) -> Regions:
    """Return where `clip_cov` clips the ratio; tokens that it draws are not counted."""
    ratio = log_ratio.exp()
    return (ratio < 1 - epsilon_low) & (advantages < 0), (ratio > 1 + epsilon_high) & (advantages > 0)


@surrogates.register("clip_cov", marks=clip_cov_marks, clip_regions=clip_cov_regions)
def clip_cov(
    log_ratio: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch #time"],
    marks: Shaped[Tensor, "batch time"],
    *,
    epsilon_low: float = 1.0,
    epsilon_high: float = 1.0,
    share: Share = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Float[Tensor, "batch time"]:
    r"""-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), and 0 on a few tokens drawn from those of high covariance.

    Drawn are `share` of all tokens, from those with c_t = (A_t - mean A) (l_t - mean l) in (cov_low, cov_high).
    The wide epsilons are those of the authors' scripts. Clip-Cov, arXiv:2505.22617.
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    return torch.where(marks.bool(), 0.0, -torch.minimum(ratio * advantages, clipped * advantages))
