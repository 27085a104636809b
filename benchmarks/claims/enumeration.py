"""Exact means and variances of gradient estimates, for policies small enough to enumerate, through the package.

A policy here is a table of logits, one row for each prompt; a completion is one token, right (reward 1) or wrong (0).
Advantages, loss per token, aggregation and gradient are those of the package, in float64. A gradient estimate is
sum_i c_i s_i, with s_i the score of completion i and c_i = -(dL/dl_i) times the number of prompts.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grpo_ext.objective.aggregation import step_totals
from grpo_ext.objective.objective import Objective, resolve

FIELDS = ("advantage_estimator", "advantage_kwargs", "scale_rewards", "use_bias_correction_kl", "loss_aggregation")
FIELDS += ("loss_aggregation_kwargs", "importance_sampling_level", "kl_estimator", "kl_placement", "missing_rewards")
FIELDS += ("multi_objective_aggregation", "epsilon", "epsilon_high", "loss_kwargs")
"""Settings that the row of a loss fills."""


def objective(loss_type: str = "rloo", **settings: Any) -> Objective:
    """Return the objective of a recipe with these settings; lengths are 1, so aggregations differ by a constant."""
    config = dict.fromkeys(FIELDS) | {"loss_defaults": "paper", "beta": 0.0, "max_completion_length": 1}
    config["loss_type"] = loss_type
    return resolve(SimpleNamespace(**config | settings))


def estimator(name: str, **options: Any) -> Objective:
    """Return -(1/B) sum_i A_i l_i with these advantages."""
    return objective(advantage_estimator=name, advantage_kwargs=options)


@dataclass(frozen=True)
class Prompt:
    """The policy at one prompt: probability of each completion, and which are right."""

    probabilities: Tensor
    right: Tensor

    @property
    def rate(self) -> float:
        """Pass rate."""
        return self.probabilities[self.right].sum().item()

    @property
    def scores(self) -> Tensor:
        """Gradient of each completion's log-probability in the logits, [completions, logits]."""
        return torch.eye(len(self.probabilities), dtype=torch.float64) - self.probabilities

    @property
    def rise(self) -> Tensor:
        """Gradient of the pass rate."""
        return self.mean(self.right) * self.rate

    def mean(self, chosen: Tensor) -> Tensor:
        """Mean score of the chosen completions."""
        weights = self.probabilities * chosen
        return weights @ self.scores / weights.sum()

    def square(self, chosen: Tensor) -> float:
        """Mean squared norm of the score of the chosen completions."""
        weights = self.probabilities * chosen
        return (weights @ self.scores.square().sum(1) / weights.sum()).item()


def prompt(rate: float, right: int = 32, wrong: int = 32) -> Prompt:
    """Return a policy with this pass rate; the first completion of each kind is twice as probable as the last."""
    spread = [torch.linspace(2, 1, n, dtype=torch.float64) for n in (right, wrong)]
    shares = [part * mass / part.sum() for part, mass in zip(spread, (rate, 1 - rate), strict=True)]
    return Prompt(torch.cat(shares), torch.arange(right + wrong) < right)


def advantages(of: Objective, rewards: Tensor) -> Tensor:
    """Return the advantages of one generation batch, [prompts, completions]."""
    mask = torch.ones(*rewards.shape, 1, dtype=torch.int64)
    found = of.advantages(rewards[..., None], torch.ones(1, dtype=torch.float64), mask=mask)
    return found.squeeze(-1) if found.dim() == 3 else found


def by_group(of: Objective) -> bool:
    """Return whether a group has the same advantages alone as beside another group."""
    both = advantages(of, rewards_of([1, 2], 4))
    return torch.allclose(both[:1], advantages(of, rewards_of([1], 4)), rtol=0, atol=1e-12)


