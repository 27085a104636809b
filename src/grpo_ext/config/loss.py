"""The rules of the loss: what a recipe says must agree with itself and with its row of the table."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

from grpo_ext.config.advantages import ADVANTAGE_RULES
from grpo_ext.config.broken import Rule
from grpo_ext.config.spec import Spec, option_problems
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.aggregation import aggregations
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.losses import OPTION_FIELDS, find, losses
from grpo_ext.objective.objective import AGGREGATION_FIELDS, Objective
from grpo_ext.objective.options import option_defaults


def _surrogate(config: Any) -> Iterator[str]:
    row = find(config.loss_type)
    fielded = {option: row.field_of(option) for option in option_defaults(row.function)}
    problems = list(option_problems("loss_kwargs", config.loss_kwargs, row.function, fielded))
    yield from problems
    if problems:
        return
    options = config.objective.options
    for option, value in options.items():
        if fielded.get(option) and value is not None:
            yield from Spec.of_function(row.function).value_problems(str(fielded[option]), option, value)
    if row.conflict is not None and (conflict := row.conflict(**options)):
        yield conflict


_FIELDS = sorted(set(OPTION_FIELDS.values()).union(*(row.fields.values() for row in losses.values())))


def _of_another_loss(name: str, config: Any) -> Iterator[str]:
    """A field that sets an option of some losses, but of this one nothing."""
    row = find(config.loss_type)
    own = map(row.field_of, option_defaults(row.function))
    default = next((f.default for f in dataclasses.fields(config) if f.name == name), None)
    if name in own or getattr(config, name, default) == default:
        return
    readers = [other for other, row in losses.items() if name in map(row.field_of, option_defaults(row.function))]
    more = ", ..." if len(readers) > 3 else ""
    yield (
        f"{name}={getattr(config, name)}: loss_type {config.loss_type!r} has no such option, only loss_type "
        f"{', '.join(map(repr, readers[:3]))}{more} reads it. Remove it."
    )


def _ratio_level(config: Any) -> Iterator[str]:
    objective = config.objective
    level, row = objective.ratio, objective.row
    if level not in row.levels:
        yield (
            f"importance_sampling_level={level!r}: the loss {config.loss_type!r} is defined at "
            f"{' or '.join(row.levels)} level only. Set importance_sampling_level: {row.levels[0]}."
        )


def _one_term(config: Any) -> Iterator[str]:
    objective = config.objective
    if objective.one_term and config.top_entropy_quantile < 1:
        yield (
            f"top_entropy_quantile={config.top_entropy_quantile}: the loss {config.loss_type!r} has one term for a "
            "whole completion, of which single tokens cannot be left out. Set top_entropy_quantile: 1.0."
        )


def _aggregation(config: Any) -> Iterator[str]:
    function = aggregations[config.loss_aggregation or find(config.loss_type).aggregation]
    fielded = {name: name for name in AGGREGATION_FIELDS if name in option_defaults(function)}
    yield from option_problems("loss_aggregation_kwargs", config.loss_aggregation_kwargs, function, fielded)


def _kl_names(config: Any) -> Iterator[str]:
    bias = config.use_bias_correction_kl
    if bias is not None and config.kl_estimator not in (None, "r_k3" if bias else "k3"):
        yield (
            f"use_bias_correction_kl={bias} means kl_estimator={'r_k3' if bias else 'k3'!r}, but kl_estimator="
            f"{config.kl_estimator!r} is set too. Keep one of them."
        )


def _unused_kl(name: str, config: Any) -> Iterator[str]:
    if config.beta == 0.0 and getattr(config, name) is not None:
        yield f"{name}={getattr(config, name)!r}: with beta=0.0 there is no KL term. Set beta > 0 or remove it."


def _kl_level(config: Any) -> Iterator[str]:
    if config.beta == 0.0:
        return
    objective = config.objective
    if objective.kl_placement == "reward":
        yield from _kl_in_reward(objective)
    elif objective.ratio not in kl_estimators.traits(objective.kl).levels and config.loss_defaults == "paper":
        yield (
            f"kl_estimator={objective.kl!r} with importance_sampling_level={objective.ratio!r}: only the token ratio "
            "makes it unbiased. Set kl_estimator: k3+."
        )


def _kl_of_lengths(config: Any) -> Iterator[str]:
    if config.beta == 0.0:
        return
    objective = config.objective
    once = aggregations.traits(objective.aggregation).completion_mean
    if kl_estimators.traits(objective.kl).per_completion and not once:
        yield (
            f"kl_estimator={objective.kl!r} with loss_aggregation={objective.aggregation!r} would weigh a "
            "completion's KL by its length. Set loss_aggregation: seq-mean-token-mean."
        )


def _kl_in_reward(objective: Objective) -> Iterator[str]:
    if not kl_estimators.traits(objective.kl).in_reward:
        yield f"kl_estimator={objective.kl!r} with kl_placement='reward': only its value counts there. Set k1."
    if objective.combination != "sum_then_normalize":
        yield (
            f"kl_placement='reward' with multi_objective_aggregation={objective.combination!r}: there is no total "
            "reward to take the KL from. Set kl_placement: loss."
        )
    if estimators.traits(objective.advantage).unit_rewards:
        yield (
            f"kl_placement='reward' with advantage_estimator={objective.advantage!r}, which needs rewards in [0, 1]. "
            "Set kl_placement: loss."
        )


def _trl_defaults(config: Any) -> Iterator[str]:
    row = find(config.loss_type)
    if config.loss_defaults == "trl" and not row.trl:
        spelling = f" ({row.trl_name} computes it)" if row.trl_name else ""
        yield (f"loss_defaults='trl': stock TRL has no loss {config.loss_type!r}{spelling}. Set loss_defaults: paper.")


LOSS_RULES: tuple[Rule, ...] = (
    *(partial(_of_another_loss, name) for name in _FIELDS),
    *(_surrogate, _ratio_level, _one_term, _kl_names),
    *(partial(_unused_kl, name) for name in ("kl_estimator", "kl_placement")),
    *(_kl_level, _kl_of_lengths, _aggregation, *ADVANTAGE_RULES, _trl_defaults),
)
"""What a recipe says of the loss must agree with itself and with its row of the table."""
