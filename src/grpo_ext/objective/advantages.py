r"""Advantage estimators: rewards [groups, completions] of a whole generation batch to advantages of the same shape.

Notation: r are the rewards of one prompt's G completions. Rules that hold for every estimator:

- a completion that could not be scored (NaN) is left out of all statistics and gets 0;
- a group with fewer than two scorable completions, or whose scorable rewards are all equal, gets exactly 0 (max is
  compared with min: rounding in a standard deviation would otherwise make advantages out of nothing);
- permuting groups permutes advantages.

Positional parameters beyond `rewards` are asked for by name, as in `surrogates`: `history` holds the group means of
earlier generation batches (NaN where unscorable), `log_metric(name, value)` records a figure. After the star stand
the options a recipe may set through `advantage_kwargs`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_ext.registry import Registry

estimators: Registry = Registry("advantage_estimator")

Rewards = Float[Tensor, "groups completions"]
GroupMeans = Float[Tensor, " past_groups"]
LogMetric = Callable[[str, float], None]


ROUNDING = 1e-6
"""Relative error of a sum of rewards: they and their weights arrive in float32."""


def zero_variance(rewards: Rewards) -> Bool[Tensor, " groups"]:
    """Groups without a learning signal: fewer than two scorable rewards, or all of them equal."""
    highest, lowest = _extremes(rewards)
    return ((~rewards.isnan()).sum(dim=-1) < 2) | (highest == lowest)


def _extremes(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Highest and lowest scorable reward of each group."""
    scorable = ~rewards.isnan()
    highest = torch.where(scorable, rewards, -math.inf).amax(dim=-1)
    return highest, torch.where(scorable, rewards, math.inf).amin(dim=-1)


def group_means(rewards: Rewards) -> Float[Tensor, " groups"]:
    """Mean of each group's scorable rewards, NaN where there is none."""
    return rewards.nanmean(dim=-1)


def _std(values: Tensor, ddof: int, dim: int | None = None) -> Tensor:
    """Standard deviation over the scorable values; infinite where there are fewer than ddof + 1 of them."""
    mean = values.nanmean(dim=dim, keepdim=dim is not None)
    squares = (values - mean).square().nansum(dim=dim)
    degrees = (~values.isnan()).sum(dim=dim) - ddof
    return torch.where(degrees > 0, squares / degrees.to(values.dtype), math.inf).sqrt()


def _only_signal(advantages: Rewards, rewards: Rewards) -> Rewards:
    """`advantages` with exact zeros for unscorable completions and for groups without a signal."""
    silent = rewards.isnan() | zero_variance(rewards)[:, None]
    return torch.where(silent, torch.zeros_like(advantages), advantages)


def _centred(rewards: Rewards) -> Rewards:
    return rewards - group_means(rewards)[:, None]


def _in_unit_interval(rewards: Rewards, estimator: str, cure: str) -> Rewards:
    """`rewards`, those beyond 0 or 1 by rounding alone set to it."""
    outside = rewards[(rewards < -ROUNDING) | (rewards > 1 + ROUNDING)]
    if len(outside):
        raise ValueError(
            f"advantage_estimator={estimator}: a reward of {outside[0].item():g} lies outside [0, 1], where alone "
            f"this estimator is defined. {cure}"
        )
    return rewards.clamp(0, 1)


@estimators.register("group")
def group(rewards: Rewards, *, ddof: int = 1, eps: float = 1e-4) -> Rewards:
    r"""(r - mean) / (std + eps) within the group. GRPO, arXiv:2402.03300 (no paper fixes ddof)."""
    return _only_signal(_centred(rewards) / (_std(rewards, ddof, dim=-1)[:, None] + eps), rewards)


@estimators.register("none")
def none(rewards: Rewards) -> Rewards:
    r"""r - mean of the group: no division, hence no bias towards too easy or too hard prompts. arXiv:2503.20783."""
    return _only_signal(_centred(rewards), rewards)


@estimators.register("batch")
def batch(rewards: Rewards, *, ddof: int = 1, eps: float = 1e-4) -> Rewards:
    r"""(r - group mean) / (std of all raw rewards of the generation batch + eps). PPO Lite, arXiv:2508.08221."""
    return _only_signal(_centred(rewards) / (_std(rewards, ddof) + eps), rewards)