def coefficients(of: Objective, advantages: Tensor) -> Tensor:
    """Return c_i of each completion from advantages [..., prompts, completions], by the package's loss on-policy."""
    rows = advantages.reshape(-1)
    logps = torch.zeros(len(rows), 1, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(len(rows), 1, dtype=torch.int64)
    tensors = of.tensors(logps, {"advantages": rows}, mask)
    totals = step_totals([mask[: advantages.shape[-1]]])
    (found,) = torch.autograd.grad(of.aggregate(of.surrogate_loss(tensors), mask, totals), logps)
    return -found.reshape(advantages.shape)


@dataclass(frozen=True)
class Moments:
    """Exact moments of one prompt's gradient estimate."""

    mean: Tensor
    variance: float
    """Trace of the covariance."""

    @property
    def noise(self) -> float:
        """Variance over the squared norm of the mean: it does not depend on the scale of the estimate."""
        return self.variance / self.mean.square().sum().item()


def weight(moments: Moments, at: Prompt) -> float:
    """Return the factor of the gradient of the pass rate in the mean."""
    return (moments.mean @ at.rise / at.rise.square().sum()).item()


def patterns(prompts: int, group: int) -> list[tuple[int, ...]]:
    """Return all numbers of right completions of a batch's prompts."""
    return list(itertools.product(range(group + 1), repeat=prompts))


def rewards_of(counts: Sequence[int], group: int) -> Tensor:
    """Return rewards with so many ones, [prompts, completions]."""
    return (torch.arange(group) < torch.tensor(counts)[:, None]).double()


def moments(of: Objective | None, batch: Sequence[Prompt], group: int) -> list[Moments]:
    """Return the moments of each prompt of a generation batch, exactly: a sum over all numbers of right completions.

    Given the rewards, completions are independent, and an advantage depends only on its reward and on the numbers of
    right completions. Without an objective the advantage is the reward: REINFORCE without a baseline.
    """
    counts = patterns(len(batch), group)
    rewards = torch.stack([rewards_of(c, group) for c in counts])
    if of is None:
        found = rewards
    elif len(batch) == 1 and by_group(of):
        found = advantages(of, rewards[:, 0])[:, None]  # groups do not see each other: all at once
    else:
        found = torch.stack([advantages(of, r) for r in rewards])
    c = coefficients(of or estimator("loo"), found)
    chance = [math.prod(binomial(group, k, q.rate) for k, q in zip(n, batch, strict=True)) for n in counts]
    number = torch.tensor(counts, dtype=torch.float64)
    return [_moments(q, c[:, i], number[:, i], torch.tensor(chance, dtype=torch.float64)) for i, q in enumerate(batch)]


def binomial(n: int, k: int, p: float) -> float:
    """Return the chance of k successes among n."""
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


def _moments(at: Prompt, c: Tensor, k: Tensor, chance: Tensor) -> Moments:
    """Return moments from coefficients [batches, completions], the right ones first, k of them."""
    group = c.shape[1]
    right, wrong = torch.where(k > 0, c[:, 0], 0.0), torch.where(k < group, c[:, -1], 0.0)
    means = at.mean(at.right), at.mean(~at.right)
    mean = (chance * right * k).sum() * means[0] + (chance * wrong * (group - k)).sum() * means[1]
    second = right**2 * (k * at.square(at.right) + k * (k - 1) * means[0].square().sum())
    second += wrong**2 * ((group - k) * at.square(~at.right) + (group - k) * (group - k - 1) * means[1].square().sum())
    second += 2 * right * wrong * k * (group - k) * (means[0] @ means[1])
    return Moments(mean, ((chance * second).sum() - mean.square().sum()).item())


def enumerated(of: Objective, batch: Sequence[Prompt], group: int) -> list[Moments]:
    """Return the same from every sequence of completions, without that argument: for tests, of small batches."""
    drawn = torch.tensor(list(itertools.product(range(len(batch[0].right)), repeat=group * len(batch))))
    drawn = drawn.reshape(-1, len(batch), group)
    rewards = torch.stack([q.right[drawn[:, i]].double() for i, q in enumerate(batch)], 1)
    c = coefficients(of, torch.stack([advantages(of, r) for r in rewards]))
    chances = torch.stack([q.probabilities[drawn[:, i]] for i, q in enumerate(batch)], 1).prod(-1).prod(-1)
    found = []
    for i, q in enumerate(batch):
        estimates = (c[:, i, :, None] * q.scores[drawn[:, i]]).sum(1)
        mean = chances @ estimates
        found.append(Moments(mean, (chances @ (estimates - mean).square().sum(1)).item()))
    return found
