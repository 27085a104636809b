"""A recipe: one YAML file and the command line, parsed by TRL's parser and checked as a whole."""

import argparse
import dataclasses
import logging
import os
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trl import TrlParser

from grpo_ext.config.broken import as_far_as_sound, is_broken, without
from grpo_ext.config.fields import sound_values
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.launch import planning, rank
from grpo_ext.config.mappings import holds
from grpo_ext.config.paths import PATHS, expand, unknown
from grpo_ext.config.settings import FUNCTIONS
from grpo_ext.data.eval_sets import parse as parse_eval_sets
from grpo_ext.environments.composition import any_pays
from grpo_ext.environments.composition import parse as parse_environments
from grpo_ext.environments.fit import setting_problems
from grpo_ext.errors import ConfigError
from grpo_ext.recipe.checks import ALSO, mixture_problems, part_problems, reward_problems
from grpo_ext.recipe.env import take_env
from grpo_ext.recipe.files import as_list, find_recipe, read_yaml, split_config
from grpo_ext.recipe.foreign import recognise
from grpo_ext.recipe.launching import take_launch
from grpo_ext.recipe.look import no_look, stand_in
from grpo_ext.recipe.lora import ignored
from grpo_ext.recipe.parts import PARTS, Recipe
from grpo_ext.recipe.parts import all_keys as all_keys
from grpo_ext.recipe.replaced_keys import REPLACED
from grpo_ext.recipe.warnings import recipe_warnings
from grpo_ext.registry import did_you_mean, located
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.composition import parse as parse_rewards

logger = logging.getLogger(__name__)


# One TRL parser for each dataclass, so that a mistake in one does not hide those in another.


