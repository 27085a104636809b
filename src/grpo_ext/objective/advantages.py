r"""Advantage estimators: rewards [groups, completions] of a whole generation batch to advantages of the same shape.

Notation: r are the rewards of one prompt's G completions, NaN where one could not be scored: it is left out of all
statistics. Permuting groups permutes advantages. `estimate.estimate` enforces the rules that hold for every estimator,
also for a user's own.

An estimator requests further tensors by name, as positional parameters behind `rewards`:

- `history`: the group means of the `window` - 1 generation batches before (NaN where unscorable), or None;
- `log_metric(name, value)`: logs a metric;
- `mask`, or `completion_mask`, [groups, completions, time]: the active tokens, or None where each completion counts as
  one token;
- `completion_ids` [groups, completions, time]: the tokens, also those under the mask;
- `per_token_logps`, `entropies` [groups, completions, time]: of the policy, before it trains on the generation;
- `old_per_token_logps`: those in the denominator of the ratio; `sampling_per_token_logps`: the sampler's, NaN where it
  has none; `ref_per_token_logps`: the reference's;
- `columns`: by name of the dataset's column, a list with the value of each group's row;
- `kl_rewards` [groups, completions, time]: -beta KL of each token where `kl_placement` is 'reward', else None. An
  estimator that does not request it gets rewards that contain the sum;
- `turn_rewards`, `turns`, `states`: of trajectories of several turns, as in `turn_advantages`.

The keyword-only parameters are the options that a recipe may set by `advantage_kwargs`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from grpo_ext.objective.options import Ascending, Count, Ddof, NotNegative, Within
from grpo_ext.registry import Registry


@dataclass(frozen=True)
class EstimatorTraits:
    """Properties of an estimator that other modules use."""

    unit_rewards: bool = False
    """True if it is defined for rewards in [0, 1] only."""
    group_baseline: bool = True
    """True if rewards are compared within their group, so that a group of equal rewards has no signal."""
    sums_to_zero: bool = False
    """True if the advantages of a group sum to 0."""
    per_token: bool = False
    """True if it returns an advantage for each token."""
    outnumbered: str | None = None
    """The option that a group must hold more completions than."""
    trl: bool = False
    """True if `scale_rewards` of stock TRL has it, under this name."""


estimators: Registry = Registry("advantage_estimator", EstimatorTraits)

Rewards = Float[Tensor, "groups completions"]
UnitRange = Annotated[list[float], Ascending(because="it is the reward's own range")]
Cap = Annotated[float, Within(above=0.0, because="at 0 every advantage is 0")]
TokenRewards = Float[Tensor, "groups completions #time"]
Mask = Shaped[Tensor, "groups completions time"]
PastGroupMeans = Float[Tensor, " past_groups"]
LogMetric = Callable[[str, float], None]


_ROUNDING = 1e-6
"""Relative error of a sum of rewards: they and their weights arrive in float32."""


def zero_variance(rewards: Rewards) -> Bool[Tensor, " groups"]:
    """Groups without a learning signal: fewer than two scorable rewards, or all of them equal."""
    highest, lowest = extremes(rewards)
    return ((~rewards.isnan()).sum(dim=-1) < 2) | (highest == lowest)


def extremes(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Highest and lowest scorable reward of each group."""
    scorable = ~rewards.isnan()
    highest = torch.where(scorable, rewards, -math.inf).amax(dim=-1)
    return highest, torch.where(scorable, rewards, math.inf).amin(dim=-1)


def evened(values: Rewards, scale: Float[Tensor, " groups"]) -> Rewards:
    """Make a group's values equal where they differ by at most the rounding of numbers of size `scale`."""
    highest, lowest = extremes(values)
    rounded = highest - lowest <= _ROUNDING * scale
    return torch.where(rounded[:, None] & ~values.isnan(), highest[:, None], values)


def group_means(rewards: Rewards) -> Float[Tensor, " groups"]:
    """Mean of each group's scorable rewards, NaN where there is none."""
    return rewards.nanmean(dim=-1)


def _std(values: Tensor, ddof: int, dim: int | None = None) -> Tensor:
    """Standard deviation over the scorable values; infinite where there are fewer than ddof + 1 of them."""
    mean = values.nanmean(dim=dim, keepdim=dim is not None)
    squares = (values - mean).square().nansum(dim=dim)
    degrees = (~values.isnan()).sum(dim=dim) - ddof
    return torch.where(degrees > 0, squares / degrees.to(values.dtype), math.inf).sqrt()


def only_signal(advantages: Rewards, rewards: Rewards) -> Rewards:
    """Return `advantages` with exact zeros for unscorable completions and for groups without a signal."""
    without_advantage = rewards.isnan() | zero_variance(rewards)[:, None]
    return torch.where(without_advantage, torch.zeros_like(advantages), advantages)


