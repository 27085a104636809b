"""The registry that every reward files itself under; apart from the rewards so that they can import it."""

from collections.abc import Callable
from typing import Any

from grpo_ext.registry import Registry

Reward = Callable[..., Any]
rewards: Registry[Reward] = Registry("reward")
