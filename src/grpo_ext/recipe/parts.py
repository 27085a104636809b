"""The parts of a recipe, TRL's dataclasses and ours, the recipe, and the text of `grpo-ext train --help-all`."""

import dataclasses
import textwrap
from dataclasses import dataclass, field
from typing import Any

from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.utils import ScriptArguments

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.spec import described
from grpo_ext.data.config import DataConfig
from grpo_ext.data.eval_sets import EvalSet
from grpo_ext.environments.composition import EnvironmentSpec
from grpo_ext.rewards.composition import RewardSpec


@dataclass
class RecipeArguments(GRPOScriptArguments):
    """TRL's script arguments, and how completions are scored and evaluated."""

    dataset_name: str | None = described(
        None, "Path or name of the dataset; a mixture has `datasets` in its place, not both."
    )
    reward_funcs: list[str] | None = described(
        None, "Rewards: a list of names, paths, reward models or {name, func, weight, kwargs, ...}; docs/rewards.md."
    )
    reward_workers: int | None = described(
        None,
        "Worker processes that score rewards beside each training process. None (default): its share of "
        "the cores, at most 8; 0: in the training process itself, where no call can be stopped or contained.",
    )
    eval_sets: list[str] | None = described(
        None,
        "Data that `grpo-ext eval` and the training run evaluate on: a list of {name, dataset_name, "
        "split, samples, k, temperature, top_p, limit, every, judge, ...}; docs/evaluation.md.",
    )
    reward_memory_gib: float = described(
        8.0, "Memory that a reward worker, or an environment's process, may use, in GiB; 0: no limit."
    )
    environments: list[str] | None = described(
        None,
        "Environments with which completions are conversations: a list of {name or path, kwargs, tools, "
        "max_turns, turn_timeout, weight, on_error, isolate, secrets}; docs/environments.md.",
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


# Every key, by subject, ours first.

OURS, REWARDS_AND_DATA, MODEL, TRLS = (
    "The loss, rollouts and monitoring (grpo-ext)",
    "Rewards and data",
    "The model and LoRA",
    "GRPO and vLLM (TRL)",
)
_SUBJECTS: dict[str, tuple[Any, ...]] = {
    OURS: (GRPOExtArguments,),
    REWARDS_AND_DATA: (RecipeArguments, GRPOScriptArguments, ScriptArguments, DataConfig, DatasetMixtureConfig),
    MODEL: (ModelConfig,),
    TRLS: (GRPOConfig,),
}
REST = "Training (transformers)"


def subjects() -> dict[str, list[dataclasses.Field]]:
    """All fields of a recipe's parts, each once."""
    left = {f.name: f for part in PARTS for f in dataclasses.fields(part) if f.init}
    found = {
        title: [left.pop(name) for part in parts for name in part.__annotations__ if name in left]
        for title, parts in _SUBJECTS.items()
    }
    return {**found, REST: list(left.values())}


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
