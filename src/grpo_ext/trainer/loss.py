"""The loss of a micro-batch: scores, columns and denominators in; its share of the step's loss, and figures, out.

`Loss` is a function: it reads no trainer and has no state. What a step does with a `LossOutput` is the trainer's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.objective.aggregation import StepTotals
from grpo_ext.objective.objective import Objective
from grpo_ext.objective.ratios import masked
from grpo_ext.objective.sampler_correction import DEFAULT, corrected, interpolated
from grpo_ext.packing.micro_batches import MicroBatch, active_mask
from grpo_ext.packing.policy import Scores
from grpo_ext.packing.token_budget import Part
from grpo_ext.rollout.vllm.lazy_import import GRPOTrainer
from grpo_ext.trainer.diagnosis.recording import log_weights
from grpo_ext.trainer.evaluating import batch_weight
from grpo_ext.trainer.loss_terms import LossFigures, high_entropy_mask, loss_figures


class Moment(NamedTuple):
    """Facts of a run on which the loss of some rows depends, beside their columns."""

    training: bool
    accumulation: float
    """Micro-batches of the step; 1 in an evaluation."""
    corrects_sampler: bool
    """Whether weights for what sampled the tokens multiply the loss."""
    entropy_coef: float | None
    """Weight of the entropy bonus; None without one."""
    parts: int
    """Parts of the micro-batch."""
    proximal: float = 0.0
    """Place of the policy before training between sampler, 0, and policy, 1: for `old_logps: interpolated`."""


class LossOutput(NamedTuple):
    """The loss of some rows, and what it was made of."""

    loss: Float[Tensor, ""]
    per_token_logps: Float[Tensor, "rows time"]
    per_token_loss: Float[Tensor, " rows #time"]
    entropies: Float[Tensor, "rows time"]
    """NaN for rows that were not computed."""
    figures: LossFigures | None = None
    """For the log; None of rows that only make up the number of forwards."""

    def detached(self) -> "LossOutput":
        """Return the same without a graph."""
        loss, logps, losses, entropies = (values.detach() for values in self[:4])
        return LossOutput(loss, logps, losses, entropies, self.figures)


@dataclass(frozen=True)
class Loss:
    """The loss that the settings of a run describe."""

    objective: Objective
    args: GRPOExtConfig
    accelerator: Accelerator
    """Knows how many processes average their gradients; gathers entropies for `top_entropy_quantile`."""
    aux_loss_coef: float = 0.0
    """Weight of the router's auxiliary loss."""

    def __call__(self, scores: Scores, part: Part, totals: StepTotals, at: Moment) -> LossOutput:
        """Return the share of the step's loss of a part of a micro-batch."""
        objective, inputs, active = self.objective, part.inputs, part.active
        logps, entropies, aux_loss = scores
        assert entropies is not None
        if part.is_spare:
            none = logps[:0]
            return LossOutput(logps.sum() * 0.0, none, none, none)
        mask = active_mask(inputs)
        if at.training:  # at the first step of a generation the policy is the old one
            inputs = {"old_per_token_logps": logps.detach(), **inputs}
        tensors = objective.tensors(logps, self._with_samplers_old(logps, inputs, active, at.proximal), mask)
        entropy_mask = None
        if self.args.top_entropy_quantile < 1.0:
            entropy_mask = high_entropy_mask(self.accelerator, entropies, mask, 1 - self.args.top_entropy_quantile)

        per_token_loss = objective.surrogate_loss(tensors)
        for factor in self._factors(tensors, inputs, entropy_mask, at):
            per_token_loss = per_token_loss * factor
        if objective.kl_in_loss:
            tensors["kl"] = objective.kl_penalty(tensors)
            per_token_loss = per_token_loss + objective.beta * tensors["kl"]

        world = self.accelerator.num_processes  # processes average their gradients, but shares must be added
        loss = policy_loss = objective.aggregate(per_token_loss, mask, totals) * world
        stock = self.args.loss_defaults == "trl"
        means, regions = loss_figures(objective, tensors, entropies, inputs, active, as_stock=stock)
        weight, entropy = loss.new_ones(()) if at.training else batch_weight(objective, totals), None
        if at.entropy_coef is not None:
            as_trl = stock and objective.aggregation == "token-mean"  # TRL logs its shares unscaled
            policy_figure = policy_loss.detach() * (1.0 if as_trl else at.accumulation)
            means["policy_loss"] = policy_figure * at.parts, weight / at.parts
            mean, entropy = self._entropy(entropies, mask, entropy_mask, totals, at)
            loss = loss - at.entropy_coef * mean
        if aux_loss is not None:
            loss = loss + self.aux_loss_coef * aux_loss / at.accumulation
        if not (at.training or stock):
            means["loss"] = loss.detach(), weight
        figures = LossFigures(means, regions, mask, log_weights(inputs, tensors, active), entropy, aux_loss)
        seen = entropies if active is None else entropies.detach().masked_fill(~active[:, None], torch.nan)
        return LossOutput(loss, logps, per_token_loss, seen, figures)

    def _with_samplers_old(
        self, logps: Tensor, inputs: MicroBatch, active: Tensor | None, proximal: float
    ) -> MicroBatch:
        """Return rows whose old log-probabilities are the sampler's, where it has them, if so configured.

        Between sampler and policy, the rows also have the weights of the old policy's ratio to the sampler.
        """
        old = inputs.get("old_per_token_logps", logps.detach())
        sampler = self.denominators(old, inputs, proximal, logps.detach())
        if sampler is old:
            return inputs
        if self.args.old_logps == "interpolated":
            sampler_logps = inputs["sampling_per_token_logps"].to(sampler.dtype)
            weights = corrected(DEFAULT, sampler, sampler_logps, active_mask(inputs)).weights
            inputs = {**inputs, "importance_sampling_ratio": weights}
        old = sampler if active is None else torch.where(active[:, None], sampler, old)
        return {**inputs, "old_per_token_logps": old}

    def denominators(
        self, old: Tensor, batch: Mapping[str, Any], proximal: float, policy: Tensor | None = None
    ) -> Tensor:
        """Return the log-probabilities in the ratio's denominator: `old`, or the sampler's where it has them.

        With `old_logps: interpolated` they lie between the sampler's and those of `policy`, by default `old`.
        """
        args = self.args
        if args.old_logps == "recomputed" or not args.samples_otherwise or "sampling_per_token_logps" not in batch:
            return old
        sampler = batch["sampling_per_token_logps"].to(old.dtype)
        if args.old_logps == "interpolated":
            sampler = interpolated(old if policy is None else policy, sampler, proximal)
        return torch.where(sampler.isnan(), old, sampler)

    def _factors(
        self, tensors: Mapping[str, Any], inputs: MicroBatch, entropy_mask: Tensor | None, at: Moment
    ) -> Iterator[Tensor]:
        """Yield the factors that TRL has too: off-policy mask, high-entropy mask, correction of the sampler."""
        if self.args.off_policy_mask_threshold is not None:
            yield GRPOTrainer.get_off_policy_mask(
                advantages=tensors["advantages"],
                per_token_logps=tensors["per_token_logps"],
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", tensors["old_per_token_logps"]),
                mask=tensors["mask"],
                off_policy_threshold=self.args.off_policy_mask_threshold,
            )
        if entropy_mask is not None:
            yield entropy_mask
        weights = tensors["importance_sampling_ratio"]
        weighed = at.corrects_sampler or (self.args.old_logps == "interpolated" and weights is not None)
        if weighed and not self.objective.corrects_sampler:
            yield weights

    def _entropy(
        self, entropies: Tensor, mask: Tensor, entropy_mask: Tensor | None, totals: StepTotals, at: Moment
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "2"]]:
        """Return the mean entropy of the tokens in the policy term, and its sum and count."""
        active = mask if entropy_mask is None else mask * entropy_mask
        total, count = masked(entropies, active).sum(), active.sum()
        if self.args.exact_denominators and entropy_mask is None:
            mean = total / totals.tokens.clamp(min=1) * self.accelerator.num_processes
        else:
            mean = total / count.clamp(min=1.0) / at.accumulation
        return mean, torch.stack([total.detach(), count.to(total.dtype)])


def joined(outputs: Sequence[LossOutput], parts: Sequence[Part]) -> LossOutput:
    """Return the loss of all rows of a micro-batch, without figures; the gradient is the last part's."""
    if len(parts) == 1:
        return outputs[0]
    rows = [part.rows for part in parts if part.rows is not None]
    outputs = [output for output, part in zip(outputs, parts, strict=True) if not part.is_spare]
    order = torch.cat(rows).argsort()
    loss = torch.stack([output.loss for output in outputs]).sum()
    columns = [output[1:4] for output in outputs]
    logps, losses, entropies = (torch.cat(column)[order] for column in zip(*columns, strict=True))
    return LossOutput(loss, logps, losses, entropies)
