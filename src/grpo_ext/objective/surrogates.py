r"""Surrogate losses: tensors in, loss per token out. No config, no reduction, no metric.

The parameters of a surrogate before the star name the tensors that it needs; those after the star are the options that
a recipe may set. The available tensors, all zero or 1 under the mask:

- `log_ratio` [batch, time], or [batch, 1] at sequence and product level: see `ratios`;
- `advantages` [batch, 1] or [batch, time];
- `per_token_logps`, `old_per_token_logps` [batch, time]: l and l_old;
- `mask` [batch, time]: the active completion tokens;
- `importance_sampling_ratio` [batch, 1 or time] or None: the sampler's correction; a surrogate that requests it
  applies it, all others are multiplied by it;
- `marks` [batch, time]: 1 on the tokens that the surrogate's `marks` chose from the whole generation.

A loss of shape [batch, 1] has the same value on every token of the completion. Losses are minimised.

Clip regions and metrics of a surrogate request tensors and options in the same way, and are registered with it.
"""

import math
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from grpo_ext.objective import anchored_surrogates, covariance  # noqa: F401 (their surrogates are in the registry)
from grpo_ext.objective.options import Within
from grpo_ext.objective.ratios import LOG_RATIO_BOUND, active_tokens
from grpo_ext.objective.sampler_correction import bernoulli_kl
from grpo_ext.objective.surrogate_traits import Regions as Regions
from grpo_ext.objective.surrogate_traits import surrogates as surrogates

RatioCap = Annotated[
    float,
    Within(
        least=1.0,
        because="it is the upper bound of the ratio itself, and one below 1 shrinks even the on-policy gradient "
        "(stock TRL's default of 0.2 makes it 5 times too small)",
    ),
]


def clip_regions(
    log_ratio: Float[Tensor, " batch #time"],
    advantages: Float[Tensor, " batch #time"],
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
) -> Regions:
    """Return where `clip` cuts; `delta` is not counted, as in TRL."""
    ratio = log_ratio.exp()
    return (ratio < 1 - epsilon_low) & (advantages < 0), (ratio > 1 + epsilon_high) & (advantages > 0)


def clip_conflict(*, epsilon_high: float, delta: float | None, **_: float) -> str | None:
    """Return the reason and cure if options of `clip` contradict each other."""
    if delta is None or delta >= 1 + epsilon_high:
        return None
    low = f"delta={delta} is below 1 + epsilon_high = {1 + epsilon_high:g}: it would cut positive advantages too."
    return f"{low} Set delta >= {1 + epsilon_high:g}."


@surrogates.register("clip", clip_regions=clip_regions, conflict=clip_conflict)
def clip(
    log_ratio: Float[Tensor, " batch #time"],
    advantages: Float[Tensor, " batch #time"],
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
) -> Float[Tensor, " batch #time"]:
    r"""PPO's clipped surrogate, -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A).

    With `delta` the ratio is also capped where A < 0: -min(min(r, delta) A, clip(r) A), the dual clip.

    Schulman et al., arXiv:1707.06347. Unequal epsilons: DAPO, arXiv:2503.14476. Two-sided: INTELLECT-2,
    arXiv:2505.07291.
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    return -torch.minimum(ratio * advantages, clipped * advantages)


@surrogates.register("reinforce")
def reinforce(
    advantages: Float[Tensor, " batch #time"], per_token_logps: Float[Tensor, "batch time"]
) -> Float[Tensor, "batch time"]:
    r"""-exp(l - stopgrad(l)) A: value -A, gradient -A, no ratio and no clip.

    Williams 1992; RLOO, arXiv:2402.14740. MiniMind's widely read trainer computes this.
    """
    return -(per_token_logps - per_token_logps.detach()).exp() * advantages


def cispo_metrics(
    log_ratio: Float[Tensor, " batch #time"], advantages: Float[Tensor, " batch #time"], *, epsilon_high: float = 5.0
) -> dict[str, Float[Tensor, " batch #time"]]:
    """Return `cispo_clip_ratio`, TRL's name for the tokens that the cap limits."""
    return {"cispo_clip_ratio": ((log_ratio.exp() > epsilon_high) & (advantages > 0)).float()}


