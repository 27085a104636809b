"""The registry that every reward files itself under; apart from the rewards so that they can import it."""

from collections.abc import Callable, Sequence
from typing import Any

from grpo_ext.registry import Registry

Reward = Callable[..., Any]
rewards: Registry[Reward] = Registry("reward")

RIGHT = 1.0
"""From which value of its judge on a completion is right, where nothing else is said."""
ENVIRONMENT = "environment"
"""What the reward of the environments is logged under."""


def judge(names: Sequence[str]) -> str:
    """The reward that says what is right, where nothing else is said: `accuracy`, or the first."""
    return "accuracy" if "accuracy" in names else names[0]