@estimators.register("loo")
def leave_one_out(rewards: Rewards) -> Rewards:
    r"""r_i - mean of the others = G/(G-1) (r_i - mean). RLOO, arXiv:2402.14740."""
    g = (~rewards.isnan()).sum(dim=-1, keepdim=True).to(rewards.dtype)
    return _only_signal(_centred(rewards) * (g / (g - 1)), rewards)


@estimators.register("reinforce_pp")
def reinforce_pp(rewards: Rewards, *, ddof: int = 1, floor: float = 1e-4) -> Rewards:
    r"""(r - group mean) / (std of those over the generation batch). REINFORCE++-baseline, arXiv:2501.03262.

    The std counts as `floor` at least, as in the authors' code: rounding is not whitened to +-1.
    """
    centred = _only_signal(_centred(rewards), rewards)
    std = _std(centred.masked_fill(rewards.isnan(), math.nan), ddof)
    return _only_signal(centred / std.clamp(min=floor), rewards)


@estimators.register("maxrl")
def maxrl(rewards: Rewards, *, eps: float = 1e-6) -> Rewards:
    r"""(r - mean) / (mean + eps) for rewards in [0, 1]. MaxRL, arXiv:2602.02710.

    Raises:
        ValueError: a reward outside [0, 1].
    """
    rewards = _in_unit_interval(rewards, "maxrl", "Rescale the reward.")
    return _only_signal(_centred(rewards) / (group_means(rewards)[:, None] + eps), rewards)


@estimators.register("minimind")
def minimind(rewards: Rewards, *, clamp: float = 10.0, eps: float = 1e-4, batch_eps: float = 1e-8) -> Rewards:
    r"""Normalised twice: a = clamp((r - mean) / (std + eps), +-clamp), then (a - mean) / (std + batch_eps).

    The first mean and std are the group's, the second run over the whole generation batch, all processes; both std
    have ddof 1. The clamp cannot bite below G = 102, since |a| <= (G - 1) / sqrt(G). MiniMind, widely read version.
    """
    per_group = group(rewards, eps=eps).clamp(-clamp, clamp).masked_fill(rewards.isnan(), math.nan)
    whitened = (per_group - per_group.nanmean()) / (_std(per_group, ddof=1) + batch_eps)
    return _only_signal(whitened, rewards)


class BetaFit(NamedTuple):
    """Parameters of a Beta distribution over prompts' success rates."""

    alpha: float
    beta: float
    degenerate: bool
    """Whether the batch could not be fitted (success rates all equal) and (1, 1) stands in."""


def fit_beta(means: Float[Tensor, " prompts"], *, flatten: float = 3.0) -> BetaFit:
    r"""Moments of the success rates p, flattened: alpha = max(1 + a / flatten, 1), beta likewise from b.

    m = mean p, v = var p (ddof 1), c = m (1 - m) / v - 1, a = c m, b = c (1 - m). BNPO, arXiv:2506.02864.
    """
    p = means[~means.isnan()].double()
    if len(p) < 2 or (p.max() - p.min()).item() < 1e-6:
        return BetaFit(1.0, 1.0, degenerate=True)
    m, v = p.mean().item(), p.var(correction=1).item()
    c = m * (1 - m) / v - 1
    return BetaFit(max(1 + c * m / flatten, 1.0), max(1 + c * (1 - m) / flatten, 1.0), degenerate=False)


def _unit_rewards(rewards: Rewards, history: GroupMeans | None, reward_range: list[float], estimator: str) -> tuple:
    """Rewards and the group means of the window, mapped affinely from `reward_range` to [0, 1]."""
    low, high = reward_range
    cure = f"advantage_kwargs.reward_range is {list(reward_range)}: set it to the reward's own range."
    unit = _in_unit_interval((rewards - low) / (high - low), estimator, cure)
    means = group_means(unit)
    if history is not None:
        means = torch.cat([(history - low) / (high - low), means])
    return unit, means