@surrogates.register("cispo", metrics=cispo_metrics)
def cispo(
    log_ratio: Float[Tensor, " batch #time"],
    advantages: Float[Tensor, " batch #time"],
    per_token_logps: Float[Tensor, "batch time"],
    *,
    epsilon_high: RatioCap = 5.0,
) -> Float[Tensor, "batch time"]:
    r"""-stopgrad(min(r, epsilon_high)) A l: the weight is cut, the gradient never dies.

    `epsilon_high` bounds the ratio itself (as in TRL and ScaleRL, arXiv:2510.13786), not its distance from 1.
    MiniMax-M1, arXiv:2506.13585.
    """
    return -log_ratio.exp().clamp(max=epsilon_high).detach() * advantages * per_token_logps


@surrogates.register("sapo")
def sapo(
    log_ratio: Float[Tensor, " batch #time"],
    advantages: Float[Tensor, " batch #time"],
    *,
    temperature_pos: float = 1.0,
    temperature_neg: float = 1.05,
) -> Float[Tensor, " batch #time"]:
    r"""-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A: a soft gate instead of a clip.

    SAPO, arXiv:2511.20347.
    """
    tau = _by_sign(advantages > 0, log_ratio, temperature_pos, temperature_neg)
    return -4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1)) * advantages


def _by_sign(
    positive: Bool[Tensor, " batch #time"], like: Float[Tensor, " batch #time"], high: float, low: float
) -> Float[Tensor, " batch #time"]:
    """Return `high` where positive, else `low`, in the precision of `like`; Python numbers would become float32."""
    return torch.where(positive, torch.full_like(like, high), torch.full_like(like, low))


