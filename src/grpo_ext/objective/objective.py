"""An objective: a row of the table of losses with every axis set, and its computations on tensors."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from grpo_ext.objective.advantages import LogMetric, Rewards, estimators
from grpo_ext.objective.aggregation import StepTotals, aggregations
from grpo_ext.objective.combinations import combinations, weighted_total, weighted_turns
from grpo_ext.objective.estimate import estimate
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.losses import Loss, find
from grpo_ext.objective.options import asked_for, bind, option_defaults
from grpo_ext.objective.ratios import full_precision, masked, on_tokens, ratios

TENSORS = (
    *("log_ratio", "advantages", "per_token_logps", "old_per_token_logps"),
    *("mask", "importance_sampling_ratio", "marks"),
)
"""Tensors that a surrogate, its clip regions and its metrics may request."""
KL_INPUTS = ("log_ref_ratio", "log_ratio", "mask")
TURN_INPUTS = ("turn_rewards", "turns", "states")
FORWARD_INPUTS = ("per_token_logps", "old_per_token_logps", "ref_per_token_logps", "entropies")
"""Figures of a forward that an estimator may ask for."""
TOKEN_INPUTS = ("mask", "completion_mask", "completion_ids", "sampling_per_token_logps", *FORWARD_INPUTS)
MARK_INPUTS = ("advantages", *TOKEN_INPUTS)
ESTIMATOR_INPUTS = ("history", "log_metric", "kl_rewards", *TURN_INPUTS, *TOKEN_INPUTS, "columns")


@dataclass(frozen=True)
class Objective:
    """A loss with every axis set: the trainer's objective. Built by `GRPOExtConfig`, printed and saved."""

    loss_type: str
    row: Loss
    ratio: str
    options: Mapping[str, Any]
    beta: float
    kl: str
    kl_placement: str
    advantage: str
    advantage_kwargs: Mapping[str, Any]
    combination: str
    missing_rewards: str
    aggregation: str
    aggregation_kwargs: Mapping[str, Any]

    def describe(self) -> str:
        """Return all axes in one line."""
        surrogate = self.row.surrogate if isinstance(self.row.surrogate, str) else self.row.function.__name__
        penalty = f"beta={self.beta:g} {self.kl} in the {self.kl_placement}" if self.beta else "no KL"
        axes = (
            f"{surrogate}({_arguments(self.options)}) at {self.ratio} level",
            f"advantage {self.advantage}({_arguments(self.advantage_kwargs)})",
            penalty,
            f"{self.aggregation}({_arguments(self.aggregation_kwargs)})",
        )
        return f"{self.loss_type}: {', '.join(axes)}"

    @property
    def source(self) -> str:
        """The row's paper, and in what the loss departs from it."""
        departures, paper = self.departures(), self.row.paper
        return f"{paper}, but for {', '.join(departures)}" if departures and paper else paper

    def departures(self) -> list[str]:
        """Describe the axes and options that differ from the row's: its formula or numbers do not hold."""
        axes = {
            "ratio": "importance_sampling_level",
            "advantage": "advantage_estimator",
            "combination": "multi_objective_aggregation",
            "aggregation": "loss_aggregation",
        }
        if self.beta:
            axes |= {"kl": "kl_estimator", "kl_placement": "kl_placement"}
        departures = [
            f"{name} {getattr(self, axis)!r} in place of {getattr(self.row, axis)!r}"
            for axis, name in axes.items()
            if getattr(self, axis) != getattr(self.row, axis)
        ]
        published = option_defaults(self.row.function) | dict(self.row.options)
        departures += _changed(self.options, published, self.row.field_of)
        if self.advantage == self.row.advantage:
            published = option_defaults(estimators[self.advantage]) | dict(self.row.advantage_kwargs)
            departures += _changed(self.advantage_kwargs, published, "advantage_kwargs.{}".format)
        return departures

    def to_dict(self) -> dict[str, Any]:
        """Return all axes in JSON's types."""
        row = {"surrogate": self.row.function.__name__, "formula": self.row.formula, "paper": self.source}
        axes = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "row"}
        return {**axes, **row} | {name: dict(value) for name, value in axes.items() if isinstance(value, Mapping)}

    @property
    def kl_in_loss(self) -> bool:
        """True if the loss has a KL term."""
        return self.beta != 0.0 and self.kl_placement == "loss"

    @property
    def kl_in_reward(self) -> bool:
        """True if the KL is subtracted from the reward."""
        return self.beta != 0.0 and self.kl_placement == "reward"

    @property
    def stock_advantages(self) -> bool:
        """True if stock TRL computes the same advantages."""
        return (
            estimators.traits(self.advantage).trl
            and not self.advantage_kwargs
            and self.combination != "average_advantages"
            and self.missing_rewards == "zero"
            and not self.kl_in_reward
        )

    @property
    def corrects_sampler(self) -> bool:
        """True if the surrogate itself applies the sampler's importance ratio."""
        return "importance_sampling_ratio" in asked_for(self.row.function)

    @property
    def one_term(self) -> bool:
        """True if a completion is one term of the loss, so that no token can be left out."""
        return self.row.per_completion or self.ratio == "product"

    @property
    def shares_its_ratio(self) -> bool:
        """True if the tokens of a completion have one ratio, with the gradient of all of them."""
        return self.ratio == "sequence" and not self.sees_tokens

    @property
    def additive(self) -> bool:
        """True if the loss of an optimizer step does not depend on how its rows are split."""
        return aggregations.traits(self.aggregation).additive

    @property
    def remembered_batches(self) -> int:
        """Number of earlier generation batches whose group means the estimator uses."""
        function = estimators[self.advantage]
        if "history" not in self.estimator_inputs:
            return 0
        return ({"window": 1} | option_defaults(function) | dict(self.advantage_kwargs))["window"] - 1

    @property
    def estimator_inputs(self) -> frozenset[str]:
        """Names of what the estimator requests beside rewards."""
        return frozenset(asked_for(estimators[self.advantage])[1:])

    @property
    def generation_inputs(self) -> frozenset[str]:
        """Names of what the estimator, and the marks of the surrogate, request of a generation."""
        marks = frozenset() if self.row.marks is None else frozenset(asked_for(self.row.marks))
        return self.estimator_inputs | (marks - {"advantages"})

    @property
    def sees_tokens(self) -> bool:
        """True if advantages, or marks, depend on which tokens are active, or on what is known of them."""
        return self.kl_in_reward or self.sees_turns or not self.generation_inputs.isdisjoint(TOKEN_INPUTS)

    @property
    def sees_turns(self) -> bool:
        """True if advantages depend on the rewards of a trajectory's turns."""
        return not self.estimator_inputs.isdisjoint(TURN_INPUTS)

    def log_ratio(
        self, log_ratio: Float[Tensor, "batch time"], mask: Shaped[Tensor, "batch time"]
    ) -> Float[Tensor, " batch #time"]:
        """Log-ratio at this objective's level, bounded."""
        return ratios[self.ratio](log_ratio, mask)

    def tensors(
        self,
        per_token_logps: Float[Tensor, "batch time"],
        inputs: Mapping[str, Any],
        mask: Shaped[Tensor, "batch time"],
    ) -> dict[str, Any]:
        """Prepare the tensors that a surrogate, a KL estimator or a metric may request.

        They are zero under the mask, and only those made of l have a gradient. Without `old_per_token_logps` among the
        inputs the policy itself is the sampling policy.
        """
        fixed = {name: value.detach() for name, value in inputs.items() if isinstance(value, Tensor)}
        per_token_logps = full_precision(per_token_logps)
        old = full_precision(fixed.get("old_per_token_logps", per_token_logps.detach()))
        advantages, sampler = fixed["advantages"], fixed.get("importance_sampling_ratio")
        if sampler is not None:
            active = mask.bool() if sampler.shape == mask.shape else mask.bool().any(dim=-1, keepdim=True)
            sampler = torch.where(active, sampler, 1.0)
        tensors = {
            "per_token_logps": masked(per_token_logps, mask),
            "old_per_token_logps": masked(old, mask),
            "advantages": advantages.unsqueeze(1) if advantages.dim() == 1 else masked(advantages, mask),
            "mask": mask,
            "importance_sampling_ratio": sampler,
            "log_ratio": self.log_ratio(per_token_logps - old, mask),
        }
        if self.row.marks is not None:
            tensors["marks"] = masked(fixed.get("marks", torch.zeros_like(old)).to(old.dtype), mask)
        if self.kl_in_loss:
            tensors["log_ref_ratio"] = masked(full_precision(fixed["ref_per_token_logps"]) - per_token_logps, mask)
        return tensors

    def surrogate_loss(self, tensors: Mapping[str, Any]) -> Float[Tensor, " batch #time"]:
        """Compute the loss per token from a mapping of all `TENSORS`.

        Where advantages are given per token, the ratio of a completion is taken per token too (`on_tokens`), so that
        a token's gradient carries its own advantage and clipping is decided by its sign.
        """
        log_ratio, logps = tensors["log_ratio"], tensors["per_token_logps"]
        if tensors["advantages"].shape[1] != log_ratio.shape[1] == 1:
            tensors = {**tensors, "log_ratio": on_tokens(log_ratio, logps, tensors["mask"], level=self.ratio)}
        return bind(self.row.function, tensors)(**self.options)

    def kl_penalty(self, tensors: Mapping[str, Any]) -> Float[Tensor, " batch #time"]:
        """Estimate the KL per token (or per completion) from `log_ref_ratio`, `log_ratio` and `mask`."""
        return bind(kl_estimators[self.kl], tensors)()

    def clip_regions(self, tensors: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
        """Return the tokens cut from below and from above, or None for a loss without a clip."""
        regions = self.row.clip_regions
        return None if regions is None else bind(regions, tensors)(**self.options)

    def metrics(self, tensors: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Return further metrics of the loss by name, each [batch, time] or [batch, 1]."""
        return {} if self.row.metrics is None else bind(self.row.metrics, tensors)(**self.options)

    def aggregate(
        self, per_token_loss: Float[Tensor, " batch #time"], mask: Shaped[Tensor, "batch time"], totals: StepTotals
    ) -> Float[Tensor, ""]:
        """Return this micro-batch's share of the optimizer step's loss."""
        function = aggregations[self.aggregation]
        return function(per_token_loss, mask, totals, **self.aggregation_kwargs)

    def advantages(
        self,
        rewards: Float[Tensor, "groups completions functions"],
        weights: Float[Tensor, " functions"],
        history: Float[Tensor, "past_groups columns"] | None = None,
        log_metric: LogMetric | None = None,
        mask: Shaped[Tensor, "groups completions time"] | None = None,
        kl: Float[Tensor, "groups completions time"] | None = None,
        turn_rewards: Float[Tensor, "groups completions functions turns"] | None = None,
        turns: Int[Tensor, "groups completions time"] | None = None,
        states: Int[Tensor, "groups completions turns"] | None = None,
        **more: Any,
    ) -> Float[Tensor, "groups completions"] | Float[Tensor, "groups completions time"]:
        """Compute the advantages of a generation batch; column -1 of `history` belongs to the weighted total.

        `mask` are the active tokens of its completions, required if `sees_tokens`. `kl` is the KL estimate of each
        token if `kl_in_reward`; `rewards` are then those of `less_kl`. The tensors of turns, as in `turn_advantages`,
        are required if `sees_turns`. `more` are the other `estimator_inputs` by name.

        Raises:
            ValueError: the estimator is not defined for these rewards, or breaks a rule of all estimators.
        """
        offered = {"log_metric": log_metric, "mask": mask, "completion_mask": mask, "turns": turns, "states": states}
        offered |= {"kl_rewards": None if kl is None else -self.beta * kl}

        def estimated(values: Rewards, column: int) -> Tensor:
            of_turns = None if turn_rewards is None else turn_rewards[..., column, :]
            if turn_rewards is not None and column < 0:
                of_turns = weighted_turns(turn_rewards, rewards, weights, missing=self.missing_rewards)
            of_column = {"history": None if history is None else history[:, column], "turn_rewards": of_turns}
            return estimate(self.advantage, values, offered | of_column | more, **self.advantage_kwargs)

        combine = combinations[self.combination]
        kwargs = {"missing": self.missing_rewards} if "missing" in option_defaults(combine) else {}
        return combine(rewards, weights, estimated, **kwargs)

    def marks(self, advantages: Tensor, tokens: Mapping[str, Any]) -> Bool[Tensor, "groups completions time"] | None:
        """Return the tokens of a generation that the surrogate treats apart; None where it marks none."""
        if self.row.marks is None:
            return None
        marks: Tensor = bind(self.row.marks, {**tokens, "advantages": advantages})(**self.options)
        return marks & tokens["mask"].bool()

    def less_kl(
        self,
        rewards: Float[Tensor, "groups completions functions"],
        weights: Float[Tensor, " functions"],
        mask: Shaped[Tensor, "groups completions time"],
        kl: Float[Tensor, "groups completions time"],
    ) -> Float[Tensor, "groups completions 1"]:
        """Return the weighted total less beta times the KL of a completion, unless the estimator places the KL itself.

        The KL of a completion without an active token (a truncated one that is masked) is unknown, so its total is
        NaN: like a completion that was not scored it stays out of its group's statistics.
        """
        total = weighted_total(rewards, weights, missing=self.missing_rewards)
        if "kl_rewards" not in self.estimator_inputs:
            total = total - self.beta * kl.sum(dim=-1)
        return torch.where(mask.any(dim=-1), total, math.nan)[..., None]


def _changed(
    options: Mapping[str, Any], published: Mapping[str, Any], field_of: Callable[[str], str | None]
) -> list[str]:
    """Describe the options that differ from the published ones by more than the rounding of float32."""
    return [
        f"{field_of(name) or name} {value} in place of {published[name]}"
        for name, value in options.items()
        if name in published and published[name] is not inspect.Parameter.empty and not _same(value, published[name])
    ]


def _same(value: object, other: object) -> bool:
    numbers = isinstance(value, int | float) and isinstance(other, int | float)
    return math.isclose(value, other, rel_tol=1e-6) if numbers else value == other  # type: ignore[arg-type]


def _arguments(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)


def surrogate_options(config: Any, row: Loss) -> dict[str, Any]:
    """Return the surrogate's options: the recipe's, else the row's (or TRL's), else the surrogate's own defaults."""
    paper = config.loss_defaults == "paper"
    options = option_defaults(row.function) | dict(row.options if paper else row.trl_options)
    for option in option_defaults(row.function):
        name = row.field_of(option)
        if name is not None and getattr(config, name, None) is not None:
            options[option] = getattr(config, name)
        if not paper and row.trl_float32:
            options[option] = torch.tensor(options[option]).item()
    both = {"epsilon_low", "epsilon_high"} <= options.keys()
    if config.epsilon is not None and config.epsilon_high is None and both:
        options["epsilon_high"] = config.epsilon
    options |= _as_mapping(config.loss_kwargs)
    return _without_missing(options)


def aggregation_options(config: Any, aggregation: str) -> dict[str, Any]:
    """Return the aggregation's options: the recipe's, and the generation limit if it takes one."""
    options = option_defaults(aggregations[aggregation]) | dict(_as_mapping(config.loss_aggregation_kwargs))
    return _without_missing(options | {name: getattr(config, name) for name in AGGREGATION_FIELDS if name in options})


AGGREGATION_FIELDS = ("max_completion_length",)
"""Options of any aggregation that the config field of the same name sets."""


def _without_missing(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not inspect.Parameter.empty}


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def resolve(config: Any) -> Objective:
    """Set every axis: the recipe's own setting, else TRL's name for it, else the row (or TRL's default).

    Raises:
        UnknownNameError: `loss_type` or `loss_aggregation` is an unknown name.
    """
    row = find(config.loss_type)
    paper = config.loss_defaults == "paper"
    scale = {True: "group", False: "none"}.get(config.scale_rewards, config.scale_rewards)
    advantage = config.advantage_estimator or scale or (row.advantage if paper else "group")
    row_kwargs = row.advantage_kwargs if paper and advantage == row.advantage else {}
    bias_corrected = {True: "r_k3", False: "k3", None: row.kl if paper else "r_k3"}[config.use_bias_correction_kl]
    aggregation = config.loss_aggregation or row.aggregation
    return Objective(
        loss_type=config.loss_type,
        row=row,
        ratio=config.importance_sampling_level or (row.ratio if paper else "token"),
        options=surrogate_options(config, row),
        beta=float(config.beta),
        kl=config.kl_estimator or bias_corrected,
        kl_placement=config.kl_placement or (row.kl_placement if paper else "loss"),
        advantage=advantage,
        advantage_kwargs={**row_kwargs, **_as_mapping(config.advantage_kwargs)},
        combination=config.multi_objective_aggregation or (row.combination if paper else "sum_then_normalize"),
        missing_rewards=config.missing_rewards or ("renormalize" if paper else "zero"),
        aggregation=aggregation,
        aggregation_kwargs=aggregation_options(config, aggregation),
    )
