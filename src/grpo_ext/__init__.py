"""grpo-ext: every GRPO-style objective as the papers have it, on top of TRL's GRPOTrainer."""

import importlib
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from grpo_ext.versions import naming_untested

if TYPE_CHECKING:
    from grpo_ext.config.grpo_config import GRPOExtConfig as GRPOExtConfig
    from grpo_ext.environments.protocol import Agent as Agent
    from grpo_ext.environments.protocol import Conversation as Conversation
    from grpo_ext.environments.protocol import Step as Step
    from grpo_ext.errors import ConfigError as ConfigError
    from grpo_ext.objective.losses import register as register_loss
    from grpo_ext.objective.trajectory import Trajectory as Trajectory
    from grpo_ext.objective.trajectory import Turn as Turn
    from grpo_ext.trainer.grpo_trainer import GRPOExtTrainer as GRPOExtTrainer


__version__ = "0.1.0"

_HOMES = {
    "Agent": "environments.protocol:Agent",
    "ConfigError": "errors:ConfigError",
    "Conversation": "environments.protocol:Conversation",
    "GRPOExtConfig": "config.grpo_config:GRPOExtConfig",
    "GRPOExtTrainer": "trainer.grpo_trainer:GRPOExtTrainer",
    "Step": "environments.protocol:Step",
    "Trajectory": "objective.trajectory:Trajectory",
    "Turn": "objective.trajectory:Turn",
    "register_advantage": "objective.advantages:estimators.register",
    "register_aggregation": "objective.aggregation:aggregations.register",
    "register_kl": "objective.kl:kl_estimators.register",
    "register_loss": "objective.losses:register",
    "register_reward": "rewards.protocol:rewards.register",
}
__all__ = [
    "Agent",
    "ConfigError",
    "Conversation",
    "GRPOExtConfig",
    "GRPOExtTrainer",
    "Step",
    "Trajectory",
    "Turn",
    "__version__",
    "register_advantage",
    "register_aggregation",
    "register_kl",
    "register_loss",
    "register_reward",
]


def __getattr__(name: str) -> Any:
    """Import what is public on first use, so that `import grpo_ext` itself is instant."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    with naming_untested():
        return attrgetter(attribute)(importlib.import_module(f"{__name__}.{module}"))