@torch.no_grad()
def vespo_weight(
    log_ratio: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch #time"],
    mask: Shaped[Tensor, "batch time"],
    importance_sampling_ratio: Float[Tensor, " batch #time"] | None = None,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Float[Tensor, " batch #time"]:
    r"""phi(S) = exp(lambda + k log S - lambda S), 1 at S = 1. VESPO, arXiv:2602.10693."""
    floor = math.log(1e-8)
    log_s = torch.where(mask.bool(), log_ratio, 0.0).sum(dim=-1, keepdim=True)
    if importance_sampling_ratio is not None:
        log_s = log_s + importance_sampling_ratio.log().clamp(floor, LOG_RATIO_BOUND).sum(dim=-1, keepdim=True)
    log_s = log_s.clamp(floor, LOG_RATIO_BOUND)
    k = _by_sign(advantages >= 0, log_s, k_pos, k_neg)
    lam = _by_sign(advantages >= 0, log_s, lambda_pos, lambda_neg).clamp(min=1e-4)
    return (lam + k * log_s - lam * log_s.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def vespo_metrics(
    log_ratio: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch #time"],
    mask: Shaped[Tensor, "batch time"],
    importance_sampling_ratio: Float[Tensor, " batch #time"] | None = None,
    **options: float,
) -> dict[str, Float[Tensor, " batch #time"]]:
    """Return `vespo/phi_seq_mean`, TRL's name for the weight of each completion."""
    return {"vespo/phi_seq_mean": vespo_weight(log_ratio, advantages, mask, importance_sampling_ratio, **options)}


@surrogates.register("vespo", metrics=vespo_metrics)
def vespo(
    log_ratio: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch #time"],
    per_token_logps: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    importance_sampling_ratio: Float[Tensor, " batch #time"] | None = None,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Float[Tensor, "batch time"]:
    r"""-stopgrad(phi(S)) A l with phi(S) = e^lambda S^k e^(-lambda S), (k, lambda) by the sign of A.

    log S is the sum of the token log-ratios kept in [ln 1e-8, 20], the sampler's correction included.
    VESPO, arXiv:2602.10693.
    """
    options = {"k_pos": k_pos, "lambda_pos": lambda_pos, "k_neg": k_neg, "lambda_neg": lambda_neg}
    phi = vespo_weight(log_ratio, advantages, mask, importance_sampling_ratio, **options)
    return -phi * advantages * per_token_logps


def gmpo_regions(
    log_ratio: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch #time"],
    *,
    epsilon_low: float = 0.4,
    epsilon_high: float = 0.4,
) -> Regions:
    """Return where `gmpo` cuts."""
    return (log_ratio < -epsilon_low) & (advantages < 0), (log_ratio > epsilon_high) & (advantages > 0)


@surrogates.register("gmpo", clip_regions=gmpo_regions)
def gmpo(
    log_ratio: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch #time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    epsilon_low: float = 0.4,
    epsilon_high: float = 0.4,
) -> Float[Tensor, " batch #time"]:
    r"""-A exp(mean_t c_t); c_t = min(log r_t, eps_high) where A > 0, max(log r_t, -eps_low) where A < 0.

    The epsilons bound the log-ratio of each token. GMPO, arXiv:2507.20673.
    """
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=epsilon_high), log_ratio.clamp(min=-epsilon_low))
    clipped = torch.where(mask.bool(), clipped, 0.0)
    return -(clipped.sum(dim=-1, keepdim=True) / active_tokens(mask, clipped.dtype)).exp() * advantages


@surrogates.register("topr")
def topr(
    log_ratio: Float[Tensor, " batch #time"],
    advantages: Float[Tensor, " batch #time"],
    per_token_logps: Float[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    r"""-c A l; c = 1 where A >= 0, stopgrad(min(S, 1)) where A < 0: positives imitated, negatives tapered.

    S is the product ratio. TOPR, arXiv:2503.14286.
    """
    taper = log_ratio.exp().clamp(max=1.0).detach()
    return -torch.where(advantages >= 0, torch.ones_like(taper), taper) * advantages * per_token_logps


Divergence = Literal["tv", "kl"]


@torch.no_grad()
def dppo_regions(
    advantages: Float[Tensor, " batch #time"],
    per_token_logps: Float[Tensor, "batch time"],
    old_per_token_logps: Float[Tensor, "batch time"],
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    divergence: Divergence = "tv",
) -> Regions:
    """Return where `dppo` drops."""
    shift = distance = per_token_logps.exp() - old_per_token_logps.exp()
    if divergence == "kl":
        distance = shift.sign() * bernoulli_kl(old_per_token_logps, per_token_logps)
    return (advantages < 0) & (distance < -epsilon_low), (advantages > 0) & (distance > epsilon_high)


@surrogates.register("dppo", clip_regions=dppo_regions)
def dppo(
    log_ratio: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch #time"],
    per_token_logps: Float[Tensor, "batch time"],
    old_per_token_logps: Float[Tensor, "batch time"],
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    divergence: Divergence = "tv",
) -> Float[Tensor, "batch time"]:
    r"""-r A, without the tokens whose probability has already moved too far in the direction of A.

    Dropped: A > 0 and pi - pi_old > eps_high, or A < 0 and pi - pi_old < -eps_low. The trust region is in total
    variation, not in the ratio. With `divergence: kl` a token is dropped for the same shift of direction where
    KL(b_old, b) > eps, of whether the token is drawn or not: pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) /
    (1 - pi)). DPPO-Binary-TV and DPPO-Binary-KL, arXiv:2602.04879.
    """
    low, high = dppo_regions(
        advantages,
        per_token_logps,
        old_per_token_logps,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        divergence=divergence,
    )
    return torch.where(low | high, 0.0, -log_ratio.exp() * advantages)
