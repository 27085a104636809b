"""`LossHooks`: the loss of a micro-batch, by TRL's hooks, which a subclass may override; and the micro-batches."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

from peft import PeftModel
from torch import Tensor, nn

from grpo_ext.config.added_losses import INITIAL, Distillation, ReverseKL, added_losses
from grpo_ext.config.mappings import as_mapping
from grpo_ext.errors import ConfigError, Problem
from grpo_ext.objective.aggregation import StepTotals
from grpo_ext.packing.micro_batches import MicroBatch, active_mask, regroup, zero_advantages
from grpo_ext.packing.obstacles import causal_lm
from grpo_ext.packing.policy import Scores
from grpo_ext.trainer.added_losses import AddedLosses
from grpo_ext.trainer.advantages import Advantages
from grpo_ext.trainer.batches import Generation, arranged, counted_once, forward_only, stock_totals, without_known_old
from grpo_ext.trainer.diagnosis.recording import add_ess, log_rows
from grpo_ext.trainer.log import Log
from grpo_ext.trainer.loss import Loss, LossOutput, Moment, joined
from grpo_ext.trainer.loss_terms import Figures, moved_coefficient
from grpo_ext.trainer.reference import InitialWeights, ReferenceCheck, made_up_logps
from grpo_ext.trainer.rollout_hooks import RolloutHooks
from grpo_ext.trainer.scoring import more_to_come, scorer_of
from grpo_ext.trainer.teacher import teacher_of

READ_ONCE = (
    *("beta", "epsilon_high", "epsilon_low", "importance_sampling_level", "loss_type", "max_completion_length"),
    *("off_policy_mask_threshold", "reward_funcs", "scale_rewards", "temperature", "top_entropy_quantile"),
)
"""Attributes that TRL reads at every step, and this trainer when it is made."""


class LossHooks(RolloutHooks):
    """A trainer whose `Loss` is the objective's, with exact denominators of each optimizer step."""

    entropy_coef: float
    router_aux_loss_coef: Any
    _entropy_window_stats: Any
    _made_with: dict[str, Any]

    def _set_up_loss(self) -> None:
        """Make the loss, the advantages, and what logs both."""
        args, training = self.args, lambda: self.model.training
        self._log = Log(self._metrics, self._logs, self._pending_metrics, training, self.accelerator)
        as_stock, losses = args.loss_defaults == "trl", added_losses(args)
        shared = self.objective, self.accelerator, self._log, self.reward_func_names
        warns = self.accelerator.is_main_process and not losses
        self._advantages = Advantages(*shared, as_stock=as_stock, warns=warns)
        aux_loss_coef = self.router_aux_loss_coef if self.aux_loss_enabled else 0.0
        self._loss = Loss(self.objective, args, self.accelerator, aux_loss_coef)
        self._figures, self._generation = Figures(), Generation()
        coupled = self.top_entropy_quantile < 1.0 or self.off_policy_mask_threshold is not None
        steers = self.objective.kl_in_loss or self._entropy_bonus_enabled or self.aux_loss_enabled or coupled
        steers = steers or any(isinstance(loss, ReverseKL) for loss in losses)  # of the policy's own forward
        # a micro-batch's part of the loss does not depend on its other rows
        additive = self.objective.additive and self.top_entropy_quantile == 1.0 and not self.aux_loss_enabled
        self._regroups = args.exact_denominators and additive
        # completions without an advantage then have no part in the loss, nor in what steers the run
        self._skips = args.zero_advantages_skipped and self.objective.row.zero_without_advantage and not steers

    def _set_up_forward(self) -> None:
        """Choose the forward that scores tokens."""
        uneven = self.rollout_func is not None or self.episode_runner is not None
        models, stock = (self.model, self.ref_model), super()._get_per_token_logps_and_entropies
        aux = self.aux_loss_enabled
        self._scorer = scorer_of(*models, self.args, self.accelerator, stock, aux_loss=aux, uneven=uneven)
        self.sharing = self._scorer.sharing

    def _set_up_reference(self) -> None:
        """Keep the weights that an adapter begins with, which are its reference, and what checks any reference."""
        args = self.args
        if args.beta:
            self.beta = args.beta
        initial = any(isinstance(loss, Distillation) and loss.teacher == INITIAL for loss in added_losses(args))
        if (args.beta or initial) and isinstance(self.model, PeftModel):
            self._initial = InitialWeights(self.model)
        half = bool(args.bf16 or args.fp16 or self.model.dtype.itemsize < 4)
        made = self._tokenizer, causal_lm(self._unwrapped).config, self.accelerator.device
        score = partial(made_up_logps, self._scorer, made)
        self._reference_check = ReferenceCheck(score, self._initial, half=half, follows=bool(args.sync_ref_model))

    def _set_up_added_losses(self) -> None:
        """Make the losses beside the policy's, with their teachers."""
        losses, args = added_losses(self.args), self.args
        reference = None if args.sync_ref_model else self.ref_model
        of_run = self.model, reference, self._initial, self._tokenizer, args, self.accelerator
        names = {loss.teacher for loss in losses if isinstance(loss, Distillation)}
        teachers = {name: teacher_of(name, *of_run) for name in sorted(names)}
        scores, template = self._get_per_token_logps_and_entropies, as_mapping(self.chat_template_kwargs)
        self._added = AddedLosses(losses, teachers, self._scorer, scores, self._tokenizer, template, self.accelerator)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Scores:
        return self._scorer.tokens(*args, **kwargs)

    def _scores(self, model: nn.Module, inputs: MicroBatch, active: Tensor | None) -> Scores:
        """Score a micro-batch: one forward for the loss and for old log-probabilities."""
        score = self._get_per_token_logps_and_entropies
        return self._scorer.micro_batch(score, model, inputs, active, aux_loss=self.aux_loss_enabled)

    def _logps(self, model: nn.Module, batch: Mapping[str, Any], *, entropy: bool = False) -> tuple[Tensor, Any]:
        """Return log-probabilities of a generation's tokens, and their entropies where asked for."""
        score, training = self._get_per_token_logps_and_entropies, self.model.training
        rows = self.args.per_device_train_batch_size if training else self.args.per_device_eval_batch_size
        with forward_only(self.model, self.args):
            scores = self._scorer.micro_batch(score, model, cast(MicroBatch, batch), entropy=entropy, batch_size=rows)
        return scores[0], scores[1]

    def _active_rows(self, inputs: MicroBatch, mode: str) -> Tensor | None:
        """Rows that have a gradient, or None where all are computed."""
        if mode != "train" or not self._skips:
            return None
        drift = self._drift is not None and "sampling_per_token_logps" in inputs and not self._sampler_corrected
        if drift and inputs is self._buffered_inputs[0]:  # its check reads all rows: no pass came before it
            return None
        active = ~zero_advantages(inputs["advantages"])
        return None if active.all() else active

    def _read_once(self) -> dict[str, Any]:
        """Return the values of `READ_ONCE`."""
        values = {name: getattr(self, name) for name in READ_ONCE}
        return {name: [*value] if isinstance(value, list) else value for name, value in values.items()}

    def _refuse_changes(self) -> None:
        """Refuse an attribute that a subclass or a callback has set since: it would change nothing.

        Raises:
            ConfigError: one has another value.
        """
        problems, cure = [], "Give it to the trainer when you make it."
        for name, value in self._read_once().items():
            if value != (before := self._made_with[name]):
                reason = f"changed from {before!r} after the trainer was made, which would change nothing"
                problems.append(Problem(f"trainer.{name}", value, reason, cure))
        if problems:
            raise ConfigError(problems)

    def _compute_loss(self, model: nn.Module, inputs: MicroBatch) -> Tensor:
        self._refuse_changes()
        mode, outputs = self._log.mode, list[LossOutput]()
        totals = self._totals(inputs, active_mask(inputs), mode)
        parts = self._scorer.parts(model, inputs, self._active_rows(inputs, mode))
        added = self._generation.added_totals_of(inputs) if mode == "train" and self._added.losses else []
        accumulation = self.current_gradient_accumulation_steps if mode == "train" else 1.0
        count = sum(not part.is_spare for part in parts)
        scaling = {"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}
        for part in parts:
            last = part is parts[-1]
            weighed, coef = self._sampler_corrected, self._entropy_weight
            at = Moment(mode == "train", accumulation, weighed, coef, count, self._proximal_share)
            with nullcontext() if last else more_to_come(self.accelerator, model):
                heads = self._added.teacher_heads(self._unwrapped, part.inputs) if added else []
                output = self._loss(self._scores(model, part.inputs, part.active), part, totals, at)
                if added and not part.is_spare:
                    progress = self.state.global_step, self.state.max_steps
                    output = self._added.add(output, model, part.inputs, heads, added, progress)
                if self.args.replay_routes and output.figures is not None and mode == "train":
                    output.figures.means["sampling/routes_changed"] = self._scorer.routes_changed()
                if not last:  # as transformers' `training_step` does of the last one
                    self.accelerator.backward(output.loss, **scaling)
                self._log_loss(output)
            outputs.append(output if last else output.detached())
        output = joined(outputs, parts)
        if inputs in self._generation:
            inputs.setdefault("old_per_token_logps", output.per_token_logps.detach())
        if mode == "train" and self._drift is not None and self._drift.due:
            self._check_drift(output.per_token_logps.detach(), inputs)
        self._guard.note(output)
        stock = self.args.loss_defaults == "trl"
        if self._evaluated is None and (mode == "eval" or stock or self.accelerator.sync_gradients):
            self._figures.log(self._metrics[mode], self.accelerator)
            add_ess(self._metrics[mode])
        return output.loss

    def _log_loss(self, output: LossOutput) -> None:
        """Log the figures of some rows, and let their entropy steer the bonus."""
        if (figures := output.figures) is None:
            return
        self._figures.add(figures)
        if figures.entropy is not None and self._log.mode == "train":
            self._steer_entropy(figures.entropy)
        if figures.aux_loss is not None:
            aux_loss = self.accelerator.gather_for_metrics(figures.aux_loss.detach())
            self._log.add("aux_loss", aux_loss.mean().item())

    @property
    def _entropy_weight(self) -> float | None:
        """The weight of the entropy bonus now; None without a bonus. Skywork-OR1, arXiv:2505.22312."""
        if not self._entropy_bonus_enabled:
            return None
        above = self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target
        return 0.0 if above else self.entropy_coef

    def _steer_entropy(self, local: Tensor) -> None:
        """Add the sum and the count of some rows' entropies; at an optimizer step, move the bonus's weight and log it.

        It is kept where TRL keeps it and saves it.
        """
        if self.use_adaptive_entropy:
            known = self._entropy_window_stats
            self._entropy_window_stats = local if known is None else known + local
        if not self.accelerator.sync_gradients:
            return
        if self.use_adaptive_entropy:
            total, count = self.accelerator.reduce(self._entropy_window_stats, reduction="sum")
            self._last_world_entropy = (total / count.clamp(min=1.0)).item()
            self.entropy_coef = moved_coefficient(self.entropy_coef, self._last_world_entropy, self.args)
            self._entropy_window_stats = None
        self._log.add("entropy_coef", self.entropy_coef)

    @property
    def _proximal_share(self) -> float:
        """Alpha of `sampler_correction.interpolated` for the present step of the generation."""
        size, before = self.args.gradient_accumulation_steps, self.collector.age * self._uses
        since = self._step % self._uses // size * size
        return before / (before + since) if before else 0.0

    # Micro-batches.

    def _prepare_inputs(self, generation_batch: Sequence[dict[str, Any]]) -> MicroBatch:  # type: ignore[override]
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            self._eval_rows.seen += len(generation_batch) * self.accelerator.num_processes
            return inputs
        if self._buffered_inputs is not self._generation.micro_batches:  # TRL has just generated
            batches = self._buffered_inputs
            if self._regroups and self.sharing.possible:  # groups stay together and padding goes
                batches = regroup(batches, self.args.gradient_accumulation_steps, self._skips)
            self._generation = arranged(batches, self._added.masks, self.args, self.accelerator)
            names, metrics, by_turn = self.reward_func_names, self._metrics["train"], self.objective.sees_turns
            log_rows(self._buffered_inputs, names, metrics, self.accelerator, by_turn=by_turn)
            self._buffered_inputs = self._generation.micro_batches
            inputs = self._buffered_inputs[self._step % len(self._buffered_inputs)]
        if self.accelerator.sync_gradients:  # the policy is about to move
            others = (batch for batch in self._buffered_inputs if batch is not inputs)
            later = [batch for batch in others if "old_per_token_logps" not in batch]
            if later and self.args.old_logps != "recomputed" and self.args.samples_otherwise:
                later = without_known_old(later, self.accelerator)
            self._add_old_logps(later)
        return inputs

    def _add_old_logps(self, batches: list[MicroBatch]) -> None:
        """Add old log-probabilities to the micro-batches that have none, by the loss's own forward."""
        if batches:
            with forward_only(self.model, self.args):
                for batch in batches:
                    active = self._active_rows(batch, "train")
                    batch["old_per_token_logps"] = self._scores(self.model, batch, active)[0]

    def _totals(self, inputs: MicroBatch, mask: Tensor, mode: str) -> StepTotals:
        """Denominators of the optimizer step that a micro-batch belongs to."""
        steps = self.current_gradient_accumulation_steps if mode == "train" else 1
        if self.args.exact_denominators:
            return self._generation.totals_of(inputs) or counted_once(mask, steps, self.accelerator)
        share = steps / int(self.args.steps_per_generation or 1) if mode == "train" else 1.0
        return stock_totals(inputs, steps, share, self.accelerator.num_processes)

    def _check_drift(self, logps: Tensor, inputs: Mapping[str, Any]) -> None:
        """Compare the sampler with the policy and log the figures."""
        assert self._drift is not None
        for name, value in self._drift.check(logps, inputs, self.accelerator).items():
            self._metrics["train"][name].append(value)
