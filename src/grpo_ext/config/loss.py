"""The rules of the loss: what a recipe says must agree with itself and with its row of the table."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_ext.config.advantages import UNIT_REWARDS, advantage_problems
from grpo_ext.config.options import option_problems
from grpo_ext.objective.losses import find
from grpo_ext.objective.objective import Objective, field_of_option, option_names, resolve


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
    yield from option_problems("loss_kwargs", config.loss_kwargs, row.function, fielded)
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


def _trl_defaults(config: Any) -> Iterator[str]:
    if config.loss_defaults == "trl" and not find(config.loss_type).trl:
        gspo = " (GSPO there is loss_type: grpo with importance_sampling_level: sequence)"
        yield (
            f"loss_defaults='trl': stock TRL has no loss {config.loss_type!r}"
            f"{gspo if config.loss_type == 'gspo' else ''}. Set loss_defaults: paper."
        )


LOSS_RULES = (_surrogate, _ratio_level, _kl, advantage_problems, _trl_defaults)
"""Each takes a config and yields its problems; a config whose names are unknown may make it raise."""
