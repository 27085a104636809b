"""Warnings about settings of a recipe that are allowed but probably not meant."""

import dataclasses
from collections.abc import Iterator

from grpo_ext.config.adapters import is_adapter
from grpo_ext.config.rules import is_set
from grpo_ext.config.warnings import no_effect
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.trajectory import COLUMN as TRAJECTORY
from grpo_ext.recipe.parts import Recipe
from grpo_ext.rewards.signatures import needs


def recipe_warnings(recipe: Recipe) -> list[str]:
    """Return the warnings about a recipe that has no problems."""
    return [*_idle(recipe), *_adapter(recipe), *_rewards(recipe)]


_MIXTURE_KEYS = ("streaming", "test_split_size")
_DATASET_KEYS = ("dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming")
_EVALUATION_KEYS = ("eval_steps", "eval_delay", "per_device_eval_batch_size", "num_generations_eval")
_4BIT_KEYS = ("bnb_4bit_quant_type", "bnb_4bit_quant_storage", "use_bnb_nested_quant")


def _idle(recipe: Recipe) -> Iterator[str]:
    mixed, evaluated = bool(recipe.mixture.datasets), recipe.training.eval_strategy != "no"
    adapted = recipe.model.use_peft or is_adapter(str(recipe.model.model_name_or_path))  # one that `eval` was given
    lora = tuple(f.name for f in dataclasses.fields(recipe.model) if f.name.startswith(("lora_", "use_rslora")))
    for part, names, switch, cure in (
        (recipe.model, (*lora, "use_dora"), adapted, "use_peft: true"),
        (recipe.mixture, _MIXTURE_KEYS, mixed, "datasets"),
        (recipe.script, _DATASET_KEYS, not mixed, "dataset_name (a mixture has its own keys, inside datasets)"),
        (recipe.data, ("test_size",), not mixed, "dataset_name (a mixture has test_split_size)"),
        (recipe.data, ("split_seed",), recipe.data.test_size is not None, "test_size"),
        (recipe.model, _4BIT_KEYS, recipe.model.load_in_4bit, "load_in_4bit: true"),
        (recipe.training, _EVALUATION_KEYS, evaluated, "eval_strategy: steps or epoch"),
    ):
        idle = [] if switch else [name for name in names if is_set(part, name)]
        if idle:
            yield str(no_effect(idle, cure))


def _adapter(recipe: Recipe) -> Iterator[str]:
    dropout = recipe.model.lora_dropout
    if recipe.model.use_peft and is_set(recipe.model, "lora_dropout") and dropout and recipe.training.dropout_disabled:
        yield (
            f"lora_dropout={dropout} is switched off by disable_dropout, so that rollouts and the loss see the same "
            "network. Set lora_dropout: 0.0, or disable_dropout: false."
        )


def _rewards(recipe: Recipe) -> Iterator[str]:
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
