"""An objective: a row of the table with every axis settled by the recipe, put to work on tensors."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from grpo_ext.objective.advantages import LogMetric, Rewards, estimators
from grpo_ext.objective.aggregation import StepTotals, aggregations
from grpo_ext.objective.combinations import combinations
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.losses import Loss, find
from grpo_ext.objective.ratios import full_precision, masked, ratios
from grpo_ext.objective.surrogates import clip_regions


def bind(function: Callable[..., Any], tensors: Mapping[str, Any]) -> Callable[..., Any]:
    """`function` with those of `tensors` that it names as positional parameters filled in."""
    wanted = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    return partial(function, **{name: tensors[name] for name in wanted if name in tensors})


def option_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The options a recipe may set: the keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


TENSORS = (
    "log_ratio",
    "advantages",
    "per_token_logps",
    "old_per_token_logps",
    "mask",
    "importance_sampling_ratio",
)
"""What a surrogate may ask for."""


@dataclass(frozen=True)
class Objective:
    """A loss with every axis settled: what the trainer computes. Built by `GRPOExtConfig`, printed and saved."""

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
        """One line that says all of it."""
        surrogate = self.row.surrogate if isinstance(self.row.surrogate, str) else self.row.function.__name__
        penalty = f"beta={self.beta:g} {self.kl} in the {self.kl_placement}" if self.beta else "no KL"
        axes = (
            f"{surrogate}({_arguments(self.options)}) at {self.ratio} level",
            f"advantage {self.advantage}({_arguments(self.advantage_kwargs)})",
            penalty,
            f"{self.aggregation}({_arguments(self.aggregation_kwargs)})",
        )
        return f"{self.loss_type}: {', '.join(axes)}"

    def to_dict(self) -> dict[str, Any]:
        """All of it in JSON's types."""
        row = {"surrogate": self.row.function.__name__, "formula": self.row.formula, "paper": self.row.paper}
        axes = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "row"}
        return {**axes, **row} | {name: dict(value) for name, value in axes.items() if isinstance(value, Mapping)}

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.beta != 0.0 and self.kl_placement == "loss"

    @property
    def kl_in_reward(self) -> bool:
        """Whether the reward is lowered by the KL."""
        return self.beta != 0.0 and self.kl_placement == "reward"

    @property
    def stock_advantages(self) -> bool:
        """Whether stock TRL computes these very advantages."""
        return (
            self.advantage in ("group", "batch", "none")
            and not self.advantage_kwargs
            and self.combination != "average_advantages"
            and self.missing_rewards == "zero"
            and not self.kl_in_reward
        )

    @property
    def corrects_sampler(self) -> bool:
        """Whether the surrogate itself applies the sampler's importance ratio."""
        return "importance_sampling_ratio" in inspect.signature(self.row.function).parameters

    def log_ratio(
        self, log_ratio: Float[Tensor, "batch time"], mask: Shaped[Tensor, "batch time"]
    ) -> Float[Tensor, "batch #time"]:
        """Log-ratio at this objective's level, bounded."""
        return ratios[self.ratio](log_ratio, mask)

    def tensors(
        self,
        per_token_logps: Float[Tensor, "batch time"],
        inputs: Mapping[str, Any],
        mask: Shaped[Tensor, "batch time"],
    ) -> dict[str, Any]:
        """All that a surrogate, a KL estimator or a metric may ask for: zeros under the mask, a gradient only in l.

        Without `old_per_token_logps` among the inputs the policy itself has sampled.
        """
        fixed = {name: value.detach() for name, value in inputs.items() if isinstance(value, Tensor)}
        per_token_logps = full_precision(per_token_logps)
        old = full_precision(fixed.get("old_per_token_logps", per_token_logps.detach()))
        advantages, sampler = fixed["advantages"], fixed.get("importance_sampling_ratio")
        if sampler is not None:
            live = mask.bool() if sampler.shape == mask.shape else mask.bool().any(dim=-1, keepdim=True)
            sampler = torch.where(live, sampler, 1.0)
        tensors = {
            "per_token_logps": masked(per_token_logps, mask),
            "old_per_token_logps": masked(old, mask),
            "advantages": advantages.unsqueeze(1) if advantages.dim() == 1 else masked(advantages, mask),
            "mask": mask,
            "importance_sampling_ratio": sampler,
            "log_ratio": self.log_ratio(per_token_logps - old, mask),
        }
        if self.kl_in_loss:
            tensors["log_ref_ratio"] = masked(full_precision(fixed["ref_per_token_logps"]) - per_token_logps, mask)
        return tensors

    def surrogate_loss(self, tensors: Mapping[str, Any]) -> Float[Tensor, "batch #time"]:
        """Loss per token, from a mapping that holds all of `TENSORS`."""
        return bind(self.row.function, tensors)(**self.options)

    def kl_penalty(self, tensors: Mapping[str, Any]) -> Float[Tensor, "batch #time"]:
        """KL estimate per token (or per completion), from `log_ref_ratio`, `log_ratio` and `mask`."""
        return bind(kl_estimators[self.kl], tensors)()

    def clip_regions(self, tensors: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
        """Tokens cut from below and from above, or None for a surrogate without a clip."""
        if not isinstance(self.row.surrogate, str) or self.row.surrogate not in clip_regions:
            return None
        return bind(clip_regions[self.row.surrogate], tensors)(**self.options)

    def aggregate(
        self,
        per_token_loss: Float[Tensor, "batch #time"],
        mask: Shaped[Tensor, "batch time"],
        totals: StepTotals,
    ) -> Float[Tensor, ""]:
        """This micro-batch's share of the optimizer step's loss."""
        function = aggregations[self.aggregation]
        return function(per_token_loss, mask, totals, **self.aggregation_kwargs)

    def advantages(
        self,
        rewards: Float[Tensor, "groups completions functions"],
        weights: Float[Tensor, " functions"],
        history: Float[Tensor, "past_groups columns"] | None = None,
        log_metric: LogMetric | None = None,
    ) -> Float[Tensor, "groups completions"]:
        """Advantages of a generation batch; column -1 of `history` belongs to the weighted total."""
        function = estimators[self.advantage]

        def estimate(values: Rewards, column: int) -> Rewards:
            past = None if history is None else history[:, column]
            return bind(function, {"history": past, "log_metric": log_metric})(values, **self.advantage_kwargs)

        combine = combinations[self.combination]
        kwargs = {"missing": self.missing_rewards} if "missing" in option_names(combine) else {}
        return combine(rewards, weights, estimate, **kwargs)


def _arguments(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)


_FIELD_OF_OPTION = {"epsilon_low": "epsilon", "epsilon_high": "epsilon_high", "delta": "delta"}
_MAX_COMPLETION_LENGTH = "max_completion_length"


def field_of_option(row: Loss, option: str) -> str | None:
    """The config field that sets a surrogate's option, if it has one: `epsilon`, `delta`, `sapo_temperature_pos`."""
    if row.surrogate in ("sapo", "vespo"):
        return f"{row.surrogate}_{option}"
    return _FIELD_OF_OPTION.get(option)


def surrogate_options(config: Any, row: Loss) -> dict[str, Any]:
    """The surrogate's options: the recipe's, else the row's, else (by absence) the surrogate's own defaults."""
    parameters = inspect.signature(row.function).parameters
    options = {name: parameters[name].default for name in option_names(row.function)}
    if config.loss_defaults == "paper":
        options |= row.options
    elif row.surrogate == "cispo":
        del options["epsilon_high"]  # stock TRL's default is a cap of 0.2 on the ratio itself: nothing to fall back on
    for option in option_names(row.function):
        name = field_of_option(row, option)
        if name is not None and getattr(config, name, None) is not None:
            options[option] = getattr(config, name)
        if config.loss_defaults == "trl" and row.surrogate in ("sapo", "vespo"):
            options[option] = torch.tensor(options[option]).item()  # stock TRL holds these in float32
    if config.epsilon is not None and config.epsilon_high is None and "epsilon_low" in options:
        options["epsilon_high"] = config.epsilon
    options |= _as_mapping(config.loss_kwargs)
    return {name: value for name, value in options.items() if value is not inspect.Parameter.empty}


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def resolve(config: Any) -> Objective:
    """Settle every axis: the recipe's own setting, else TRL's name for it, else the row (or TRL's default).

    Raises:
        UnknownNameError: `loss_type` names no loss.
    """
    row = find(config.loss_type)
    paper = config.loss_defaults == "paper"
    scale = {True: "group", False: "none"}.get(config.scale_rewards, config.scale_rewards)
    advantage = config.advantage_estimator or scale or (row.advantage if paper else "group")
    row_kwargs = row.advantage_kwargs if paper and advantage == row.advantage else {}
    bias_corrected = {True: "r_k3", False: "k3", None: row.kl if paper else "r_k3"}[config.use_bias_correction_kl]
    aggregate = config.loss_aggregation or row.aggregation
    needs_length = aggregate in aggregations and _MAX_COMPLETION_LENGTH in option_names(aggregations[aggregate])
    return Objective(
        loss_type=config.loss_type,
        row=row,
        ratio=config.importance_sampling_level or (row.ratio if paper else "token"),
        options=surrogate_options(config, row),
        beta=config.beta,
        kl=config.kl_estimator or bias_corrected,
        kl_placement=config.kl_placement or (row.kl_placement if paper else "loss"),
        advantage=advantage,
        advantage_kwargs={**row_kwargs, **_as_mapping(config.advantage_kwargs)},
        combination=config.multi_objective_aggregation or (row.combination if paper else "sum_then_normalize"),
        missing_rewards=config.missing_rewards or ("renormalize" if paper else "zero"),
        aggregation=aggregate,
        aggregation_kwargs={_MAX_COMPLETION_LENGTH: config.max_completion_length} if needs_length else {},
    )
