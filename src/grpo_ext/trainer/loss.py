"""The loss of a micro-batch: its scores and columns become the objective's terms, their sum, and figures."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from grpo_ext.objective.aggregation import StepTotals
from grpo_ext.packing.micro_batches import MicroBatch, live_mask
from grpo_ext.packing.pieces import Part
from grpo_ext.trainer.diagnosis.recording import add_ess, log_weights
from grpo_ext.trainer.evaluating import batch_weight
from grpo_ext.trainer.loss_terms import entropy_bonus, high_entropy_mask, loss_figures
from grpo_ext.trainer.piecewise import Terms, more_to_come, together


def micro_batch_loss(trainer: Any, model: nn.Module, inputs: MicroBatch) -> Tensor:
    """Return a micro-batch's share of the loss of its step, in as many forwards as it is cut into; log figures."""
    mode = "train" if trainer.model.training else "eval"
    live, mask = trainer._live_rows(inputs, mode), live_mask(inputs)
    totals = trainer._totals(inputs, mask, mode)
    parts, made = trainer._scorer.parts(model, inputs, live), list[Terms]()
    count = sum(not part.is_spare for part in parts)
    for part in parts[:-1]:
        with more_to_come(trainer.accelerator, model):
            terms = _terms(trainer, model, part, totals, mode, count)
            _backward(trainer, terms.loss)
        made.append(terms.detached())
    made.append(_terms(trainer, model, parts[-1], totals, mode, count))
    loss, logps, per_token_loss, entropies = together(made, parts)
    if inputs in trainer._generation:
        inputs.setdefault("old_per_token_logps", logps.detach())
    if mode == "train" and trainer._drift is not None and trainer._drift.due:
        trainer._check_drift(logps.detach(), inputs)
    trainer._guard.note(per_token_logps=logps, per_token_loss=per_token_loss, entropies=entropies)
    stock = trainer.args.loss_defaults == "trl"
    if trainer._evaluated is None and (mode == "eval" or stock or trainer.accelerator.sync_gradients):
        trainer._figures.log(trainer._metrics[mode], trainer.accelerator)
        add_ess(trainer._metrics[mode])
    return loss


def _backward(trainer: Any, loss: Tensor) -> None:
    """Add the gradient of a part of a micro-batch, as transformers' `training_step` does of the last one."""
    own = {"scale_wrt_gas": False} if trainer.is_deepspeed_enabled else {}
    trainer.accelerator.backward(loss, **own)


def _terms(trainer: Any, model: nn.Module, part: Part, totals: StepTotals, mode: str, parts: int) -> Terms:
    """Compute one of so many `parts` of a micro-batch: its share of the loss of the step."""
    objective, inputs, live = trainer.objective, part.inputs, part.live
    logps, entropies, aux_loss = trainer._scores(model, inputs, live)
    assert entropies is not None
    if part.is_spare:
        none = logps[:0]
        return Terms(logps.sum() * 0.0, none, none, none)
    mask = live_mask(inputs)
    if mode == "train":  # at the first step of a generation the policy is the old one
        inputs = {"old_per_token_logps": logps.detach(), **inputs}
    tensors = objective.tensors(logps, with_samplers_old(trainer, logps, inputs, live), mask)
    entropy_mask = None
    if trainer.top_entropy_quantile < 1.0:
        entropy_mask = high_entropy_mask(trainer.accelerator, entropies, mask, 1 - trainer.top_entropy_quantile)

    per_token_loss = objective.surrogate_loss(tensors)
    for factor in _factors(trainer, tensors, inputs, entropy_mask):
        per_token_loss = per_token_loss * factor
    if objective.kl_in_loss:
        tensors["kl"] = objective.kl_penalty(tensors)
        per_token_loss = per_token_loss + objective.beta * tensors["kl"]

    world = trainer.accelerator.num_processes  # processes average their gradients, but shares must be added
    loss = policy_loss = objective.aggregate(per_token_loss, mask, totals) * world
    accumulation = trainer.current_gradient_accumulation_steps if mode == "train" else 1.0
    stock = trainer.args.loss_defaults == "trl"
    figures, regions = loss_figures(objective, tensors, entropies, inputs, live, as_stock=stock)
    weight = loss.new_ones(()) if mode == "train" else batch_weight(objective, totals)
    if trainer._entropy_bonus_enabled:
        as_trl = stock and objective.aggregation == "token-mean"  # TRL logs its shares unscaled
        policy_figure = policy_loss.detach() * (1.0 if as_trl else accumulation)
        figures["policy_loss"] = policy_figure * parts, weight / parts
        loss = loss - entropy_bonus(trainer, trainer.args, entropies, mask, entropy_mask, totals, mode)
    if trainer.aux_loss_enabled:
        loss = loss + trainer.router_aux_loss_coef * aux_loss / accumulation
        trainer._metrics[mode]["aux_loss"].append(trainer.accelerator.gather_for_metrics(aux_loss).mean().item())
    if trainer._evaluated is not None:
        figures["loss"] = loss.detach(), weight
    trainer._figures.add(figures, regions, mask, log_weights(inputs, tensors, live))
    seen = entropies if live is None else entropies.detach().masked_fill(~live[:, None], torch.nan)
    return Terms(loss, logps, per_token_loss, seen)


def with_samplers_old(trainer: Any, logps: Tensor, inputs: MicroBatch, live: Tensor | None) -> MicroBatch:
    """Return a micro-batch whose old log-probabilities are the sampler's, where it has them, if so configured."""
    otherwise = trainer.use_vllm or trainer._samples_ahead
    if trainer.args.old_logps == "recomputed" or not otherwise or "sampling_per_token_logps" not in inputs:
        return inputs
    sampler = inputs["sampling_per_token_logps"].to(logps.dtype)
    known = ~sampler.isnan() if live is None else ~sampler.isnan() & live[:, None]
    old = torch.where(known, sampler, inputs.get("old_per_token_logps", logps.detach()))
    return {**inputs, "old_per_token_logps": old}


def _factors(
    trainer: Any, tensors: dict[str, Any], inputs: MicroBatch, entropy_mask: Tensor | None
) -> Iterator[Tensor]:
    """Yield the factors that TRL has too: off-policy mask, high-entropy mask, correction of the sampler."""
    if trainer.off_policy_mask_threshold is not None:
        yield trainer.get_off_policy_mask(
            advantages=tensors["advantages"],
            per_token_logps=tensors["per_token_logps"],
            sampling_per_token_logps=inputs.get("sampling_per_token_logps", tensors["old_per_token_logps"]),
            mask=tensors["mask"],
            off_policy_threshold=trainer.off_policy_mask_threshold,
        )
    if entropy_mask is not None:
        yield entropy_mask
    if trainer._sampler_corrected and not trainer.objective.corrects_sampler:
        yield tensors["importance_sampling_ratio"]
