"""Rewards: columns in, one float per completion out, None where a completion cannot be scored."""

from grpo_ext.rewards import (  # noqa: F401  imported so that their names are registered
    answers,
    code,
    functions,
    lengths,
    minimind,
    remote,
    reward_model,
    trl_names,
)
from grpo_ext.rewards._registry import Reward, rewards
from grpo_ext.rewards.composite import RewardSpec, parse
from grpo_ext.rewards.runtime import RewardError, Runtime, build

__all__ = ["Reward", "RewardError", "RewardSpec", "Runtime", "build", "parse", "rewards"]
