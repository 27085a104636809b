"""Resuming: a trainer that goes on from a checkpoint as if it had never ended."""

import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from datasets import IterableDataset
from torch import nn

from grpo_ext.config.temporary import temporarily
from grpo_ext.objective.aggregation import StepTotals
from grpo_ext.trainer import in_flight
from grpo_ext.trainer.batches import Generation
from grpo_ext.trainer.checkpoints import state
from grpo_ext.trainer.saving import Saving
from grpo_ext.trainer.signals import naming_checkpoint


class _EndedByEvaluation(Exception):
    """An evaluation that was made up for has ended the training."""


class Resuming(Saving):
    """`Saving` that restores what its checkpoints hold."""

    _buffered_inputs: Any

    def _get_train_sampler(self, *args: object, **kwargs: object) -> Any:
        self._train_sampler = super()._get_train_sampler(*args, **kwargs)
        return self._train_sampler

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: object,
    ) -> tuple[int, int]:
        """Return the completed epochs, and the batches of the current one that have been trained on."""
        checkpoint, epochs = resume_from_checkpoint, num_train_epochs
        with naming_checkpoint(checkpoint):
            place = super()._init_training_state(max_steps, num_update_steps_per_epoch, epochs, checkpoint, trial)
        self._resumed = None
        if checkpoint is None:
            return place
        self.state.compute_steps(self.args, max_steps)  # logging, saving, evaluation: by the settings of this run
        with naming_checkpoint(checkpoint):
            state.restore_callbacks(self.state, self.callback_handler.callbacks)
            state.find_best_checkpoint(self.state, Path(checkpoint))
            rank, device = self.accelerator.process_index, self.accelerator.device
            saved = state.read(Path(checkpoint), rank, device, self._split)
            self._resumed = state.Resumed(Path(checkpoint), saved, self.state.global_step)
        self._step = self.state.global_step * self.args.gradient_accumulation_steps
        if self._initial is not None:
            with naming_checkpoint(checkpoint):
                self._initial.read(Path(checkpoint))
            self._reference_check.first = None
        if self._resumed.state is not None and isinstance(self.train_dataset, IterableDataset):
            return self._resumed.place  # a stream may have ended, and begun again, at any step
        for _ in range(place[0]):
            next(iter(self._train_sampler), None)  # draws the order of a completed epoch
        return place

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        with naming_checkpoint(folder), temporarily(self, _issue_warnings_after_load=partial(self._account, folder)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            state.load_default_adapter(model or self.model, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with naming_checkpoint(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with naming_checkpoint(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_best_model(self) -> None:
        folder = Path(str(self.state.best_model_checkpoint))
        with temporarily(self, _issue_warnings_after_load=partial(self._account, folder)):
            super()._load_best_model()

    def _account(self, folder: Path, load_result: Any) -> None:
        """Load what a checkpoint holds under other names than the model's; a tied weight is stored once."""
        model = self.accelerator.unwrap_model(self.model)
        stored_once = {*(getattr(model, "all_tied_weights_keys", None) or ()), *(model._keys_to_ignore_on_save or ())}
        missing = [name for name in load_result.missing_keys if name not in stored_once]
        if missing or load_result.unexpected_keys:
            state.load_renamed(model, folder, missing)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random streams; then evaluate if the run was stopped before an evaluation that was due."""
        with naming_checkpoint(checkpoint):
            super()._load_rng_state(checkpoint)
        resumed = self._resumed
        if resumed is not None and state.evaluation_due(self.args, self.state, epoch_over=resumed.epoch_over):
            self.control.should_evaluate = True
            self.control.should_save = self.args.load_best_model_at_end  # else the best one would not be known
            epoch = self._epoch_began[0]
            self._maybe_log_save_evaluate(self._tr_loss, None, self.model, None, epoch, None, time.time())
            if self.control.should_training_stop:
                raise _EndedByEvaluation

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        resumed, begins, taken = self._resumed, None, 0
        if resumed is not None and resumed.pending:
            taken = kwargs["steps_trained_in_current_epoch"]
            begins = str(resumed.checkpoint)
            with naming_checkpoint(begins):
                self._restore(epoch_over=taken == 0)
        self._epoch_began = (kwargs["epoch"], self._step - taken)
        with suppress(_EndedByEvaluation):
            if self.state.global_step < self.state.max_steps:
                super()._run_epoch(*args, **kwargs)
                return
            if begins is not None:  # resumed after its last step
                self._load_rng_state(begins)
            self.control.should_training_stop = True

    def _restore(self, *, epoch_over: bool) -> None:
        assert self._resumed is not None
        self._resumed.pending, self._resumed.epoch_over = False, epoch_over
        if self._resumed.state is None:
            return
        saved, rank = self._resumed.state, self.accelerator.process_index
        self._load_state_dict(saved)
        state.fill_table(self._logs, saved["table"])
        state.read_reference(self._resumed.checkpoint, rank, self._followed_reference())
        if saved["micro_batches"]:
            totals, *added = ([StepTotals(*row) for row in rows] for rows in (saved["totals"], *saved["added_totals"]))
            self._generation = Generation(saved["micro_batches"], totals, added)
            self._buffered_inputs = self._generation.micro_batches
        if self.collector.ahead is not None:
            of_host = self.accelerator.local_process_index
            saver = rank - of_host if self.args.save_on_each_node else 0
            self.collector.ahead.kept = in_flight.read(self._resumed.checkpoint, rank, saver)

    def _finalize_training(self, *args: object, **kwargs: object) -> Any:
        resumed = self._resumed
        if resumed is not None and resumed.pending:  # after the last step of the last epoch, so that no epoch ran
            epoch, taken = resumed.place
            self._epoch_began = (epoch, self._step - taken)
            with naming_checkpoint(resumed.checkpoint):
                self._restore(epoch_over=True)
            with suppress(_EndedByEvaluation):
                self._load_rng_state(str(resumed.checkpoint))
        with self._writer.aside():  # transformers would delete the last checkpoint before the model is saved
            output = super()._finalize_training(*args, **kwargs)
        return output._replace(training_loss=output.metrics["train_loss"])
