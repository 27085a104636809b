"""A recipe: one YAML file and the command line, read, checked as a whole, and returned as a `Recipe`."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ext.config.broken import as_far_as_sound, is_broken
from grpo_ext.config.launch import planning, rank
from grpo_ext.config.spec import WrongType
from grpo_ext.data.eval_sets import parse as parse_eval_sets
from grpo_ext.data.mixture import ENTRY
from grpo_ext.environments.composition import any_pays
from grpo_ext.environments.composition import parse as parse_environments
from grpo_ext.environments.fit import setting_problems
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.recipe.checks import part_problems, reward_problems
from grpo_ext.recipe.env import take_env
from grpo_ext.recipe.files import find_recipe, read_yaml, split_config
from grpo_ext.recipe.foreign import projects
from grpo_ext.recipe.keys import flags, key_problems
from grpo_ext.recipe.launching import take_launch
from grpo_ext.recipe.lora import ignored
from grpo_ext.recipe.parser import Parts, parse_parts
from grpo_ext.recipe.parts import Recipe
from grpo_ext.recipe.parts import all_keys as all_keys
from grpo_ext.recipe.warnings import recipe_warnings
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.composition import parse as parse_rewards

logger = logging.getLogger(__name__)


def load_recipe(
    argv: Sequence[str],
    look: Callable[[Recipe, Sequence[Problem]], Iterator[Problem]] | None = None,
    *,
    rewards_only: bool = False,
) -> Recipe:
    """Read `--config recipe.yaml [--key value ...]`; the command line wins.

    With a `Look`, its problems of the policy and the data are reported with the rest; with `rewards_only` a recipe
    needs no model and data, and what it has of them is not checked.

    Raises:
        ConfigError: everything that is wrong, at once, before a model is loaded.
    """
    source = _read(argv)
    problems: list[Problem] = []
    os.environ.update(take_env(source.values, problems))
    take_launch(source.values, problems)
    problems += key_problems(source.values, source.args)
    if mixture_problems := list(ENTRY.list_problems("datasets", source.values.get("datasets", []))):
        problems += mixture_problems
        del source.values["datasets"]
    parts = parse_parts(source.values, source.args, source.folder)
    problems += parts.problems
    if parts.model is not None and not rewards_only:
        refused = {problem.field for problem in problems}
        problems += ignored({*source.values, *flags(source.args)} - refused, parts.model)
    recipe, found = _composed(parts, source.folder)
    problems += found
    problems += reward_problems(recipe.rewards, recipe.training, recipe.environments)
    problems += as_far_as_sound(setting_problems(recipe.environments, recipe.training))
    model, mixture = (None, None) if rewards_only else (parts.model, None if mixture_problems else parts.mixture)
    problems += part_problems(parts.script, parts.data, recipe.training, model, mixture)
    if look is not None and None not in (parts.script, parts.data, parts.model, parts.mixture):
        problems += look(recipe, problems)
    if problems := _distinct(problems, parts.unread):
        raise ConfigError(problems)
    if rank() == 0 and not planning():
        for warning in recipe_warnings(recipe):
            logger.warning(warning)
    return recipe


@dataclass(frozen=True)
class _Source:
    """A recipe as it is written."""

    values: dict[str, Any]
    args: list[str]
    folder: Path | None


def _read(argv: Sequence[str]) -> _Source:
    """Read the file and the command line of a recipe; refuse the configuration of another project."""
    name, args = split_config(argv)
    if name is None:
        return _Source({}, args, None)
    file = find_recipe(name)
    values = read_yaml(file)
    if foreign := projects.foreign_file(values, name, frozenset(all_keys())):
        raise ConfigError([Problem(f"--config {name}", ABSENT, "not a recipe", foreign)])
    return _Source(values, args, file.resolve().parent)


def _composed(parts: Parts, folder: Path | None) -> tuple[Recipe, list[Problem]]:
    """Return the recipe of its parts, with rewards, environments and evaluation sets, and their problems."""
    script, training = parts.script, parts.training
    environments, problems = parse_environments(None if script is None else script.environments, folder)
    rewards = list[RewardSpec]()
    if script is not None:
        weights = None if is_broken(training.reward_weights) else training.reward_weights
        rewards, found = _rewards(script, weights, folder)
        problems += found
        sets = script.eval_sets
    eval_sets, found = parse_eval_sets(None if script is None else script.eval_sets, rewards, folder, plays=any_pays(environments))
    problems += found
    if any(spec.weight != 1.0 for spec in rewards):
        training = training.changed(reward_weights=[spec.weight for spec in rewards])
    made: Any = (script, parts.data, training, parts.model, parts.mixture)  # complete if there are no problems
    return Recipe(*made, rewards, eval_sets, environments), problems
