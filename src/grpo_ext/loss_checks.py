"""The rules of the loss: what a recipe says must agree with itself and with its row of the table."""

import dataclasses
import inspect
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from beartype import BeartypeConf
from beartype.door import is_bearable

from .advantages import estimators
from .losses import find
from .objective import Objective, field_of_option, option_names, resolve
from .registry import did_you_mean

TOWER = BeartypeConf(is_pep484_tower=True)  # an int is a fine float


def type_name(hint: Any) -> str:
    """A type as a user would write it."""
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _surrogate(config: Any) -> Iterator[str]:
    row = find(config.loss_type)
    options = set(option_names(row.function))
    for option in ("epsilon_low", "epsilon_high", "delta"):
        name = "epsilon" if option == "epsilon_low" else option
        if getattr(config, name) is not None and option not in options:
            yield f"{name}={getattr(config, name)}: the loss {config.loss_type!r} has no {name}. Remove it."
    for f in dataclasses.fields(config):
        prefix = f.name.partition("_")[0]
        if prefix in ("sapo", "vespo") and row.surrogate != prefix and getattr(config, f.name) != f.default:
            yield f"{f.name}={getattr(config, f.name)}: only loss_type {prefix!r} reads it. Remove it."
    fielded = {option: field_of_option(row, option) for option in options}
    yield from _option_problems("loss_kwargs", config.loss_kwargs, row.function, fielded)
    if isinstance(config.loss_kwargs or {}, Mapping):
        yield from _clip_bounds(config, resolve(config))


def _clip_bounds(config: Any, objective: Objective) -> Iterator[str]:
    options = objective.options
    high = options.get("epsilon_high")
    if objective.row.surrogate == "cispo":
        if high is None:
            yield (
                f"epsilon_high=None: for {config.loss_type!r} it is the upper bound of the ratio itself, and stock "
                "TRL's default of 0.2 makes every gradient 5 times too small. Set epsilon_high: 5.0."
            )
        elif high < 1:
            yield (
                f"epsilon_high={high}: for {config.loss_type!r} it is the upper bound of the ratio itself, and a "
                "bound below 1 shrinks even the on-policy gradient. Set epsilon_high: 5.0."
            )
    delta = options.get("delta")
    if delta is not None and high is not None and delta < 1 + high:
        yield (
            f"delta={delta} is below 1 + epsilon_high = {1 + high:g}: it would cut positive advantages too. "
            f"Set delta >= {1 + high:g}."
        )


def _option_problems(field: str, given: Any, function: Any, fielded: Mapping[str, str | None] = {}) -> Iterator[str]:
    """Problems of a mapping of options against a function's keyword-only parameters."""
    given = given or {}
    if not isinstance(given, Mapping):
        yield (
            f"{field}={given!r} is no mapping. Write {field}: {{option: value}} in a recipe, "
            f"--{field} '{{\"option\": value}}' on the command line."
        )
        return
    parameters = inspect.signature(function).parameters
    hints = typing.get_type_hints(function)
    options = [name for name in option_names(function) if not fielded.get(name)]
    for name, value in given.items():
        if fielded.get(name):
            yield f"{field}.{name}={value!r}: set the field {fielded[name]} instead."
        elif name not in options:
            hint = did_you_mean(str(name), options) if options else "It takes none: remove it."
            yield f"{field}.{name}={value!r}: {function.__name__} has no such option. {hint}"
        elif name in hints and not is_bearable(value, hints[name], conf=TOWER):
            expected = type_name(hints[name])
            yield f"{field}.{name}={value!r}: a {type(value).__name__} where {expected} is expected. Write one."
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{field}.{name}={value!r} is not finite. Give a finite number."
    for name in options:
        if parameters[name].default is inspect.Parameter.empty and name not in given:
            yield f"{field}.{name} is missing: {function.__name__} needs it. Set {field}: {{{name}: ...}}."


def _ratio_level(config: Any) -> Iterator[str]:
    objective = resolve(config)
    level, row = objective.ratio, objective.row
    if level not in row.levels:
        yield (
            f"importance_sampling_level={level!r}: the loss {config.loss_type!r} is defined at "
            f"{' or '.join(row.levels)} level only. Set importance_sampling_level: {row.levels[0]}."
        )
    if (level == "product" or row.surrogate == "gmpo") and config.top_entropy_quantile < 1:
        yield (
            f"top_entropy_quantile={config.top_entropy_quantile}: the loss {config.loss_type!r} has one term for a "
            "whole completion, of which single tokens cannot be left out. Set top_entropy_quantile: 1.0."
        )


