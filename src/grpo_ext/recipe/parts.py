"""The parts of a recipe, TRL's dataclasses and ours, the recipe, and the text of `grpo-ext train --help-all`."""

import dataclasses
import textwrap
from dataclasses import dataclass, field
from typing import Any

from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.utils import ScriptArguments

from grpo_ext.config.declarations import RecipeSettings, TrainingSettings
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.data.config import DataConfig
from grpo_ext.data.eval_sets import EvalSet
from grpo_ext.environments.composition import EnvironmentSpec
from grpo_ext.rewards.composition import RewardSpec


@dataclass
class RecipeArguments(RecipeSettings, GRPOScriptArguments):
    """TRL's script arguments, and how completions are scored and evaluated."""


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


# Every key, by subject, ours first.

OURS, REWARDS_AND_DATA, MODEL, TRLS = (
    "The loss, rollouts and monitoring (grpo-ext)",
    "Rewards and data",
    "The model and LoRA",
    "GRPO and vLLM (TRL)",
)
_SUBJECTS: dict[str, tuple[Any, ...]] = {
    OURS: (TrainingSettings,),
    REWARDS_AND_DATA: (RecipeSettings, GRPOScriptArguments, ScriptArguments, DataConfig, DatasetMixtureConfig),
    MODEL: (ModelConfig,),
    TRLS: (GRPOConfig,),
}
REST = "Training (transformers)"


def subjects() -> dict[str, list[dataclasses.Field]]:
    """All fields of a recipe's parts, each once."""
    left = {f.name: f for part in PARTS for f in dataclasses.fields(part) if f.init}
    by_title = {
        title: [left.pop(name) for part in parts for name in part.__annotations__ if name in left]
        for title, parts in _SUBJECTS.items()
    }
    return {**by_title, REST: list(left.values())}


def print_help() -> None:
    """Every key with its meaning and its default."""
    for title, fields in subjects().items():
        print(f"{title}\n")
        for f in fields:
            meaning = " ".join(str(f.metadata.get("help", "")).replace("%%", "%").split())
            named = "default" in meaning.lower() or f.default in (None, dataclasses.MISSING)
            line = f"--{f.name}  {meaning}" + ("" if named else f" Default: {f.default}.")
            print(textwrap.fill(line, 112, initial_indent="  ", subsequent_indent=" " * 8))
        print()
