r"""Weights of completions that were sampled from another distribution than the policy's.

Notation: mu is the sampler, pi_old the policy whose ratio the loss takes, d_t = log pi_old(y_t) - log mu(y_t) the
log-ratio of a sampled token (0 where mu is unknown), n the active tokens of a completion.

A rule looks at units: at level `token` each token, at the other levels each completion, whose tokens it combines.

| statistic | of a token | `sequence` | `geometric` | `max` |
| --- | --- | --- | --- | --- |
| `ratio` | exp(d_t) | exp(sum_t d_t) | exp((1/n) sum_t d_t) | |
| `k1`, `k2`, `k3` | -d_t, d_t^2 / 2, exp(d_t) - 1 - d_t | sum | mean | maximum |
| `binary_kl` | max(KL(b_mu, b_pi), KL(b_pi, b_mu)), b_p: y_t is drawn or not | sum | mean | maximum |
| `m2` | d_t^2; the largest leave until the mean of the rest is at most `upper` | | | |

A rule on the ratio weighs the loss by it. The other statistics only select: what they keep weighs 1.

A bound on the product keeps fewer long completions. Let log mu(y_t) be off by normal noise of deviation s, so that
exp(d_t) has a mean of 1: d_t ~ N(-s^2/2, s^2) under mu, and N(s^2/2, s^2) where tokens count by their ratio, as in the
gradient. A bound C leaves Phi((log C - n s^2/2) / (s sqrt(n))) of the gradient of n tokens, which tends to 0.

Sources: truncated importance sampling, fengyao.notion.site/off-policy-rl; masks by ratio (IcePop), arXiv:2510.18855;
geometric mean and k1 to k3, verl's rollout correction and richardli.xyz/rl-collapse; the second moment (M2PO),
arXiv:2510.01161.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.ratios import LOG_RATIO_BOUND, active_tokens, masked

Level = Literal["token", "sequence", "geometric", "max"]
Statistic = Literal["ratio", "k1", "k2", "k3", "binary_kl", "m2"]
Action = Literal["truncate", "mask", "reject"]
Gather = Callable[[Tensor], Tensor]
"""Concatenate vectors of numbers that are 0 or more, one of each process and of any length."""


@dataclass(frozen=True)
class SamplerRule:
    """One rule about a sampler that is not the policy.

    Args:
        level: the unit, and how tokens are combined.
        statistic: the figure that is held within the bounds.
        lower: lower bound, None for none.
        upper: upper bound, None for none.
        action: `truncate` cuts the ratio to the bounds; `mask` takes units outside of them out of the loss's sum;
            `reject` takes them out of its denominators too, as if they had not been sampled.
        normalize: whether the weights are divided by their mean over the generation.
    """

    level: Level = "token"
    statistic: Statistic = "ratio"
    lower: float | None = None
    upper: float | None = None
    action: Action = "truncate"
    normalize: bool = False

    @property
    def by_token(self) -> bool:
        """True if single tokens are weighed or left out."""
        return self.level == "token"

    def describe(self) -> str:
        """Return the rule in words, such as "token ratio up to 2 (truncate)"."""
        bounds = [
            f"{word} {value:g}" for word, value in (("from", self.lower), ("up to", self.upper)) if value is not None
        ]
        within = [*bounds, f"({self.action})"] if bounds else []
        return " ".join([self.level, self.statistic, *within, *(["normalized"] if self.normalize else [])])


DEFAULT = (SamplerRule(upper=2.0),)
"""Token ratios cut at 2: no completion is dropped for its length."""


def trl_rule(mode: str, lower: float | None, upper: float | None) -> SamplerRule:
    """Return the rule of TRL's `vllm_importance_sampling_mode` and its two bounds."""
    level, _, action = mode.partition("_")
    return SamplerRule(level=level, lower=lower, upper=upper, action=action)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Corrected:
    """The effect of rules on a generation.

    Attributes:
        weights: factors of the loss per token, [batch, 1] or [batch, time]; 0 for what a rule leaves out.
        counted: active tokens that no rule rejects: those of the loss's denominators.
    """

    weights: Float[Tensor, " batch #time"]
    counted: Bool[Tensor, "batch time"]


def corrected(
    rules: Sequence[SamplerRule],
    policy_logps: Float[Tensor, "batch time"],
    sampler_logps: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    gather: Gather = lambda values: values,
) -> Corrected:
    """Weigh completions by the product of all rules' weights.

    Each rule sees all active tokens, also those that another rule leaves out. What is not active has a weight of 1.

    Args:
        rules: in any order.
        policy_logps: log pi_old of the sampled tokens.
        sampler_logps: log mu of the sampled tokens, NaN where unknown.
        mask: active tokens.
        gather: for `m2` and `normalize`, which look at the generation of all processes.
    """
    active = mask.bool()
    filled = torch.where(sampler_logps.isnan(), policy_logps, sampler_logps)
    log_ratio = masked((policy_logps - filled).nan_to_num(), active)
    weights, counted = log_ratio.new_ones(len(active), 1), active
    for rule in rules:
        within = _within(rule, log_ratio, masked(policy_logps, active), masked(filled, active), active, gather)
        weights = weights * _weights(rule, log_ratio, within, active, gather)
        counted = counted & within if rule.action == "reject" else counted
    return Corrected(torch.where(_units(active, weights), weights, 1.0), counted)


