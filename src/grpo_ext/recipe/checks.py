"""Rules between the parts of a recipe (model, data, rewards, training), and warnings of probable mistakes."""

import dataclasses
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trl import DatasetMixtureConfig, ModelConfig

from grpo_ext.config.adapters import adapter_problems, is_adapter
from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.fields import outside
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.mappings import as_mapping
from grpo_ext.config.resuming import FRESH_START, noted, requested
from grpo_ext.config.rules import Conflict, Rule, as_far_as_sound, is_set
from grpo_ext.config.settings import ADAPTED, row_of
from grpo_ext.config.vllm import sharded_problem, splits_weights
from grpo_ext.config.warnings import without_effect
from grpo_ext.data.config import DataConfig, dataset_problems
from grpo_ext.data.eval_sets import best_metric_problems
from grpo_ext.environments import compatibility
from grpo_ext.environments.composition import EnvironmentSpec, any_pays
from grpo_ext.errors import ABSENT, Problem
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.trajectory import COLUMN as TRAJECTORY
from grpo_ext.recipe.parts import Recipe, RecipeArguments
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.protocol import ENVIRONMENT
from grpo_ext.rewards.signatures import needs
from grpo_ext.rollout.dynamic_sampling import judge_problems


def part_problems(
    script: RecipeArguments | None,
    data: DataConfig | None,
    training: GRPOExtConfig,
    model: ModelConfig | None,
    mixture: DatasetMixtureConfig | None,
) -> Iterator[Problem]:
    """Yield problems of and between the parts beside the training's own; a part that failed already is None.

    `training` may hold values that are refused already (`config.rules`).
    """
    if model is not None:
        if not model.model_name_or_path:
            cure = "Set it to a hub id, a folder or 'quickstart'."
            yield Problem("model_name_or_path", None, "no model to train", cure)
        yield from adapter_problems(model)
        yield from outside(model)
        for rule in (_quantized, _loading):
            yield from as_far_as_sound(rule(training, model))
    for rule_of_training in _OF_TRAINING:
        yield from as_far_as_sound(rule_of_training(training))
    if script is not None:
        yield from outside(script)
        if sys.platform == "win32" and script.reward_workers != 0:
            reason = "Windows lacks the pipes and process groups of reward workers"
            cure = "Set reward_workers: 0, which scores in the training process, or train on Linux or in WSL."
            yield Problem("reward_workers", script.reward_workers, reason, cure)
        if data is not None and mixture is not None:
            yield from _data(script, data, mixture)


def _quantized(training: GRPOExtConfig, model: ModelConfig) -> Iterator[Problem]:
    """Yield settings that quantize weights which no process has as a whole to push them to vLLM."""
    for name in ("load_in_4bit", "load_in_8bit"):
        if training.use_vllm and getattr(model, name) and splits_weights():
            yield sharded_problem(name, True)


def ignored_lora(written: Collection[str], model: ModelConfig) -> Iterator[Problem]:
    """Yield LoRA settings, with any value, in a recipe that trains no new adapter; `use_peft: false` allows them."""
    names = {f.name for f in dataclasses.fields(model) if row_of(f).needs == ADAPTED}
    keys = sorted(key for key in names.intersection(written) if getattr(model, key) not in (None, False))
    if not keys or model.use_peft or "use_peft" in written:
        return
    value, beside = getattr(model, keys[0]), {key: getattr(model, key) for key in keys[1:]}
    them = "it" if len(keys) == 1 else "them"
    if is_adapter(model.model_name_or_path):
        reason = f"no effect: model_name_or_path={model.model_name_or_path!r} is an adapter and keeps its own shape"
        yield Problem(keys[0], value, reason, f"Remove {them}.", beside)
    else:
        reason = "no effect without use_peft, and all weights would be trained"
        yield Problem(keys[0], value, reason, f"Set use_peft: true, or remove {them}.", beside)


_INIT_KWARGS = {
    "dtype": "dtype",
    "torch_dtype": "dtype",
    "revision": "model_revision",
    "attn_implementation": "attn_implementation",
}
"""Keys of `model_init_kwargs` that have a setting of their own."""


def _loading(training: GRPOExtConfig, model: ModelConfig) -> Iterator[Problem]:
    kwargs = as_mapping(training.model_init_kwargs)
    for key, name in _INIT_KWARGS.items():
        if key in kwargs and is_set(model, name) and kwargs[key] != getattr(model, name):
            beside = {name: getattr(model, name)}
            yield Problem(f"model_init_kwargs.{key}", kwargs[key], "it overrides the setting", "Keep one.", beside)


def _resume(training: GRPOExtArguments) -> Iterator[Problem]:
    checkpoint: Any = training.resume_from_checkpoint
    wanted, before = requested(checkpoint), noted(Path(training.output_dir or "."))
    carried_out = before is not None and before.asked == wanted  # rotation may have deleted it since
    if wanted not in (None, FRESH_START) and not carried_out and not Path(checkpoint).is_dir():
        cure = f"Correct the path; 'last' takes the last one in output_dir, {FRESH_START!r} starts a new run."
        yield Problem("resume_from_checkpoint", checkpoint, "no such folder", cure)


