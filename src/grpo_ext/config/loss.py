"""The rules of the loss: its settings must agree with each other and with its row of the table."""

import dataclasses
from collections.abc import Iterator
from functools import partial

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.rules import Conflict, Rule
from grpo_ext.config.spec import Spec, option_problems
from grpo_ext.errors import Problem
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.aggregation import aggregations
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.losses import OPTION_FIELDS, find, losses
from grpo_ext.objective.objective import AGGREGATION_FIELDS
from grpo_ext.objective.options import option_defaults

# The surrogate and its options.


def _surrogate(config: GRPOExtArguments) -> Iterator[Problem]:
    row = find(config.loss_type)
    with_fields = {option: row.field_of(option) for option in option_defaults(row.function)}
    problems = list(option_problems("loss_kwargs", config.loss_kwargs, row.function, with_fields))
    yield from problems
    if problems:
        return
    options, spec = config.objective.options, Spec.of_function(row.function)
    for option, value in options.items():
        if with_fields.get(option) and value is not None:
            yield from spec.value_problems(str(with_fields[option]), option, value)
    if row.conflict is not None and (conflict := row.conflict(**options)):
        yield Problem("loss_type", config.loss_type, conflict.removesuffix("."), "")


_FIELDS = sorted(set(OPTION_FIELDS.values()).union(*(row.fields.values() for row in losses.values())))


def _of_another_loss(name: str, config: GRPOExtArguments) -> Iterator[Problem]:
    """Refuse a field that sets an option of other losses."""
    row = find(config.loss_type)
    own = map(row.field_of, option_defaults(row.function))
    default = next((f.default for f in dataclasses.fields(config) if f.name == name), None)
    if name in own or getattr(config, name, default) == default:
        return
    readers = [other for other, row in losses.items() if name in map(row.field_of, option_defaults(row.function))]
    more = ", ..." if len(readers) > 3 else ""
    reason = (
        f"loss_type {config.loss_type!r} has no such option, only loss_type {', '.join(map(repr, readers[:3]))}{more} "
        "reads it"
    )
    yield Problem(name, getattr(config, name), reason, "Remove it.")


def _ratio_level(config: GRPOExtArguments) -> Iterator[Problem]:
    level, levels = config.objective.ratio, config.objective.row.levels
    if level not in levels:
        reason = f"the loss {config.loss_type!r} is defined at {' or '.join(levels)} level only"
        yield Problem("importance_sampling_level", level, reason, f"Set importance_sampling_level: {levels[0]}.")


def _trl_defaults(config: GRPOExtArguments) -> Iterator[Problem]:
    row = find(config.loss_type)
    if config.loss_defaults == "trl" and not row.trl:
        spelling = f" ({row.trl_name} computes it)" if row.trl_name else ""
        reason = f"stock TRL has no loss {config.loss_type!r}{spelling}"
        yield Problem("loss_defaults", "trl", reason, "Set loss_defaults: paper.")


def _aggregation(config: GRPOExtArguments) -> Iterator[Problem]:
    function = aggregations[config.loss_aggregation or find(config.loss_type).aggregation]
    with_fields = {name: name for name in AGGREGATION_FIELDS if name in option_defaults(function)}
    yield from option_problems("loss_aggregation_kwargs", config.loss_aggregation_kwargs, function, with_fields)


def idle_clip(config: GRPOExtArguments) -> str:
    """Return why the clip of the loss cannot act; "" where it can, or the loss has none."""
    updates = (config.steps_per_generation or 1) * config.num_iterations / config.gradient_accumulation_steps
    sampler = ("sampler",) if config.rollout_ahead else ("sampler", "interpolated")  # which are one without an age
    old_is_sampler = config.samples_otherwise and config.old_logps in sampler
    if config.objective.row.clip_regions is None or updates > 1 or old_is_sampler:
        return ""
    return (
        "cannot act: each generation is used for one optimizer step, in which the ratio is 1 (more steps: "
        "num_iterations, steps_per_generation)"
    )


# The KL term.


def _kl_names(config: GRPOExtArguments) -> Iterator[Problem]:
    bias, means = config.use_bias_correction_kl, "r_k3" if config.use_bias_correction_kl else "k3"
    if bias is not None and config.kl_estimator not in (None, means):
        beside = {"kl_estimator": config.kl_estimator}
        yield Problem("use_bias_correction_kl", bias, f"it means kl_estimator={means!r}", "Keep one of them.", beside)


# Advantages.


def _scale(config: GRPOExtArguments) -> Iterator[Problem]:
    scale: object = {True: "group", False: "none"}.get(config.scale_rewards, config.scale_rewards)  # type: ignore[call-overload]
    if scale is not None and config.advantage_estimator not in (None, scale):
        beside = {"advantage_estimator": config.advantage_estimator}
        reason = f"it means advantage_estimator={scale!r}"
        yield Problem("scale_rewards", config.scale_rewards, reason, "Keep one of them.", beside)


def _judged_by_advantages(config: GRPOExtArguments) -> Iterator[Problem]:
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
    yield Problem(
        "dynamic_sampling",
        "reward",
        f"it replaces groups without an advantage, but {why}, so that groups of equal rewards have advantages too",
        "Name the reward that judges, such as dynamic_sampling: accuracy, or remove it.",
    )