def _centred(rewards: Rewards) -> Rewards:
    """r - mean of the group, exactly 0 in a group without a signal; NaN stays NaN."""
    return torch.where(zero_variance(rewards)[:, None], 0 * rewards, rewards - group_means(rewards)[:, None])


def _in_unit_interval(rewards: Rewards, estimator: str, cure: str) -> Rewards:
    """Clamp rewards that exceed [0, 1] by rounding only; raise for others."""
    outside = rewards[(rewards < -_ROUNDING) | (rewards > 1 + _ROUNDING)]
    if len(outside):
        raise ValueError(
            f"advantage_estimator={estimator}: a reward of {outside[0].item():g} lies outside [0, 1], and "
            f"this estimator is defined only inside. {cure}"
        )
    return rewards.clamp(0, 1)


@estimators.register("group", sums_to_zero=True, trl=True)
def group(rewards: Rewards, *, ddof: Ddof = 1, eps: NotNegative = 1e-4) -> Rewards:
    r"""(r - mean) / (std + eps) within the group. GRPO, arXiv:2402.03300 (no paper fixes ddof)."""
    return _centred(rewards) / (_std(rewards, ddof, dim=-1)[:, None] + eps)


@estimators.register("none", sums_to_zero=True, trl=True)
def none(rewards: Rewards) -> Rewards:
    r"""r - mean of the group: no division, hence no bias towards too easy or too hard prompts. arXiv:2503.20783."""
    return _centred(rewards)


@estimators.register("batch", sums_to_zero=True, trl=True)
def batch(rewards: Rewards, *, ddof: Ddof = 1, eps: NotNegative = 1e-4) -> Rewards:
    r"""(r - group mean) / (std of all raw rewards of the generation batch + eps). PPO Lite, arXiv:2508.08221."""
    return _centred(rewards) / (_std(rewards, ddof) + eps)


@estimators.register("loo", sums_to_zero=True)
def leave_one_out(rewards: Rewards) -> Rewards:
    r"""r_i - mean of the others = G/(G-1) (r_i - mean). RLOO, arXiv:2402.14740."""
    g = (~rewards.isnan()).sum(dim=-1, keepdim=True).to(rewards.dtype)
    return _centred(rewards) * (g / (g - 1))


@estimators.register("reinforce_pp", group_baseline=False)
def reinforce_pp(
    rewards: Rewards,
    mask: Mask | None = None,
    kl_rewards: TokenRewards | None = None,
    *,
    ddof: Ddof = 0,
    floor: NotNegative = 1e-4,
) -> TokenRewards | Rewards:
    r"""(R_t - mean) / std over the active tokens of the generation batch, R_t = r - beta sum_{s >= t} KL_s.

    The baseline is the batch's: a group of equal rewards has advantages too. The std counts as `floor` at least, as
    in the authors' code: rounding is not whitened to +-1. REINFORCE++, arXiv:2501.03262, section 3.1.
    """
    if kl_rewards is None:
        return _whitened(rewards, mask, ddof, floor)
    to_go = kl_rewards.flip(-1).cumsum(dim=-1).flip(-1)
    return _whitened(rewards[..., None] + to_go, mask, ddof, floor)


@estimators.register("reinforce_pp_baseline")
def reinforce_pp_baseline(
    rewards: Rewards, mask: Mask | None = None, *, ddof: Ddof = 0, floor: NotNegative = 1e-4
) -> Rewards:
    r"""(a - mean) / std over the active tokens of the generation batch, a = r - group mean, on all its tokens.

    The std counts as `floor` at least. In the authors' code a group of equal rewards has the advantage -mean / std;
    here it has no signal, as with every estimator. REINFORCE++ with baseline, arXiv:2501.03262, section 3.2.
    """
    return _whitened(_centred(rewards), mask, ddof, floor)


def _whitened(returns: Tensor, mask: Mask | None, ddof: int, floor: float) -> Tensor:
    """(x - mean) / max(std, floor) of returns [groups, completions (, time)], each counted on every active token."""
    mask = torch.ones_like(returns)[..., None] if mask is None else mask
    tokens = torch.where(mask.bool(), returns if returns.dim() == 3 else returns[..., None], math.nan)
    counted = tokens[~tokens.isnan()]
    if not len(counted) or counted.min() == counted.max():
        return 0 * returns
    return (returns - counted.mean()) / _std(counted, ddof).clamp(min=floor)


@estimators.register("maxrl", sums_to_zero=True, unit_rewards=True)
def maxrl(rewards: Rewards, *, eps: NotNegative = 1e-6) -> Rewards:
    r"""(r - mean) / (mean + eps) for rewards in [0, 1]. MaxRL, arXiv:2602.02710.

    For rewards 0 or 1 its mean gradient is that of sum_{k < G} pass@k / k. The paper's theorem has k <= G, without a
    baseline; as in the paper's algorithm, a group without a right completion has no gradient here, which costs k = G.

    Raises:
        ValueError: a reward outside [0, 1].
    """
    rewards = _in_unit_interval(rewards, "maxrl", "Rescale the reward.")
    return _centred(rewards) / (group_means(rewards)[:, None] + eps)