def _kl(config: Any) -> Iterator[str]:
    objective = resolve(config)
    bias = config.use_bias_correction_kl
    if bias is not None and config.kl_estimator not in (None, "r_k3" if bias else "k3"):
        yield (
            f"use_bias_correction_kl={bias} means kl_estimator={'r_k3' if bias else 'k3'!r}, but kl_estimator="
            f"{config.kl_estimator!r} is set too. Keep one of them."
        )
    for name in ("kl_estimator", "kl_placement"):
        if config.beta == 0.0 and getattr(config, name) is not None:
            yield f"{name}={getattr(config, name)!r}: with beta=0.0 there is no KL term. Set beta > 0 or remove it."
    if config.beta == 0.0:
        return
    if objective.kl_placement == "reward":
        yield from _kl_in_reward(objective)
    elif objective.kl == "r_k3" and objective.ratio != "token" and config.loss_defaults == "paper":
        yield (
            f"kl_estimator='r_k3' with importance_sampling_level={objective.ratio!r}: only the token ratio makes it "
            "unbiased. Set kl_estimator: k3+."
        )
    if objective.kl == "sequence_k3" and objective.aggregation != "seq-mean-token-mean":
        yield (
            f"kl_estimator='sequence_k3' with loss_aggregation={objective.aggregation!r} would weigh a completion's "
            "KL by its length. Set loss_aggregation: seq-mean-token-mean."
        )


def _kl_in_reward(objective: Objective) -> Iterator[str]:
    if objective.kl not in ("k1", "k2", "k3", "abs"):
        yield f"kl_estimator={objective.kl!r} with kl_placement='reward': only its value counts there. Set k1."
    if objective.combination != "sum_then_normalize":
        yield (
            f"kl_placement='reward' with multi_objective_aggregation={objective.combination!r}: there is no total "
            "reward to take the KL from. Set kl_placement: loss."
        )
    if objective.advantage in UNIT_REWARDS:
        yield (
            f"kl_placement='reward' with advantage_estimator={objective.advantage!r}, which needs rewards in [0, 1]. "
            "Set kl_placement: loss."
        )


UNIT_REWARDS = ("maxrl", "beta", "bernoulli", "pass_at_k")
"""Estimators that are defined for rewards in [0, 1] only."""


def _advantage(config: Any) -> Iterator[str]:
    objective = resolve(config)
    scale = {True: "group", False: "none"}.get(config.scale_rewards, config.scale_rewards)
    if scale is not None and config.advantage_estimator not in (None, scale):
        yield (
            f"scale_rewards={config.scale_rewards!r} means advantage_estimator={scale!r}, but advantage_estimator="
            f"{config.advantage_estimator!r} is set too. Keep one of them."
        )
    if objective.combination == "normalize_then_sum" and objective.advantage != "group":
        yield (
            f"multi_objective_aggregation='normalize_then_sum' normalises by group and batch itself and would ignore "
            f"scale_rewards / advantage_estimator={objective.advantage!r}. Set 'group' or sum_then_normalize."
        )
    if config.missing_rewards is not None and objective.combination != "sum_then_normalize":
        yield (
            f"missing_rewards={config.missing_rewards!r} speaks of the weighted sum, which "
            f"multi_objective_aggregation={objective.combination!r} does not form. Remove one of them."
        )
    yield from _option_problems("advantage_kwargs", config.advantage_kwargs, estimators[objective.advantage], {})
    yield from _advantage_options(objective.advantage_kwargs)
    yield from _pass_at_k(config, objective.advantage_kwargs.get("k"))


def _advantage_options(options: Mapping[str, Any]) -> Iterator[str]:
    for name in ("window", "k", "ddof", "eps", "batch_eps", "clamp", "cap", "floor"):
        least = 1 if name in ("window", "k") else 0
        value = options.get(name, least)
        if isinstance(value, (int, float)) and value < least:
            yield f"advantage_kwargs.{name}={value} must be {least} or more. Correct it, or leave it unset."
    if isinstance(options.get("ddof"), int) and options["ddof"] > 1:
        yield f"advantage_kwargs.ddof={options['ddof']}: a standard deviation has 0 or 1. Set one of them."
    bounds = options.get("reward_range")
    if isinstance(bounds, list) and not (len(bounds) == 2 and -math.inf < bounds[0] < bounds[1] < math.inf):
        yield f"advantage_kwargs.reward_range={bounds} must be [lowest, highest]. Set it to the reward's own range."


def _pass_at_k(config: Any, k: Any) -> Iterator[str]:
    """Evaluation takes its advantages by the same estimator."""
    evaluated = config.num_generations_eval if config.eval_strategy != "no" else None
    for name, size in (("num_generations", config.num_generations), ("num_generations_eval", evaluated)):
        if isinstance(k, int) and size is not None and k >= size:
            yield (
                f"advantage_kwargs.k={k}: leave-one-out pass@k needs more than k completions, {name} is {size}. "
                f"Set k <= {size - 1}."
            )


def _trl_defaults(config: Any) -> Iterator[str]:
    if config.loss_defaults == "trl" and not find(config.loss_type).trl:
        gspo = " (GSPO there is loss_type: grpo with importance_sampling_level: sequence)"
        yield (
            f"loss_defaults='trl': stock TRL has no loss {config.loss_type!r}"
            f"{gspo if config.loss_type == 'gspo' else ''}. Set loss_defaults: paper."
        )


LOSS_RULES = (_surrogate, _ratio_level, _kl, _advantage, _trl_defaults)
"""Each takes a config and yields its problems; a config whose names are unknown may make it raise."""