@estimators.register("beta")
def beta(
    rewards: Rewards,
    history: GroupMeans | None = None,
    log_metric: LogMetric | None = None,
    *,
    reward_range: list[float] = [0.0, 1.0],  # noqa: B006 (read only; a list because YAML has no tuples)
    window: int = 1,
    cap: float = 1e6,
) -> Rewards:
    r"""(r - p) / BetaPDF(p; alpha, beta), p the group mean, the distribution fitted to the batch's p by `fit_beta`.

    `window` counts the generation batches, the current one included, that the fit sees; 1 / pdf is capped at `cap`.
    alpha = beta = 1 is REINFORCE with a mean baseline, alpha = beta = 3/2 is (pi/8) GRPO with the population std.
    Logs `advantages/beta_alpha`, `advantages/beta_beta` and `advantages/beta_degenerate`.

    BNPO, arXiv:2506.02864; where the authors' code fails (equal p, one prompt) alpha = beta = 1.

    Raises:
        ValueError: a reward outside `reward_range`.
    """
    unit, means = _unit_rewards(rewards, history, reward_range, "beta")
    fit = fit_beta(means)
    if log_metric is not None:
        for name, value in fit._asdict().items():
            log_metric(f"advantages/beta_{name}", float(value))
    p = group_means(unit)[:, None]
    log_pdf = torch.xlogy(fit.alpha - 1, p) + torch.xlogy(fit.beta - 1, 1 - p) - _log_beta(fit.alpha, fit.beta)
    return _only_signal((unit - p) * (-log_pdf).exp().clamp(max=cap), rewards)


def _log_beta(alpha: float, beta: float) -> float:
    return math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)


@estimators.register("bernoulli")
def bernoulli(
    rewards: Rewards,
    history: GroupMeans | None = None,
    log_metric: LogMetric | None = None,
    *,
    reward_range: list[float] = [0.0, 1.0],  # noqa: B006
    window: int = 1,
    eps: float = 1e-4,
) -> Rewards:
    r"""(r - mu) / sqrt(mu (1 - mu) + eps), mu the posterior mean of the prompt's success rate.

    The prior is a Beta fitted by moments to the success rates of the last `window` generation batches, the posterior
    adds the group's rewards: mu = (alpha + sum r) / (alpha + beta + G). A popular tutorial calls this BNPO; the BNPO
    paper (`beta`, arXiv:2506.02864) keeps the group mean as baseline and divides by the Beta density instead.

    Raises:
        ValueError: a reward outside `reward_range`.
    """
    unit, means = _unit_rewards(rewards, history, reward_range, "bernoulli")
    p = means[~means.isnan()].double()
    m = p.mean().item() if len(p) else 0.5
    v = p.var(correction=1).item() if len(p) > 1 else 0.0
    c = m * (1 - m) / v - 1 if v > 1e-12 else 0.0
    a, b = (c * m, c * (1 - m)) if c > 0 and 0 < m < 1 else (1.0, 1.0)
    if log_metric is not None:
        log_metric("advantages/bernoulli_alpha", a)
        log_metric("advantages/bernoulli_beta", b)
    g = (~unit.isnan()).sum(dim=-1, keepdim=True).to(unit.dtype)
    mu = (a + unit.nansum(dim=-1, keepdim=True)) / (a + b + g)
    return _only_signal((unit - mu) / (mu * (1 - mu) + eps).sqrt(), rewards)


@estimators.register("pass_at_k")
def pass_at_k(rewards: Rewards, *, k: int = 2) -> Rewards:
    r"""G (pass@k of the group - pass@k of the others) for rewards 0 or 1: leave-one-out credit for pass@k.

    pass@k(n, c) = 1 - C(n - c, k) / C(n, k) for c successes among n (Chen et al., arXiv:2107.03374). Its expectation,
    weighted by the scores, is the gradient of pass@k (arXiv:2505.15201); k = 1 is `loo`. A group with no more than k
    scorable completions gets 0.

    Raises:
        ValueError: a reward that is neither 0 nor 1.
    """
    binary = rewards.round()
    other = rewards[((rewards - binary).abs() > ROUNDING) | (binary < 0) | (binary > 1)]
    if len(other):
        raise ValueError(
            f"advantage_estimator=pass_at_k: a reward of {other[0].item():g} is neither 0 nor 1. "
            "Use one binary reward, for example accuracy."
        )
    n = (~rewards.isnan()).sum(dim=-1, keepdim=True)
    c = binary.nansum(dim=-1, keepdim=True)
    credit = n * (_pass_rate(n, c, k) - _pass_rate(n - 1, c - binary.nan_to_num(), k))
    return _only_signal(torch.where(n > k, credit, 0.0).to(rewards.dtype), rewards)


def _pass_rate(n: Tensor, c: Tensor, k: int) -> Tensor:
    """1 - C(n - c, k) / C(n, k), as a product of k factors, each of which reaches 0 before it can turn negative."""
    i = torch.arange(k, device=c.device)
    factors = ((n - c)[..., None] - i).clamp(min=0) / (n[..., None] - i).clamp(min=1)
    return 1 - factors.prod(dim=-1)


# Several reward functions: from rewards [groups, completions, functions] and weights to advantages.
