"""Every packaged reward under its name: to import this module is to register them."""

from grpo_ext.rewards.code import reward  # noqa: F401
from grpo_ext.rewards.library import answers, baselines, functions, lengths, minimind, trl_names, verifiers  # noqa: F401
from grpo_ext.rewards.models import remote, reward_model  # noqa: F401
from grpo_ext.rewards.protocol import rewards as rewards
