"""The registry that every reward files itself under; apart from the rewards so that they can import it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_ext.registry import Registry

Reward = Callable[..., Any]


@dataclass(frozen=True)
class RewardTraits:
    """What the scoring of a batch must know of a reward."""

    independent: bool = False
    """Whether the score of a completion depends on that completion and its row only, not on the rest of the batch nor
    on earlier calls. Such a batch may be split over workers, and scored one by one after a call that fails."""


rewards: Registry[Reward] = Registry("reward", RewardTraits)

RIGHT = 1.0
"""From which value of its judge on a completion is right, where nothing else is said."""
ENVIRONMENT = "environment"
"""What the reward of the environments is logged under."""


def judge(names: Sequence[str]) -> str:
    """The reward that says what is right, where nothing else is said: `accuracy`, or the first."""
    return "accuracy" if "accuracy" in names else names[0]