def _weights(
    rule: SamplerRule,
    log_ratio: Float[Tensor, "batch time"],
    within: Bool[Tensor, " batch #time"],
    active: Bool[Tensor, "batch time"],
    gather: Gather,
) -> Float[Tensor, " batch #time"]:
    if rule.statistic != "ratio":
        return within.to(log_ratio.dtype)
    ratio = ratio_of(rule.level, log_ratio, active)
    if rule.action != "truncate":
        ratio = torch.where(within, ratio, 0.0)
    elif (rule.lower, rule.upper) != (None, None):
        ratio = ratio.clamp(rule.lower, rule.upper)
    if not rule.normalize:
        return ratio
    units = _units(active, ratio) & within if rule.action == "reject" else _units(active, ratio)
    sums = torch.stack([ratio[units].sum(), units.sum().to(ratio.dtype)])
    total, number = gather(sums).view(-1, 2).sum(dim=0)
    return ratio * number / total if total > 0 else ratio


def _units(active: Bool[Tensor, "batch time"], values: Float[Tensor, " batch #time"]) -> Bool[Tensor, " batch #time"]:
    """Live tokens, or completions that have one, by the shape of `values`."""
    return active if values.shape[1] == active.shape[1] else active.any(dim=1, keepdim=True)


def _within(
    rule: SamplerRule,
    log_ratio: Float[Tensor, "batch time"],
    policy_logps: Float[Tensor, "batch time"],
    sampler_logps: Float[Tensor, "batch time"],
    active: Bool[Tensor, "batch time"],
    gather: Gather,
) -> Bool[Tensor, " batch #time"]:
    """Units whose statistic lies within the bounds; all of them under `truncate`."""
    if rule.action == "truncate":
        return torch.ones_like(log_ratio[:, :1], dtype=torch.bool)
    upper = math.inf if rule.upper is None else rule.upper
    if rule.statistic == "m2":
        squares = log_ratio.square()
        return squares <= second_moment_cut(gather(squares[active]), upper)
    values = statistic(rule, log_ratio, policy_logps, sampler_logps, active)
    return (values >= (-math.inf if rule.lower is None else rule.lower)) & (values <= upper)


def ratio_of(
    level: Level, log_ratio: Float[Tensor, "batch time"], active: Bool[Tensor, "batch time"]
) -> Float[Tensor, " batch #time"]:
    """Ratio of each unit, at most exp(20); `log_ratio` is zero where `active` is not."""
    if level != "token":
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    if level == "geometric":
        log_ratio = log_ratio / active_tokens(active, log_ratio.dtype)
    return log_ratio.clamp(max=LOG_RATIO_BOUND).exp()


def statistic(
    rule: SamplerRule,
    log_ratio: Float[Tensor, "batch time"],
    policy_logps: Float[Tensor, "batch time"],
    sampler_logps: Float[Tensor, "batch time"],
    active: Bool[Tensor, "batch time"],
) -> Float[Tensor, " batch #time"]:
    """Return the statistic of each unit; the tensors are zero where `active` is not."""
    if rule.statistic == "ratio":
        return ratio_of(rule.level, log_ratio, active)
    d = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if rule.statistic == "binary_kl":
        both = bernoulli_kl(sampler_logps, policy_logps), bernoulli_kl(policy_logps, sampler_logps)
        values = torch.maximum(*both)
    else:
        values = kl_estimators[rule.statistic](d)
    if rule.level == "token":
        return values
    if rule.level == "max":
        return values.masked_fill(~active, -math.inf).amax(dim=1, keepdim=True).nan_to_num(neginf=0.0)
    total = masked(values, active).sum(dim=1, keepdim=True)
    return total / active_tokens(active, total.dtype) if rule.level == "geometric" else total


def interpolated(
    policy_logps: Float[Tensor, "batch time"], sampler_logps: Float[Tensor, "batch time"], share: float
) -> Float[Tensor, "batch time"]:
    """l_mu + alpha (l - l_mu): log-probabilities of the policy before training, without a forward of its own.

    alpha, the `share`, is (v_prox - v_mu) / (v - v_mu), with v the number of optimizer steps behind the weights of
    that policy, of the sampler and of the present policy: 1 before the first update, when it is exact, and 0 where
    the sampler has the weights that begin to train. In the authors' code v counts training steps, and v_prox is always
    v - 1. A-3PO, arXiv:2512.06547.
    """
    return sampler_logps + share * (policy_logps - sampler_logps)


def bernoulli_kl(
    first: Float[Tensor, "batch time"], second: Float[Tensor, "batch time"]
) -> Float[Tensor, "batch time"]:
    """KL(b_p, b_q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)), from log p and log q."""
    first, second = first.clamp(-1e4, -1e-12), second.clamp(-1e4, -1e-12)
    rest, other = torch.log(-torch.expm1(first)), torch.log(-torch.expm1(second))
    return first.exp() * (first - second) + rest.exp() * (rest - other)


def second_moment_cut(squares: Float[Tensor, " tokens"], bound: float) -> float:
    """Return the largest square that may stay so that those that stay have a mean of at most `bound`.

    The largest leave first, and equal ones together. M2PO, arXiv:2510.01161.
    """
    distinct, counts = squares.cpu().double().unique(return_counts=True)
    means = (distinct * counts).cumsum(0) / counts.cumsum(0)
    within = int((means <= bound).sum())  # the means of an ascending sequence ascend
    return distinct[within - 1].item() if within else -1.0
