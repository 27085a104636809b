"""A recipe: one YAML file and the command line, read, checked as a whole, and returned as a `Recipe`."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.launch import planning, rank
from grpo_ext.config.rules import as_far_as_sound, is_broken
from grpo_ext.config.spec import WrongType
from grpo_ext.data.eval_sets import EvalSet, parse_eval_sets
from grpo_ext.data.mixture import DATASET_ENTRY
from grpo_ext.environments.compatibility import setting_problems
from grpo_ext.environments.composition import EnvironmentSpec, any_pays, parse_environments
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.recipe.checks import ignored_lora, part_problems, recipe_warnings, unrewarded
from grpo_ext.recipe.files import LISTED, find_recipe, read_yaml, split_config, unset
from grpo_ext.recipe.launching import take_env, take_launch
from grpo_ext.recipe.parser import Parts, flags, key_problems, parse_parts
from grpo_ext.recipe.parts import Recipe, RecipeArguments
from grpo_ext.recipe.parts import all_keys as all_keys
from grpo_ext.rewards.composition import RewardSpec, parse_rewards

logger = logging.getLogger(__name__)


def load_recipe(
    argv: Sequence[str],
    preflight: Callable[[Recipe, Sequence[Problem]], Iterator[Problem]] | None = None,
    *,
    rewards_only: bool = False,
) -> Recipe:
    """Read `--config recipe.yaml [--key value ...]`; the command line wins.

    The problems that a `Preflight` finds in the policy and the data are reported with the rest; with `rewards_only` a
    recipe needs no model and data, and what it has of them is not checked.

    Raises:
        ConfigError: everything that is wrong, at once, before a model is loaded.
    """
    values, args, folder = _read(argv)
    problems: list[Problem] = []
    os.environ.update(take_env(values, problems))
    take_launch(values, problems)
    problems += key_problems(values, args)
    if mixture_problems := list(DATASET_ENTRY.list_problems("datasets", values.get("datasets", []))):
        problems += mixture_problems
        del values["datasets"]
    parts = parse_parts(values, args, folder)
    problems += parts.problems
    if parts.model is not None and not rewards_only:
        refused = {problem.field for problem in problems}
        problems += ignored_lora({*values, *flags(args)} - refused, parts.model)
    lists, list_problems = _parse_lists(parts, folder)
    problems += list_problems
    problems += unrewarded(lists.rewards, parts.training, lists.environments)
    problems += as_far_as_sound(setting_problems(lists.environments, parts.training))
    model, mixture = (None, None) if rewards_only else (parts.model, None if mixture_problems else parts.mixture)
    problems += part_problems(parts.script, parts.data, parts.training, model, mixture)
    recipe = _recipe(parts, lists)
    if recipe is not None and preflight is not None:
        problems += preflight(recipe, problems)
    if problems := _distinct(problems, parts.unread):
        raise ConfigError(problems if values or "model_name_or_path" in flags(args) else _without_recipe(problems))
    assert recipe is not None
    if rank() == 0 and not planning():
        for warning in recipe_warnings(recipe):
            logger.warning(warning)
    return recipe


def _read(argv: Sequence[str]) -> tuple[dict[str, Any], list[str], Path | None]:
    """Return the values, command line and folder of a recipe."""
    name, args = split_config(argv)
    if name is None:
        return {}, unset({}, args, all_keys()), None
    file = find_recipe(name)
    values = read_yaml(file)
    return values, unset(values, args, all_keys()), file.resolve().parent


def _without_recipe(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems of a command line that names no recipe, in place of all those of a recipe."""
    cure = f"Write --config RECIPE: a file of yours, or a packaged one. {LISTED}"
    rest = [p for p in problems if p.field not in ("model_name_or_path", "dataset_name", "reward_funcs")]
    return [Problem("--config", ABSENT, "no recipe is named", cure), *rest]


class _Lists(NamedTuple):
    """The lists of a recipe, without the entries that have problems."""

    rewards: list[RewardSpec]
    environments: list[EnvironmentSpec]
    eval_sets: list[EvalSet]


def _parse_lists(parts: Parts, folder: Path | None) -> tuple[_Lists, list[Problem]]:
    script = parts.script
    if script is None:
        return _Lists([], [], []), []
    environments, problems = parse_environments(script.environments, folder)
    rewards, of_rewards = _parse_rewards(script, parts.training, folder)
    eval_sets, of_sets = parse_eval_sets(script.eval_sets, rewards, folder, plays=any_pays(environments))
    return _Lists(rewards, environments, eval_sets), [*problems, *of_rewards, *of_sets]


def _parse_rewards(
    script: RecipeArguments, training: GRPOExtConfig, folder: Path | None
) -> tuple[list[RewardSpec], list[Problem]]:
    """Parse `reward_funcs`, with TRL's `reward_model_name_or_path` first as in TRL's own script."""
    entries: list[Any] | None = script.reward_funcs
    if entries is None and script.environments and not script.reward_model_name_or_path:
        if training.reward_weights is None or is_broken(training.reward_weights):
            return [], []  # `reward_problems` reports environments without rewards of their own
        reason = "reward_funcs is not set, whose weights these are"
        cure = "Write a weight into the environment's entry."
        return [], [Problem("reward_weights", training.reward_weights, reason, cure)]
    if script.reward_model_name_or_path:
        entries = [script.reward_model_name_or_path, *(entries or [])]
    weights = None if is_broken(training.reward_weights) else training.reward_weights
    return parse_rewards([] if entries is None else entries, weights, folder)


def _recipe(parts: Parts, lists: _Lists) -> Recipe | None:
    """Return the recipe; None if a part could not be made."""
    script, data, training, model, mixture = parts.script, parts.data, parts.training, parts.model, parts.mixture
    if script is None or data is None or model is None or mixture is None:
        return None
    if any(spec.weight != 1.0 for spec in lists.rewards):
        training = training.changed(reward_weights=[spec.weight for spec in lists.rewards])
    return Recipe(script, data, training, model, mixture, lists.rewards, lists.eval_sets, lists.environments)


def _distinct(problems: Sequence[Problem], unread: Sequence[Problem]) -> list[Problem]:
    """Leave out repeated problems, and those of a value that could not be read or has the wrong type."""
    first: dict[str, Problem] = {}
    for problem in problems:
        if isinstance(problem, WrongType):
            first.setdefault(problem.field, problem)
    kept = [
        problem
        for problem in problems
        if first.get(problem.field, problem) == problem and not any(_overlap(problem.field, u.field) for u in unread)
    ]
    return list({str(problem): problem for problem in [*kept, *unread]}.values())


def _overlap(one: str, other: str) -> bool:
    """Return whether one setting is the other, or a part of it, such as `reward_funcs[0].name`."""
    short, long = sorted((one, other), key=len)
    return long == short or long.startswith((f"{short}.", f"{short}["))
