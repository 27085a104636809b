"""Text of `grpo-ext train --help-all`: every key of a recipe, by subject, ours first."""

import dataclasses
import textwrap
from typing import Any

from trl import GRPOConfig, ModelConfig
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.utils import DatasetMixtureConfig, ScriptArguments

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.data.config import DataConfig
from grpo_ext.recipe.parts import PARTS, RecipeArguments

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
            print(textwrap.fill(_line(f), 112, initial_indent="  ", subsequent_indent=" " * 8))
        print()


def _line(f: dataclasses.Field) -> str:
    meaning = " ".join(str(f.metadata.get("help", "")).replace("%%", "%").split())
    told = "default" in meaning.lower() or f.default in (None, dataclasses.MISSING)
    return f"--{f.name}  {meaning}" + ("" if told else f" Default: {f.default}.")