_OF_TRAINING: tuple[Rule, ...] = (
    Conflict(  # a script of one's own may evaluate by it
        "do_eval",
        lambda c: c.do_eval and c.eval_strategy == "no",
        "it evaluates at no step",
        "Remove it, or set eval_strategy: steps.",
    ),
    _resume,
    Conflict(
        "output_dir",
        lambda c: c.output_dir is not None and not c.output_dir.strip(),
        "empty text is no folder",
        "Name one, or leave it out: trainer_output.",
    ),
)


def _data(script: RecipeArguments, data: DataConfig, mixture: DatasetMixtureConfig) -> Iterator[Problem]:
    name = script.dataset_name
    if bool(name) == bool(mixture.datasets):
        both = "both dataset_name and datasets are" if mixture.datasets else "neither dataset_name nor datasets is"
        yield Problem("dataset_name", name, f"{both} set", "Set one of them.")
    else:
        yield from dataset_problems(
            data, name, dataset_config=script.dataset_config, streaming=script.dataset_streaming
        )


def unrewarded(
    rewards: list[RewardSpec], training: GRPOExtConfig, environments: Sequence[EnvironmentSpec]
) -> Iterator[Problem]:
    """Yield why no completion would be rewarded, and settings that name a reward which does not exist."""
    yield from compatibility.unpaid_problems(environments, [spec for spec in rewards if spec.weight])
    paid = [ENVIRONMENT] if any_pays(environments) else []
    if rewards and not paid and not any(spec.weight for spec in rewards):
        yield from as_far_as_sound(_without_losses(training))
    if names := [*(spec.name for spec in rewards), *paid]:
        yield from as_far_as_sound(judge_problems(training.dynamic_sampling, names))
        yield from as_far_as_sound(best_metric_problems(training.metric_for_best_model, names))


def _without_losses(training: GRPOExtConfig) -> Iterator[Problem]:
    if not training.losses:
        yield Problem("reward_funcs", ABSENT, "every reward has the weight 0", "Give at least one another weight.")


# Warnings.


def recipe_warnings(recipe: Recipe) -> list[str]:
    """Return the warnings about a recipe that has no problems."""
    return [*_idle_settings(recipe), *_switched_off_dropout(recipe), *_doubtful_rewards(recipe)]


def _idle_settings(recipe: Recipe) -> Iterator[str]:
    parts = (recipe.model, recipe.mixture, recipe.script, recipe.data)
    values = SimpleNamespace(**{name: value for part in parts for name, value in vars(part).items()})
    adapter = is_adapter(str(recipe.model.model_name_or_path))  # one that `eval` was given
    values.use_peft = recipe.model.use_peft or adapter
    yield from (str(problem) for part in parts for problem in without_effect(part, values))


def _switched_off_dropout(recipe: Recipe) -> Iterator[str]:
    dropout = recipe.model.lora_dropout
    if recipe.model.use_peft and is_set(recipe.model, "lora_dropout") and dropout and recipe.training.dropout_disabled:
        yield (
            f"lora_dropout={dropout} is switched off by disable_dropout, so that rollouts and the loss see the same "
            "network. Set lora_dropout: 0.0, or disable_dropout: false."
        )


def _doubtful_rewards(recipe: Recipe) -> Iterator[str]:
    config, objective = recipe.training, recipe.training.objective
    pays = any(environment.owns_reward and environment.weight for environment in recipe.environments)
    for spec in recipe.rewards:
        if spec.weight < 0:
            yield (
                f"reward {spec.name!r} has the weight {spec.weight:g}, which rewards low scores. Penalties of "
                "grpo-ext are negative already, and need a positive weight."
            )
        longest, buffer = spec.kwargs.get("max_length", 0), spec.kwargs.get("buffer", 0)
        if spec.function == "soft_overlong" and longest - buffer >= (config.max_completion_length or 0):
            yield (
                f"soft_overlong with max_length={longest} and buffer={buffer}: completions have at most "
                f"max_completion_length={config.max_completion_length} tokens, so the penalty never applies. "
                f"Set max_length: {config.max_completion_length} and a buffer below it."
            )
        if pays and not spec.is_model and TRAJECTORY in needs(spec.callable):
            yield (
                f"reward {spec.name!r} reads `trajectory` beside an environment that pays: where it returns what the "
                "turns were paid, that counts twice. Set the environment's weight: 0, or leave the reward out."
            )
    total = sum(spec.weight for spec in recipe.rewards)
    summed = objective.combination == "sum_then_normalize" and "reward_range" not in objective.advantage_kwargs
    if estimators.traits(objective.advantage).unit_rewards and summed and len(recipe.rewards) > 1 and total > 1:
        yield (
            f"advantage_estimator={objective.advantage!r} needs a total reward in [0, 1], but the weights add up to "
            f"{total:g}. Scale them down to 1, or keep one reward."
        )
