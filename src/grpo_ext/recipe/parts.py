"""The parts of a recipe, TRL's dataclasses and ours, and the recipe itself."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from trl import DatasetMixtureConfig, ModelConfig
from trl.scripts.grpo import GRPOScriptArguments

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.data.config import DataConfig
from grpo_ext.data.eval_sets import EvalSet
from grpo_ext.environments.composition import EnvironmentSpec
from grpo_ext.rewards.composition import RewardSpec


@dataclass
class RecipeArguments(GRPOScriptArguments):
    """TRL's script arguments, and how completions are scored and evaluated."""

    reward_workers: int | None = field(
        default=None,
        metadata={
            "help": "Worker processes that score rewards beside each training process. None (default): its share of "
            "the cores, at most 8; 0: in the training process itself, where no call can be stopped or contained."
        },
    )
    eval_sets: list[str] | None = field(
        default=None,
        metadata={
            "help": "Data that `grpo-ext eval` and the training run evaluate on: a list of {name, dataset_name, "
            "split, samples, k, temperature, top_p, limit, every, judge, ...}; docs/evaluation.md."
        },
    )
    reward_memory_gib: float = field(
        default=8.0,
        metadata={"help": "Memory that a reward worker, or an environment's process, may use, in GiB; 0: no limit."},
    )
    environments: list[str] | None = field(
        default=None,
        metadata={
            "help": "Environments with which completions are conversations: a list of {name or path, kwargs, tools, "
            "max_turns, turn_timeout, weight, on_error, isolate}; docs/environments.md."
        },
    )


PARTS: tuple[Any, ...] = (RecipeArguments, DataConfig, GRPOExtConfig, ModelConfig, DatasetMixtureConfig)


def all_keys() -> list[str]:
    """Return every key of a recipe."""
    return sorted({f.name for part in PARTS for f in dataclasses.fields(part) if f.init})


@dataclass(frozen=True)
class Recipe:
    """Everything that a run needs, checked."""

    script: RecipeArguments
    data: DataConfig
    training: GRPOExtConfig
    model: ModelConfig
    mixture: DatasetMixtureConfig
    rewards: list[RewardSpec] = field(default_factory=list)
    eval_sets: list[EvalSet] = field(default_factory=list)
    environments: list[EnvironmentSpec] = field(default_factory=list)
