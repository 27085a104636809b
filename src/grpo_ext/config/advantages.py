"""The rules of advantage estimators and their options."""

from collections.abc import Iterator
from typing import Any

from grpo_ext.config.options import option_problems
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.objective import Objective, resolve
from grpo_ext.objective.options import option_defaults


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
    yield from _group_sizes(config, objective)
    yield from _judged_by_advantages(config, objective)


def _judged_by_advantages(config: Any, objective: Objective) -> Iterator[str]:
    """Whether `dynamic_sampling` can find a group without an advantage."""
    compared = estimators.traits(objective.advantage).group_baseline or objective.sees_turns
    if config.dynamic_sampling != "reward" or (compared and not objective.kl_in_reward):
        return
    why = (
        "kl_placement='reward' lowers each completion's reward by its own KL"
        if objective.kl_in_reward
        else f"advantage_estimator={objective.advantage!r} compares rewards over the whole batch"
    )
    yield (
        f"dynamic_sampling='reward' replaces groups without an advantage, but {why}, so that groups of equal rewards "
        "have advantages too. Name the reward that judges, such as dynamic_sampling: accuracy, or remove it."
    )


def _group_sizes(config: Any, objective: Objective) -> Iterator[str]:
    """Whether groups are as large as the estimator needs them; evaluation takes its advantages by the same one."""
    option = estimators.traits(objective.advantage).outnumbered
    if option is None:
        return
    k = (option_defaults(estimators[objective.advantage]) | dict(objective.advantage_kwargs))[option]
    evaluated = config.num_generations_eval if config.eval_strategy != "no" else None
    for name, size in (("num_generations", config.num_generations), ("num_generations_eval", evaluated)):
        if isinstance(k, int) and size is not None and k >= size:
            yield (
                f"advantage_kwargs.{option}={k}: {objective.advantage} needs more than {k} completions, {name} is "
                f"{size}. Set {option} <= {size - 1}, or {name} > {k}."
            )
