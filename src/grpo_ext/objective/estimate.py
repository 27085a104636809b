"""Apply an estimator, also a user's own, and enforce the rules that hold for all of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_ext.errors import Problem
from grpo_ext.objective import token_advantages, turn_advantages  # noqa: F401 (their estimators are in the registry)
from grpo_ext.objective.advantages import Rewards, TokenRewards, estimators, zero_variance
from grpo_ext.objective.options import bind


class BrokenRule(ValueError):
    """An estimator returned something that no estimator may return."""

    def __init__(self, estimator: str, reason: str, cure: str) -> None:
        self.problem = Problem("advantage_estimator", estimator, reason, cure)
        super().__init__(str(self.problem))


def estimate(name: str, rewards: Rewards, offered: Mapping[str, Any] = {}, **options: Any) -> TokenRewards | Rewards:
    """Compute advantages by the estimator of that name or path.

    A completion that could not be scored gets exactly 0; so do a group without a signal (unless the estimator's
    baseline is not the group's) and a token that is not active. All others are finite, one for each completion or one
    for each of its tokens.

    Raises:
        BrokenRule: the estimator returned something else.
    """
    advantages = bind(estimators[name], offered)(rewards, **options)
    mask = offered.get("mask")
    per_token = None if mask is None else tuple(mask.shape)
    if not isinstance(advantages, Tensor) or tuple(advantages.shape) not in (tuple(rewards.shape), per_token):
        what = list(advantages.shape) if isinstance(advantages, Tensor) else f"a {type(advantages).__name__}"
        raise BrokenRule(
            name,
            f"it returned {what} for rewards {list(rewards.shape)}",
            "Return a tensor [groups, completions]; or, if it takes `mask`, of the mask's shape.",
        )
    advantages = advantages.to(rewards.dtype)
    without_advantage = rewards.isnan()
    if estimators.traits(name).group_baseline:
        without_advantage = without_advantage | zero_variance(rewards)[:, None]
    if advantages.dim() == 3:
        without_advantage = without_advantage[..., None] | (mask == 0)
    advantages = torch.where(without_advantage, torch.zeros_like(advantages), advantages)
    wrong = ~advantages.isfinite()
    if wrong.any():
        group, value = int(wrong.nonzero()[0, 0]), advantages[wrong][0].item()
        raise BrokenRule(
            name,
            f"an advantage of {value:g} for the rewards {rewards[group].tolist()} of one group",
            "Leave NaN, a completion that could not be scored, out of its statistics (nanmean, nansum), and do not "
            "divide by a number that can be 0.",
        )
    return advantages