@estimators.register("minimind")
def minimind(
    rewards: Rewards, *, clamp: Cap = 10.0, eps: NotNegative = 1e-4, batch_eps: NotNegative = 1e-8
) -> Rewards:
    r"""Normalised twice: a = clamp((r - mean) / (std + eps), +-clamp), then (a - mean) / (std + batch_eps).

    The first mean and std are the group's, the second run over the whole generation batch, all processes; both std
    have ddof 1. The clamp cannot bite below G = 102, since |a| <= (G - 1) / sqrt(G). MiniMind, widely read version.
    """
    per_group = group(rewards, eps=eps).clamp(-clamp, clamp)
    return (per_group - per_group.nanmean()) / (_std(per_group, ddof=1) + batch_eps)


class BetaFit(NamedTuple):
    """Parameters of a Beta distribution over prompts' success rates."""

    alpha: float
    beta: float
    degenerate: bool
    """True if all success rates are equal, so that (1, 1) replaces the fit."""


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


def _unit_rewards(
    rewards: Rewards, history: PastGroupMeans | None, reward_range: list[float], estimator: str
) -> tuple:
    """Rewards and the group means of the window, mapped affinely from `reward_range` to [0, 1]."""
    low, high = reward_range
    cure = f"advantage_kwargs.reward_range is {list(reward_range)}: set it to the reward's own range."
    unit = _in_unit_interval((rewards - low) / (high - low), estimator, cure)
    means = group_means(unit)
    if history is not None:
        means = torch.cat([(history - low) / (high - low), means])
    return unit, means


@estimators.register("beta", sums_to_zero=True, unit_rewards=True)
def beta(
    rewards: Rewards,
    history: PastGroupMeans | None = None,
    log_metric: LogMetric | None = None,
    *,
    reward_range: UnitRange = [0.0, 1.0],  # noqa: B006 (read only; a list because YAML has no tuples)
    window: Count = 1,
    cap: Cap = 1e6,
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
    log_beta = math.lgamma(fit.alpha) + math.lgamma(fit.beta) - math.lgamma(fit.alpha + fit.beta)
    log_pdf = torch.xlogy(fit.alpha - 1, p) + torch.xlogy(fit.beta - 1, 1 - p) - log_beta
    return (unit - p) * (-log_pdf).exp().clamp(max=cap)


@estimators.register("bernoulli", unit_rewards=True)
def bernoulli(
    rewards: Rewards,
    history: PastGroupMeans | None = None,
    log_metric: LogMetric | None = None,
    *,
    reward_range: UnitRange = [0.0, 1.0],  # noqa: B006
    window: Count = 1,
    eps: NotNegative = 1e-4,
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
    return (unit - mu) / (mu * (1 - mu) + eps).sqrt()


@estimators.register("pass_at_k", unit_rewards=True, outnumbered="k")
def pass_at_k(rewards: Rewards, *, k: Count = 2) -> Rewards:
    r"""G (pass@k of the group - pass@k of the others) for rewards 0 or 1: leave-one-out credit for pass@k.

    pass@k(n, c) = 1 - C(n - c, k) / C(n, k) for c successes among n (Chen et al., arXiv:2107.03374). Its expectation,
    weighted by the scores, is the gradient of pass@k (arXiv:2505.15201); k = 1 is `loo`. A group with no more than k
    scorable completions gets 0, and so does one with fewer than k wrong ones: any k of it hold a right one.

    Raises:
        ValueError: a reward that is neither 0 nor 1.
    """
    binary = rewards.round()
    other = rewards[((rewards - binary).abs() > _ROUNDING) | (binary < 0) | (binary > 1)]
    if len(other):
        raise ValueError(
            f"advantage_estimator=pass_at_k: a reward of {other[0].item():g} is neither 0 nor 1. "
            "Use one binary reward, for example accuracy."
        )
    n = (~rewards.isnan()).sum(dim=-1, keepdim=True)
    c = binary.nansum(dim=-1, keepdim=True)
    credit = n * (_pass_rate(n, c, k) - _pass_rate(n - 1, c - binary.nan_to_num(), k))
    return torch.where(n > k, credit, 0.0)


def _pass_rate(n: Tensor, c: Tensor, k: int) -> Tensor:
    """1 - C(n - c, k) / C(n, k), as a product of k factors that are clamped at 0."""
    i = torch.arange(k, device=c.device)
    factors = ((n - c)[..., None] - i).clamp(min=0) / (n[..., None] - i).clamp(min=1)
    return 1 - factors.prod(dim=-1)
