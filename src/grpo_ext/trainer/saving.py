"""Saving: TRL's GRPOTrainer whose checkpoints and models are complete or absent; checkpoints hold all of the run."""

import gc
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from traceback import clear_frames
from typing import Any

import httpx
import torch
from torch import nn
from transformers.utils.hub import hf_api

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.errors import ConfigError, OutOfMemory, Problem, first_line
from grpo_ext.objective.objective import Objective
from grpo_ext.rollout.random_streams import random_state
from grpo_ext.rollout.vllm.drift import DriftCheck
from grpo_ext.rollout.vllm.lazy_import import GRPOTrainer
from grpo_ext.safe_reading import remove_link, write_text
from grpo_ext.trainer import card, in_flight
from grpo_ext.trainer.advantages import Advantages
from grpo_ext.trainer.batches import Generation
from grpo_ext.trainer.checkpoints import identity, processes, state, writing
from grpo_ext.trainer.checkpoints.choice import OBJECTIVE_FILE
from grpo_ext.trainer.checkpoints.finish import CARD, FINISHED_FILE
from grpo_ext.trainer.checkpoints.manifest import MANIFEST
from grpo_ext.trainer.checkpoints.processes import agreed
from grpo_ext.trainer.collector import Collector
from grpo_ext.trainer.nan_report import check_weights
from grpo_ext.trainer.nonfinite import NonFiniteGuard
from grpo_ext.trainer.reference import InitialWeights, ReferenceCheck