def _estimator_options(config: GRPOExtArguments) -> Iterator[Problem]:
    yield from option_problems("advantage_kwargs", config.advantage_kwargs, estimators[config.objective.advantage])


def _group_size(name: str, config: GRPOExtArguments) -> Iterator[Problem]:
    """Refuse groups that are too small for an option of the estimator, in training or in evaluation."""
    objective = config.objective
    option = estimators.traits(objective.advantage).outnumbered
    if option is None or (name == "num_generations_eval" and config.eval_strategy == "no"):
        return
    k = (option_defaults(estimators[objective.advantage]) | dict(objective.advantage_kwargs))[option]
    size = getattr(config, name)
    if isinstance(k, int) and size is not None and k >= size:
        reason = f"{objective.advantage} needs more than {k} completions of a prompt"
        cure = f"Set {option} <= {size - 1}, or {name} > {k}."
        yield Problem(f"advantage_kwargs.{option}", k, reason, cure, {name: size})


LOSS_RULES: tuple[Rule, ...] = (
    *(partial(_of_another_loss, name) for name in _FIELDS),
    *(_surrogate, _ratio_level, _trl_defaults, _aggregation, _kl_names),
    *(_scale, _judged_by_advantages, _estimator_options),
    *(partial(_group_size, name) for name in ("num_generations", "num_generations_eval")),
    Conflict(
        "kl_estimator:objective.kl importance_sampling_level:objective.ratio",
        lambda c: (
            c.objective.kl_in_loss
            and c.objective.ratio not in kl_estimators.traits(c.objective.kl).levels
            and c.loss_defaults == "paper"
        ),
        "it is unbiased only with the token ratio",
        "Set kl_estimator: k3+.",
    ),
    Conflict(
        "kl_estimator:objective.kl kl_placement:objective.kl_placement",
        lambda c: c.objective.kl_in_reward and not kl_estimators.traits(c.objective.kl).in_reward,
        "only its value counts there",
        "Set k1.",
    ),
    Conflict(
        "kl_placement:objective.kl_placement multi_objective_aggregation:objective.combination",
        lambda c: c.objective.kl_in_reward and c.objective.combination != "sum_then_normalize",
        "this combination has no total reward to take the KL from",
        "Set kl_placement: loss.",
    ),
    Conflict(
        "kl_placement:objective.kl_placement advantage_estimator:objective.advantage",
        lambda c: c.objective.kl_in_reward and estimators.traits(c.objective.advantage).unit_rewards,
        "this estimator needs rewards in [0, 1]",
        "Set kl_placement: loss.",
    ),
    Conflict(
        "kl_estimator:objective.kl loss_aggregation:objective.aggregation",
        lambda c: (
            c.beta != 0.0
            and kl_estimators.traits(c.objective.kl).per_completion
            and not aggregations.traits(c.objective.aggregation).completion_mean
        ),
        "it would weigh a completion's KL by its length",
        "Set loss_aggregation: seq-mean-token-mean.",
    ),
    Conflict(
        "advantage_estimator:objective.advantage beta",
        lambda c: c.beta == 0.0 and "ref_per_token_logps" in c.objective.generation_inputs,
        "it asks for ref_per_token_logps, and without a KL term there is no reference",
        "Set beta > 0.",
    ),
    Conflict.of("kl_estimator !beta", "beta=0 means no KL term", "Set beta > 0 or remove it."),
    Conflict.of("kl_placement !beta", "beta=0 means no KL term", "Set beta > 0 or remove it."),
    Conflict(
        "top_entropy_quantile loss_type",
        lambda c: c.objective.one_term and c.top_entropy_quantile < 1,
        "this loss has one term for a whole completion, so single tokens cannot be left out",
        "Set top_entropy_quantile: 1.0.",
    ),
    Conflict(
        "top_entropy_quantile loss_type",
        lambda c: c.loss_defaults == "paper" and c.top_entropy_quantile < 1 and c.objective.shares_its_ratio,
        "the tokens of a completion share one ratio, so that those left out would train through the others",
        "Set top_entropy_quantile: 1.0.",
    ),
    Conflict(
        "multi_objective_aggregation",
        lambda c: c.objective.combination == "normalize_then_sum" and c.objective.advantage != "group",
        "it normalises by group and batch itself and would ignore scale_rewards / "
        "advantage_estimator={c.objective.advantage!r}",
        "Set 'group' or sum_then_normalize.",
    ),
    Conflict(
        "entropy_coef_min",
        lambda c: c.entropy_coef_min > c.entropy_coef_max,
        "above entropy_coef_max={c.entropy_coef_max}",
        "Swap them.",
    ),
    Conflict(
        "missing_rewards",
        lambda c: c.missing_rewards is not None and c.objective.combination != "sum_then_normalize",
        "multi_objective_aggregation={c.objective.combination!r} forms no weighted sum, which it is about",
        "Remove one of them.",
    ),
)
"""Settings of the loss that contradict each other or the row of the table."""