class _Parser(TrlParser):
    """TRL's parser, which leaves text that is no number or bool as it is: the checks tell of all of it at once."""

    def error(self, message: str) -> Any:
        raise ConfigError([message.removeprefix("argument ")])

    def _get_value(self, action: Any, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            return arg_string

    def _check_value(self, action: Any, value: Any) -> None:
        """Leave a field's choices to the checks."""


def load_recipe(
    argv: Sequence[str], look: Callable[..., Iterator[str]] = no_look, *, rewards_only: bool = False
) -> Recipe:
    """Parse `--config recipe.yaml [--key value ...]`; what stands on the command line wins.

    With a `Look`, what it finds in the policy and the data is told with the rest; with `rewards_only` a recipe may say
    nothing of model and data, and what it says is not looked at.

    Raises:
        ConfigError: everything that is wrong, at once, before a model is loaded.
    """
    name, args = split_config(argv)
    file = find_recipe(name) if name else None
    folder = file.resolve().parent if file else None
    values = read_yaml(file) if file else {}
    if foreign := recognise.foreign_file(values, str(name), frozenset(all_keys())):
        raise ConfigError([foreign])
    problems: list[str] = []
    os.environ.update(take_env(values, problems))
    take_launch(values, problems)
    problems += [*_unknown_keys(values, args), *_stray_values(args), *_said_no(values, args)]
    if mixed := list(mixture_problems(values.get("datasets", []))):
        problems += mixed
        del values["datasets"]
    given: dict[Any, dict[str, Any]] = {}
    unread: list[tuple[str, str]] = []
    parts = {part: _parse_part(part, values, args, folder, problems, given, unread) for part in PARTS}
    script, data, training, model, mixture = (parts[part] for part in PARTS)
    if model is not None and not rewards_only:
        refused = {str(problem).partition("=")[0] for problem in problems}
        problems += ignored({*values, *_flags(args)} - refused, model)
    if model is not None and re.fullmatch(r"\w+", str(model.lora_target_modules or "")):
        # TRL takes a list of one apart, and PEFT takes what it held for a regular expression of whole paths
        model.lora_target_modules = [model.lora_target_modules]
    environments, found = parse_environments(None if script is None else script.environments, folder)
    problems += found
    settings = _as_given(given.get(GRPOExtConfig)) if training is None else training
    rewards = _rewards(script, settings.reward_weights, folder, problems)
    problems += [*reward_problems(rewards, settings, environments)]
    problems += as_far_as_sound(setting_problems(environments, settings))
    entries, plays = None if script is None else script.eval_sets, any_pays(environments)
    eval_sets, found = parse_eval_sets(entries, rewards, folder, plays=plays)
    problems += found
    sound = None if mixed or rewards_only else mixture
    problems += part_problems(script, data, settings, None if rewards_only else model, sound)
    named = SimpleNamespace(
        script=script,
        data=data,
        training=stand_in(given.get(GRPOExtConfig, {})) if training is None else training,
        model=model,
        mixture=sound,
        eval_sets=eval_sets,
        environments=environments,
    )
    problems += look(named, rewards, problems)
    if problems := _each_once(problems, unread):
        raise ConfigError(problems)
    if any(spec.weight != 1.0 for spec in rewards):
        training.reward_weights = [spec.weight for spec in rewards]
    recipe = Recipe(script, data, training, model, mixture, rewards, eval_sets, environments)
    if rank() == 0 and not planning():
        for warning in recipe_warnings(recipe):
            logger.warning(warning)
    return recipe


def _unknown_keys(values: Mapping[str, Any], args: Sequence[str]) -> Iterator[str]:
    known = all_keys()
    flags = _flags(args)
    options = _Parser(PARTS, allow_abbrev=False, add_help=False)._option_string_actions if flags else {}
    for key in [*values, *(flag for flag in flags if f"--{flag}" not in options)]:
        if key in known:
            continue
        value = f"={values[key]!r}" if key in values else ""
        if key == "env":  # which the recipe's values hold no more
            yield "env: it is a key of a recipe only. Write it there, or export the variables before the start."
        elif str(key).removeprefix("no_") in known:
            yield f"{key}{value}: no such key, and it would be ignored. {_negation(key.removeprefix('no_'))}"
        elif re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", str(key)):
            yield f"{key}{value}: no such key; it looks like an environment variable. Write env: {{{key}: ...}}."
        elif key in REPLACED:
            yield f"{key}{value}: {REPLACED[key]}"
        elif isinstance(values.get(key), Mapping) and set(values[key]) & set(known):
            inside = ", ".join(map(str, values[key]))
            yield f"{key}: no such key. A recipe is flat: write {inside} without {key} above."
        elif (found := recognise.answer(str(key))) is not None:
            yield f"{key}{value}: {found}"
        else:
            yield f"{key}{value}: no such key. {_hint(str(key), known)}"


def _flags(args: Sequence[str]) -> list[str]:
    """Keys that the command line gives."""
    return [arg[2:].split("=")[0].replace("-", "_") for arg in args if re.match(r"--[A-Za-z]", arg)]


def _stray_values(args: Sequence[str]) -> Iterator[str]:
    """Values on the command line that belong to no key; argparse would pass over them."""
    if not args:
        return
    try:
        _, rest = _Parser(PARTS, allow_abbrev=False, add_help=False).parse_known_args(list(args))
    except ConfigError:  # told by the part that the value belongs to
        return
    for before, value in zip(["", *rest], rest, strict=False):
        if not value.startswith("--") and not before.startswith("--"):
            key, sign, rest_of_it = value.partition("=")
            cure = f"--{key} {rest_of_it}" if sign and key in all_keys() else f"--key {value}, or --config {value}"
            yield f"{value!r} on the command line belongs to no key. Write {cure}."


def _negation(key: str) -> str:
    """How to switch a key off that has no `--no_` form."""
    field = next(f for part in PARTS for f in dataclasses.fields(part) if f.name == key)
    cure = "false" if "bool" in str(field.type) else "VALUE"
    return f"Write --{key} {cure} on the command line, {key}: {cure} in a recipe."


def _hint(key: str, known: list[str]) -> str:
    hint = did_you_mean(key, known)
    return hint if hint.startswith("Did") else "`grpo-ext train --help-all` lists all keys. Remove it."


def _said_no(values: Mapping[str, Any], args: Sequence[str]) -> Iterator[str]:
    """`do_train` and `do_eval` said to be false, which as a default means nothing."""
    said = [name for name in ("do_train", "do_eval") if name in values or any(name in arg for arg in args)]
    if not said:
        return
    part: Any = GRPOExtConfig
    parser = _Parser(part, allow_abbrev=False, add_help=False)
    parser.set_defaults(**{name: values[name] for name in (*said, "eval_strategy") if name in values})
    given, _ = parser.parse_known_args(list(args))
    if "do_train" in said and given.do_train is False:
        yield "do_train=False: to train is what this recipe is for. Remove it; `grpo-ext check` trains nothing."
    if "do_eval" in said and given.do_eval is False and given.eval_strategy not in ("no", False, None):
        yield (
            f"do_eval=False with eval_strategy={given.eval_strategy!r}, which evaluates. Set eval_strategy: 'no', or "
            "remove do_eval."
        )


def _parse_part(
    part: Any,
    values: Mapping[str, Any],
    args: Sequence[str],
    folder: Path | None,
    problems: list[str],
    raw: dict[Any, dict[str, Any]],
    unread: list[tuple[str, str]],
) -> Any:
    """Return the part, or None if it is not sound.

    `raw` gets what was given for it, sound or not; `unread` paths with an unknown variable and lists that cannot be
    read, each with its problem.
    """
    parser = _Parser(part, allow_abbrev=False, add_help=False)
    parser.set_defaults_with_config(
        **{k: v for k, v in values.items() if k in {f.name for f in dataclasses.fields(part)}}
    )
    try:
        parsed, _ = parser.parse_known_args(list(args))
        given = raw[part] = vars(parsed)
        lists = {name for name, hint in typing.get_type_hints(part).items() if holds(list, hint)}
        for key, value in given.items():
            is_word = key in lists and isinstance(value, str) and value.startswith("[")
            given[key] = as_list(key, [value] if is_word else value, unread)
        for key in given.keys() & PATHS:
            unread += [(str(p.value), str(p)) for p in unknown(key, given[key])]
            given[key] = expand(key, given[key])
        if part is not GRPOExtConfig:  # which tells of its types itself, with all that is wrong in it
            given, told = sound_values(part, parsed, ALSO)
            problems += map(str, told)
        for key in given.keys() & FUNCTIONS:
            given[key] = located(given[key], folder) if isinstance(given[key], str) else given[key]
        return part(**given)
    except ConfigError as error:
        problems += map(str, error.problems)
    except (ImportError, OSError, TypeError, ValueError) as error:
        problems.append(f"{part.__name__}: {error}")
    return None


def _as_given(values: dict[str, Any] | None) -> Any:
    """Return settings that are not sound as a whole; None: their command line could not be parsed."""
    if values is not None:
        return GRPOExtConfig.as_given(values)
    return without(object.__new__(GRPOExtConfig), (f.name for f in dataclasses.fields(GRPOExtConfig)))


def _each_once(problems: list[str], unread: list[tuple[str, str]]) -> list[str]:
    """Leave out what follows from a value that was of the wrong type, or that could not be read."""
    problems = [text for text in map(str, problems) if not any(part in text for part, _ in unread)]
    problems += [sentence for _, sentence in unread]
    wrong = {problem.partition("=")[0] for problem in problems if " is expected. " in problem}
    told: set[str] = set()
    kept = []
    for problem in dict.fromkeys(problems):
        name = problem.partition("=")[0]
        if name not in wrong or name not in told:
            kept.append(problem)
        told.add(name)
    return kept


def _rewards(script: Any, weights: Any, folder: Path | None, problems: list[str]) -> list[RewardSpec]:
    """Specs of `reward_funcs`, with TRL's `reward_model_name_or_path` first as in TRL's own script."""
    if script is None:
        return []
    entries = script.reward_funcs
    if entries is None and script.environments and not script.reward_model_name_or_path:
        return []  # whether these have rewards of their own is told with them
    if script.reward_model_name_or_path:
        model = {"name": script.reward_model_name_or_path.split("/")[-1], "func": script.reward_model_name_or_path}
        entries = [model, *(entries or [])]
    weights = None if is_broken(weights) else weights
    specs, found = parse_rewards([] if entries is None else entries, weights, folder)
    problems += map(str, found)
    return specs