class Saving(GRPOTrainer):
    """`trl.GRPOTrainer` that writes checkpoints and models whole or not at all.

    Attributes:
        record: what defines the run that trains, for its checkpoints and evaluations.
        recipe_record: what defines the run, where a recipe does; else the trainer's own arguments do.
    """

    args: GRPOExtConfig
    collector: Collector
    model: Any
    num_iterations: Any
    objective: Objective
    record: Mapping[str, Any] | None = None
    recipe_record: Mapping[str, Any] | None = None
    _advantages: Advantages
    _drift: DriftCheck | None
    _ends_early = False
    """True while a run is ended early: its checkpoint must hold what a resume needs, also with `save_only_model`."""
    _epoch_began = (0, 0)
    """The current epoch, and the micro-batches of training before it."""
    _generation: Generation
    _guard: NonFiniteGuard
    _initial: InitialWeights | None = None
    """Those of an adapter, which are its reference."""
    _metrics: dict[str, defaultdict[str, list[float]]]
    _reference_check: ReferenceCheck
    _resumed: state.Resumed | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._writer = writing.Writer(saves=self.args.should_save)

    def check_reference(self) -> None:
        """Compare the reference with the policy before training, later with itself at the start; collective.

        Raises:
            ConfigError: they differ, or made-up rows cannot be scored.
        """
        if self.beta:
            policy, begins = self.accelerator.unwrap_model(self.model), self.state.global_step == 0
            self._reference_check(policy, self.model, self.ref_model or self.model, begins=begins)

    # What the next step depends on.

    @property
    def _uses(self) -> int:
        """Micro-batches that train on one generation."""
        return int(self.args.steps_per_generation or 1) * self.num_iterations

    @property
    def _split(self) -> list[int]:
        """A state is restored where this is the same: processes, rows and micro-batches."""
        args = self.args
        sizes = args.per_device_train_batch_size, args.gradient_accumulation_steps, int(args.steps_per_generation or 1)
        return [self.accelerator.num_processes, *sizes, self.num_iterations]

    def _state_dict(self) -> dict[str, Any]:
        """Return this process's state between two optimizer steps."""
        generation, dynamic = self._generation, self.collector.dynamic
        closed = self._step % self._uses == 0
        return {
            "split": self._split,
            "step": self._step,
            "micro_batches": [] if closed else [dict(batch) for batch in generation.micro_batches],
            "totals": [] if closed else [list(totals) for totals in generation.totals],
            "added_totals": [] if closed else [[list(totals) for totals in every] for every in generation.added],
            "metrics": {name: list(values) for name, values in self._metrics["train"].items()},
            "loss": self._tr_loss.clone(),
            "_total_loss_scalar": self._total_loss_scalar,
            "_globalstep_last_logged": self._globalstep_last_logged,
            "drawn": 0 if dynamic is None else dynamic.prompts.drawn,
            "drift": [] if self._drift is None else self._drift.to_list(),
            **self._advantages.state_dict(),
        }

    def _load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what `_state_dict` returned, but for the generation."""
        self._step = saved["step"]
        self._metrics["train"].clear()
        self._metrics["train"].update({name: list(values) for name, values in saved["metrics"].items()})
        self._tr_loss.copy_(saved["loss"])
        self._total_loss_scalar = saved["_total_loss_scalar"]
        self._globalstep_last_logged = saved["_globalstep_last_logged"]
        if self.collector.dynamic is not None:
            self.collector.dynamic.prompts.drawn = saved["drawn"]
        if self._drift is not None:
            self._drift.load(saved["drift"])
        self._advantages.load_state_dict(saved)

    def _followed_reference(self) -> dict[str, Any]:
        """Return the parameters of a reference that follows the policy (`sync_ref_model`)."""
        if not self.args.sync_ref_model or self.ref_model is None:
            return {}
        return dict(self.accelerator.unwrap_model(self.ref_model).named_parameters())

    def _way_back(self) -> Callable[[], None]:
        """Return a function that brings the trainer back to this whole step, from within the next or an evaluation."""
        saved, restore, run = self._state_dict(), random_state(), self.state
        epoch_began, seen, logged = self._epoch_began, run.num_input_tokens_seen, len(run.log_history)

        def go_back() -> None:
            restore()
            self._load_state_dict(saved)
            self._epoch_began, run.num_input_tokens_seen = epoch_began, seen
            del run.log_history[logged:]

        return go_back

    def _way_back_from_evaluation(self) -> Callable[[], None]:
        """Return a function that brings the trainer back to this moment, from within an evaluation."""
        to_step, table = self._way_back(), state.table_of(self._logs)
        stateful = state.stateful(self.callback_handler.callbacks)
        callbacks = [(callback, dict(vars(callback))) for callback in stateful]

        def go_back() -> None:
            to_step()
            state.fill_table(self._logs, table)
            for callback, attributes in callbacks:
                vars(callback).update(attributes)

        return go_back

    # A run that ends early.

    def _save_and_explain(self, error: Exception) -> None:
        """Save a checkpoint before a run ends because it cannot sample, and name it in the error."""
        self._ends_early, step, resumed = True, self.state.global_step, self._resumed
        folder = Path(self._get_output_dir(None)) / f"checkpoint-{step}"
        saved = agreed((folder / MANIFEST).exists)  # all processes save or none: one may be creating it already
        if resumed is not None and resumed.pending:  # its state is not restored yet
            folder = resumed.checkpoint
        elif step and not saved:
            self._writer.go_back()
            self._save_checkpoint(self.model, trial=None)
        advice = f"The run can be resumed from {folder}." if step else "No step had been made."
        error.args = (f"{error}\n{advice}",)

    def _out_of_memory(self, error: Exception) -> OutOfMemory:
        """Return the error that ends a run which has too little memory.

        A checkpoint of the last whole step is saved by a run of one process, unless the optimizer was changing
        weights.
        """
        failure = OutOfMemory(f"After step {self.state.global_step} of {self.state.max_steps}", error)
        if self.accelerator.num_processes > 1 or self._guard.updating:
            return failure
        clear_frames(error.__traceback__)  # what the step has computed
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        try:
            self._save_and_explain(failure)
        except Exception as trouble:
            failure.args = (f"{failure}\nNo checkpoint could be saved: {trouble}",)
        return failure

    # Files.

    def save_final(self, output_dir: str | Path) -> None:
        """Save the final model, completely or not at all.

        Raises:
            SaveError: it could not be written; on all processes.
            NonFiniteError: a weight has overflowed; on all processes.
        """
        check_weights(self.model, self.state)
        final, writer = Path(output_dir), self._writer
        folder = final / writing.SAVING / "model"
        with writer.reporting(final, final), writer.aside(), processes.gathered(self):
            writer.attempt(self.save_model, str(folder), _internal_call=True)  # without a push
            writer.attempt(self._write_objective, folder)
        with writer.reporting(final, final):
            writer.attempt_shared(writer.publish, folder, final)
            self.create_model_card()

    def finish(self, output_dir: str | Path) -> None:
        """Record that the run is complete; the last call, after `save_final`.

        Raises:
            SaveError: the record could not be written; on all processes.
        """
        facts = {"step": self.state.global_step, "max_steps": self.state.max_steps}
        final = Path(output_dir)
        with self._writer.reporting(final / FINISHED_FILE, final):
            self._writer.attempt_shared(self._writer.finish, final, self.record or {}, facts)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as TRL does; outside a checkpoint with whole weights, also where an engine shards them."""
        with nullcontext() if _internal_call else processes.gathered(self):
            super().save_model(output_dir, _internal_call)

    def create_model_card(  # type: ignore[override]  # TRL's, which takes less than transformers'
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write TRL's card into `output_dir`, with a section about the loss and the figures of the run."""
        name = model_name or Path(str(self.hub_model_id or self.args.output_dir)).name
        self._writer.attempt(self._write_card, partial(super().create_model_card, name, dataset_name, tags))

    def init_hf_repo(self, token: str | None = None) -> None:
        """Create the repository, and the branch `hub_revision`: transformers' push to a missing branch would fail.

        Raises:
            ConfigError: the hub cannot be reached, or refuses.
        """
        try:
            super().init_hf_repo(token)
            if self.args.hub_revision and self.is_world_process_zero():
                branch, token = self.args.hub_revision, token or self.args.hub_token
                hf_api().create_branch(str(self.hub_model_id), branch=branch, token=token, exist_ok=True)
        except (httpx.HTTPError, OSError, ValueError) as error:
            reason = f"the hub cannot be reached, or refuses ({first_line(error)})"
            cure = "Check hub_model_id, the token (hf auth whoami) and the network, or set push_to_hub: false."
            raise ConfigError([Problem("push_to_hub", True, reason, cure)]) from error

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, writing.SAVING) if self._writer.is_aside else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint aside and move it into place when all processes have written it.

        Raises:
            SaveError: it could not be written; on all processes.
            NonFiniteError: a weight has overflowed; on all processes.
            ConfigError: the reference has moved.
        """
        args, run, writer = self.args, self.state, self._writer
        check_weights(self.model, run)
        self.check_reference()
        final = Path(self._get_output_dir(trial)) / f"checkpoint-{run.global_step}"
        folder, whole = final.parent / writing.SAVING / final.name, self._ends_early or not args.save_only_model
        with writer.reporting(final, final.parent), writer.aside():
            writer.attempt(super()._save_checkpoint, model, trial)
            if whole and args.save_only_model:
                self._save_optimizer_and_scheduler(str(folder))
                self._save_scaler(str(folder))
                self._save_rng_state(str(folder))
            writer.attempt(self._save_own, folder)
        if str(run.best_model_checkpoint) == str(folder):
            run.best_model_checkpoint = str(final)
        with writer.reporting(final, final.parent):
            facts = {"step": run.global_step, "weights_alone": not whole}
            writer.attempt_shared(writing.settle, folder, final, run, facts, args.save_total_limit)
        if args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def _save_own(self, folder: Path) -> None:
        """Write the files of a checkpoint that are not TRL's."""
        rank, main = self.accelerator.process_index, self.accelerator.is_main_process
        self._write_objective(folder)
        if self.args.should_save:
            identity.write_record(folder, self.record or {})
            if self._initial is not None:
                self._initial.write(folder)
        epoch, began = self._epoch_began
        table = state.table_of(self._logs) if main and self.args.log_completions else {}
        state.write(folder, rank, self._state_dict() | {"place": [epoch, self._step - began], "table": table})
        state.write_reference(folder, rank, self._followed_reference(), saves=self.args.should_save)
        if (ahead := self.collector.ahead) is not None:
            replaces = self.collector.dynamic is not None and self.args.should_save
            rollouts = ahead.in_flight(waits=not self._ends_early, replaces=replaces)
            in_flight.write(folder, rank, rollouts)

    def _write_objective(self, folder: Path) -> None:
        """Write the resolved loss beside a model."""
        if self.args.should_save:
            write_text(folder / OBJECTIVE_FILE, json.dumps(self.objective.to_dict(), indent=2))

    def _write_card(self, stock: Callable[[], None]) -> None:
        """Write TRL's model card by `stock`, and add the section with the loss and figures of the run."""
        if self.is_world_process_zero():
            path, run = Path(str(self.args.output_dir)) / CARD, self.state
            remove_link(path)  # TRL would write to what it leads to
            stock()
            section = card.results(self.objective, (run.global_step, run.max_steps), run.log_history)
            write_text(path, path.read_text(encoding="utf-8") + section)

    # None of the following may raise on one process only.

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        self._writer.attempt(super()._save, output_dir, state_dict)

    def _save_scaler(self, output_dir: str) -> None:
        self._writer.attempt(super()._save_scaler, output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        self._writer.attempt(super()._save_rng_state, output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        collective = self._writer.is_aside and (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        if not (collective and self._writer.failed_anywhere()):
            self._writer.attempt(super()._save_optimizer_and_scheduler, output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._writer.is_aside:  # else pushed from its final place, which is read in the background
            super()._push_from_checkpoint(checkpoint_folder)
