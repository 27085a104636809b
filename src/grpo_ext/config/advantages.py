"""The rules of advantage estimators and their options."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from grpo_ext.config.broken import Rule
from grpo_ext.config.spec import option_problems
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.options import option_defaults


def _scale(config: Any) -> Iterator[str]:
    scale = {True: "group", False: "none"}.get(config.scale_rewards, config.scale_rewards)
    if scale is not None and config.advantage_estimator not in (None, scale):
        yield (
            f"scale_rewards={config.scale_rewards!r} means advantage_estimator={scale!r}, but advantage_estimator="
            f"{config.advantage_estimator!r} is set too. Keep one of them."
        )


def _normalised_twice(config: Any) -> Iterator[str]:
    objective = config.objective
    if objective.combination == "normalize_then_sum" and objective.advantage != "group":
        yield (
            f"multi_objective_aggregation='normalize_then_sum' normalises by group and batch itself and would ignore "
            f"scale_rewards / advantage_estimator={objective.advantage!r}. Set 'group' or sum_then_normalize."
        )


def _missing(config: Any) -> Iterator[str]:
    objective = config.objective
    if config.missing_rewards is not None and objective.combination != "sum_then_normalize":
        yield (
            f"missing_rewards={config.missing_rewards!r} speaks of the weighted sum, which "
            f"multi_objective_aggregation={objective.combination!r} does not form. Remove one of them."
        )


def _judged_by_advantages(config: Any) -> Iterator[str]:
    """Refuse `dynamic_sampling: reward` where every group has an advantage."""
    if config.dynamic_sampling != "reward":
        return
    objective = config.objective
    compared = estimators.traits(objective.advantage).group_baseline or objective.sees_turns
    if compared and not objective.kl_in_reward:
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


def _options(config: Any) -> Iterator[str]:
    yield from option_problems("advantage_kwargs", config.advantage_kwargs, estimators[config.objective.advantage], {})


def _group_size(name: str, config: Any) -> Iterator[str]:
    """Whether a group is as large as the estimator needs it."""
    objective = config.objective
    option = estimators.traits(objective.advantage).outnumbered
    if option is None:
        return
    k = (option_defaults(estimators[objective.advantage]) | dict(objective.advantage_kwargs))[option]
    size = getattr(config, name)
    if isinstance(k, int) and size is not None and k >= size:
        yield (
            f"advantage_kwargs.{option}={k}: {objective.advantage} needs more than {k} completions, {name} is "
            f"{size}. Set {option} <= {size - 1}, or {name} > {k}."
        )


def _evaluated_group_size(config: Any) -> Iterator[str]:
    """The same of evaluation, which takes its advantages by the same estimator."""
    if config.eval_strategy != "no":
        yield from _group_size("num_generations_eval", config)


ADVANTAGE_RULES: tuple[Rule, ...] = (
    *(_scale, _normalised_twice, _missing, _judged_by_advantages, _options),
    *(partial(_group_size, "num_generations"), _evaluated_group_size),
)
"""Whether estimator, combination, their options and TRL's names for them agree."""
