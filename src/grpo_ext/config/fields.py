"""The rules of single fields: their paths, types, names and ranges, by the table of settings."""

import dataclasses
import inspect
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from transformers.trainer_pt_utils import AcceleratorConfig

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.paths import OF_THE_RUN, unknown
from grpo_ext.config.rules import Conflict, Rule
from grpo_ext.config.setting import FINITE
from grpo_ext.config.settings import row_of
from grpo_ext.config.spec import fits, out_of_bounds, wrong_type
from grpo_ext.errors import Problem, UnknownNameError
from grpo_ext.objective.losses import find, losses
from grpo_ext.registry import did_you_mean

_ALSO: dict[str, type] = {
    "accelerator_config": AcceleratorConfig,  # in a copy of a config
    "debug": type(None),  # argparse's version of its default
    **dict.fromkeys(("scale_rewards", "shared_prefix", "resume_from_checkpoint"), bool),
}
"""Types that fields may have beside their annotations."""


def path_problems(config: GRPOExtArguments) -> Iterator[Problem]:
    """Yield unknown variables and home folders in a config's paths."""
    for name in OF_THE_RUN:
        yield from unknown(name, getattr(config, name))


def type_problems(config: GRPOExtArguments) -> Iterator[Problem]:
    """Yield the fields of a wrong type: YAML values skip argparse's conversions, which would refuse 1.5 for an int."""
    yield from _type_problems(config, type(config), _ALSO)


def sound_values(part: type, values: object, also: Mapping[str, type]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values that fit a dataclass's fields, and a problem for each other, before its `__post_init__` runs.

    `also` maps fields to a further type that they may have.
    """
    problems = list(_type_problems(values, part, also))
    wrong = {problem.field for problem in problems}
    names = [f.name for f in dataclasses.fields(part) if f.init and f.name not in wrong]
    return {name: getattr(values, name) for name in names}, problems


def _type_problems(values: object, part: type, also: Mapping[str, type]) -> Iterator[Problem]:
    hints = typing.get_type_hints(part)
    for f in dataclasses.fields(part):
        value, hint = getattr(values, f.name), hints[f.name]
        if isinstance(value, also.get(f.name, ())) or fits(value, hint):
            continue
        row, enums = row_of(f), (hint, *typing.get_args(hint))
        if value is False and any("no" in getattr(enum, "_value2member_map_", ()) for enum in enums):
            yield Problem(f.name, value, "YAML reads an unquoted no as false", "Write 'no' in quotes.")
        else:
            default = None if f.default is dataclasses.MISSING else f.default
            names = losses if f.name == "loss_type" else row.choices or ()
            problem = wrong_type(f.name, value, hint, default, names)
            yield dataclasses.replace(problem, cure=row.text) if row.text else problem


def choice_problems(config: GRPOExtArguments) -> Iterator[Problem]:
    """Yield names that a field does not know, and functions that cannot be imported."""
    for f in dataclasses.fields(config):
        name, row, values = f.name, row_of(f), getattr(config, f.name)
        for value in values if isinstance(values, list | tuple) else (values,):
            if row.choices is None or not isinstance(value, str | bool) or value in row.choices:
                continue  # a value of a wrong type is another rule's
            if row.function and isinstance(value, str):
                yield from _import_problems(name, value, typing.cast(Mapping[str, Any], row.choices))
            else:
                usual = str(getattr(f.default, "value", f.default))  # whose beginning probably means it
                hint = did_you_mean(str(value), map(str, row.choices))
                cure = f"Did you mean {usual!r}?" if usual.startswith(f"{value}_") else hint
                yield Problem(name, value, "not one of its values", cure)
    if isinstance(config.loss_type, str):
        try:
            find(config.loss_type)
        except UnknownNameError as error:
            yield Problem("loss_type", config.loss_type, error.reason, error.cure)


def _import_problems(name: str, path: str, choices: Mapping[str, Any]) -> Iterator[Problem]:
    try:
        function = choices[path]
    except UnknownNameError as error:
        yield Problem(name, path, error.reason, error.cure)
        return
    try:
        inspect.signature(function)
    except (TypeError, ValueError):  # not a function, or one of C without named parameters
        yield Problem(name, path, f"a {type(function).__name__}, not a function with named parameters", "Name one.")


def _reward_weights(config: GRPOExtArguments) -> Iterator[Problem]:
    weights: object = config.reward_weights
    if not isinstance(weights, list | tuple):
        return
    for weight in weights:
        if not isinstance(weight, int | float) or not math.isfinite(weight):
            yield Problem("reward_weights", weights, f"{weight!r} is not a finite number", "Give one per reward.")
            return
    if weights and not any(weights) and not config.losses:
        yield Problem(
            "reward_weights", weights, "every reward has the weight 0", "Give at least one reward another weight."
        )


_RANGES: tuple[Rule, ...] = (
    _reward_weights,
    Conflict(
        "max_completion_length",
        lambda c: c.max_completion_length is None,
        "completions would have no limit (stock TRL then generates 20 tokens or crashes)",
        "Set it to the number of tokens a completion may have, for example 512.",
    ),
    Conflict(
        "num_generations",
        lambda c: c.num_generations is None,
        "a group has a size",
        "Set it to 2 or more; the default is 8.",
    ),
    Conflict(
        "max_steps",
        lambda c: isinstance(c.max_steps, int) and (c.max_steps == 0 or c.max_steps < -1),
        "transformers would train for num_train_epochs instead",
        "Set it to 1 or more, or to -1 to train for num_train_epochs.",
    ),
)


def range_problems(config: GRPOExtArguments) -> Iterator[Problem]:
    """Yield numbers that are out of their range."""
    yield from outside(config)
    for rule in _RANGES:
        yield from rule(config)


def outside(part: Any) -> Iterator[Problem]:
    """Yield the numbers among a dataclass's fields that are not finite, or outside of their bounds."""
    for f in dataclasses.fields(part):
        value, bounds = getattr(part, f.name), row_of(f).within or FINITE
        if not isinstance(value, int | float) or isinstance(value, bool) or value in bounds:
            continue
        yield out_of_bounds(f.name, value, bounds, f.default)
