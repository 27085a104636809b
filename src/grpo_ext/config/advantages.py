"""The rules of advantage estimators and their options."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_ext.config.options import option_problems
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.objective import resolve

UNIT_REWARDS = ("maxrl", "beta", "bernoulli", "pass_at_k")
"""Estimators that are defined for rewards in [0, 1] only."""


def advantage_problems(config: Any) -> Iterator[str]:
    """Whether estimator, combination, their options and TRL's names for them agree."""
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
    yield from option_problems("advantage_kwargs", config.advantage_kwargs, estimators[objective.advantage], {})
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
