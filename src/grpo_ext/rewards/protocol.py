"""The registry of rewards, apart from the rewards so that they can import it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_ext.errors import Problem
from grpo_ext.registry import Registry

Reward = Callable[..., Any]


@dataclass(frozen=True)
class RewardTraits:
    """Properties of a reward that decide how a batch is scored."""

    independent: bool = False
    """Whether the score of a completion depends only on that completion and its row, not on the rest of the batch nor
    on earlier calls. Such a batch may be split over workers, and scored one by one after a call that fails."""
    column_or_option: tuple[str, str] | None = None
    """A column, and the option that stands for it: without both it cannot score."""


rewards: Registry[Reward] = Registry("reward", RewardTraits)

RIGHT = 1.0
"""Score from which a completion counts as right by default."""
ENVIRONMENT = "environment"
"""Log name of the environments' reward."""


class OptionError(ValueError):
    """An option of a reward that cannot be used; `problem` holds its name, value, reason and cure."""

    def __init__(self, option: str, value: object, reason: str, cure: str, **beside: object) -> None:
        self.problem = Problem(option, value, reason, cure, beside)
        super().__init__(str(self.problem))


def deciding_reward(names: Sequence[str]) -> str:
    """Return the reward that decides by default whether a completion is right: `accuracy`, or the first."""
    return "accuracy" if "accuracy" in names else names[0]
