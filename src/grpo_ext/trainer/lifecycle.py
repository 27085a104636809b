"""Lifecycle: TRL's GRPOTrainer that can be stopped and resumed at any step, and whose evaluations count each row once.

Only the hooks are here. What they do is in `checkpoints`, `nonfinite`, `findings`, `evaluating` and `signals`.
"""

import math
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_utils import TrainOutput, has_length
from transformers.utils.hub import hf_api

from grpo_ext.bounded import remove_link
from grpo_ext.config.batches import eval_batch_problems
from grpo_ext.config.engines import check_started
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.temporary import temporarily
from grpo_ext.errors import ConfigError, Problem, RolloutDrift, SamplerLost, ServerLost
from grpo_ext.objective.objective import Objective
from grpo_ext.packing.together import is_out_of_memory
from grpo_ext.rollout.random_streams import random_streams_kept
from grpo_ext.rollout.seeds import AttemptId, Source, numbered
from grpo_ext.rollout.vllm.lazy_import import GRPOTrainer
from grpo_ext.tables import show
from grpo_ext.terminal import safe_output
from grpo_ext.trainer import findings, in_flight, saving
from grpo_ext.trainer.batches import Generation
from grpo_ext.trainer.callbacks import completions_table
from grpo_ext.trainer.checkpoints import processes, state, writing
from grpo_ext.trainer.checkpoints.finish import FINISHED_FILE
from grpo_ext.trainer.checkpoints.processes import everywhere
from grpo_ext.trainer.checkpoints.starting import start
from grpo_ext.trainer.credit import Credit
from grpo_ext.trainer.evaluating import EvalRows, Evaluated
from grpo_ext.trainer.loss_terms import Figures
from grpo_ext.trainer.nonfinite import SKIPPED, NonFiniteGuard
from grpo_ext.trainer.notices import without_notices
from grpo_ext.trainer.reference import InitialWeights
from grpo_ext.trainer.setup import check_trained
from grpo_ext.trainer.signals import interrupted, naming_checkpoint, naming_lost_ranks, signals
from grpo_ext.trainer.trial_save import check_saving
from grpo_ext.waiting import SIGNALLED


class _EndedByEvaluation(Exception):
    """An evaluation that was made up for has ended the training."""


class Lifecycle(GRPOTrainer):
    """`trl.GRPOTrainer` with complete checkpoints, exact resume, a check for NaN before each step, and signals.

    Attributes:
        recipe_record: what defines the run, where a recipe does; else the trainer's own arguments do.
    """

    args: GRPOExtConfig
    collector: Any
    model: Any
    num_iterations: Any
    objective: Objective
    recipe_record: Mapping[str, Any] | None = None
    _credit: Credit
    _drift: Any
    _epoch_began = (0, 0)
    """The current epoch, and the micro-batches of training before it."""
    _first_logps: Tensor | None = None
    """Log-probabilities of the reference at the start."""
    _initial: InitialWeights | None = None
    """Those of an adapter, which are its reference."""
    _ends_early = False
    """True while a run is ended early: its checkpoint must hold what a resume needs, also with `save_only_model`."""
    _may_leave_evaluation = False
    """True in an evaluation that is due in training, which the resumed run repeats."""
    _record: Mapping[str, Any] | None = None
    _reference_checked = True
    """False once memory was too little for the check."""

    num_generations: Any
    num_generations_eval: Any
    _tokenizer: Any
    _buffered_inputs: Any
    _figures: Figures
    _generation: Generation
    _metrics: dict[str, defaultdict[str, list[float]]]
    _resumed: state.Resumed | None = None
    _evaluated: Evaluated | None = None
    """The evaluation in progress; None with `loss_defaults: trl`."""
    _stopped_at: int | None = None
    """The step after which a signal stopped training."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._writer = writing.Writer(saves=self.args.should_save)
        self._guard = NonFiniteGuard(self)
        self._eval_rows = EvalRows()

    # Training.

    @safe_output()
    @signals.run()
    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train as TRL does; a second call begins with new rollouts.

        Raises:
            ConfigError: the checkpoint is damaged or of another run, or the launch does not fit the settings.
            DataError: the stream ended before the first step.
            NonFiniteError: NaN or inf was found.
            OutOfMemory: a process has too little memory.
            RankLost: another process has ended.
            RunInterrupted: a signal ended the run, which has saved a checkpoint.
        """
        try:
            check_started(self.accelerator.distributed_type.value, self.ref_model is not None, self.model)
            self._buffered_inputs, self._generation, self._step = None, Generation(), 0
            self._credit.group_means.load([])
            self._figures.clear()
            self._metrics["train"].clear()
            self._metrics["eval"].clear()
            self.collector.reset()
            self._epoch_began, self._stopped_at, self._ends_early = (0, 0), None, False
            self._record = saving.run_identity(self)
            checkpoint = start(self.args, resume_from_checkpoint, self._record)
            if self.recipe_record is not None or self.args.save_strategy != "no":
                model = self.accelerator.unwrap_model(self.model)
                check_saving(model, self._tokenizer, self.processing_class, self.args)
            self._guard.start()
            named = naming_lost_ranks(self.args.world_size, self.args.ddp_timeout)
            with signals.training(), named, without_notices():
                output = super().train(checkpoint, *args, **kwargs)
        except (SamplerLost, ServerLost, RolloutDrift) as error:
            saving.save_and_explain(self, error)
            if signals.requested:
                raise interrupted(signals.requested, self.state, of_recipe=self.recipe_record is not None) from error
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise saving.out_of_memory(self, error) from error
        finally:
            self.collector.close()
        if self._guard.requested:
            raise interrupted(self._guard.requested, self.state, of_recipe=self.recipe_record is not None)
        self._guard.report()
        check_trained(self.args, self.train_dataset, self.state.global_step)
        return output

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: object, **kwargs: object) -> Tensor:
        """Return TRL's loss, and flag a micro-batch with NaN or inf."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return self._guard.watch(inputs, loss) if self.model.training else loss

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self._guard.clip(model, self.args.max_grad_norm, partial(super()._clip_grad_norm, model))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None:  # max_grad_norm is 0
            grad_norm = self._guard.clip(model, math.inf, partial(super()._get_grad_norm, model))
        return super()._get_grad_norm(model, grad_norm)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        total = self._total_loss_scalar
        if self._guard.requested:  # save and stop, once; an evaluation could outlast a grace period
            self._ends_early, step = True, self.state.global_step
            self.control.should_save = self._stopped_at != step  # the end of an epoch calls this a second time
            self.control.should_evaluate = False
            self.control.should_training_stop = True
            self._stopped_at = step
        self._step_is_whole()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._writer.go_back = saving.after_step(self)
        if self._guard.skipped_since_log and self._globalstep_last_logged == self.state.global_step:
            self._guard.skipped_since_log = False
            self._tr_loss.zero_()  # nan - nan is not 0
            self._total_loss_scalar = total

    def _step_is_whole(self) -> None:
        self._writer.go_back, self._guard.updating = lambda: None, False

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, with the number of skipped steps since the last log."""
        skipped = self._metrics["train"].pop(SKIPPED, []) if self.model.training else []
        if skipped and self.args.on_nonfinite == "skip":
            logs = {**logs, SKIPPED: sum(skipped)}
        if "train_loss" in logs:  # in place: `train` returns them
            known = self.state.global_step - (0 if self._resumed is None else self._resumed.unknown)
            logs["train_loss"] = self._total_loss_scalar / max(known, 0.001)  # transformers' depends on its version
        self.num_completions_to_print = 0  # not TRL's table, which reads names as markup and prints any length
        if self.log_completions and self.accelerator.is_main_process:
            name = f"completions_{self.state.global_step:05d}.parquet"
            remove_link(Path(self.args.output_dir or ".") / "completions" / name)  # TRL's writer would follow it
        super().log(logs, start_time)
        if self.log_completions and self.accelerator.is_main_process and self.args.num_completions_to_print != 0:
            show(completions_table(self._logs, self.state.global_step, self.args.num_completions_to_print))

    def _sampling(self) -> AbstractContextManager[None]:
        """Return a context for sampling, which names overflowed weights and logits."""
        return findings.sampling(self.model, self.state)

    # Saving.

    def save_final(self, output_dir: str | Path) -> None:
        """Save the final model, completely or not at all.

        Raises:
            SaveError: it could not be written; on all processes.
            NonFiniteError: a weight has overflowed; on all processes.
        """
        saving.save_final(self, Path(output_dir))

    def finish(self, output_dir: str | Path) -> None:
        """Record that the run is complete; the last call, after `save_final`.

        Raises:
            SaveError: the record could not be written; on all processes.
        """
        facts = {"step": self.state.global_step, "max_steps": self.state.max_steps}
        final = Path(output_dir)
        with self._writer.reporting(final / FINISHED_FILE, final):
            self._writer.attempt_shared(self._writer.finish, final, self._record or {}, facts)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as TRL does; outside a checkpoint with whole weights, also where an engine shards them."""
        with nullcontext() if _internal_call else processes.gathered(self):
            super().save_model(output_dir, _internal_call)

    def create_model_card(  # type: ignore[override]  # TRL's, which takes less than transformers'
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write TRL's card into `output_dir`, with a section about the loss and the figures of the run."""
        name = model_name or Path(str(self.hub_model_id or self.args.output_dir)).name
        self._writer.attempt(saving.write_card, self, partial(super().create_model_card, name, dataset_name, tags))

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
            detail = (str(error).strip().splitlines() or [type(error).__name__])[0]
            reason = f"the hub cannot be reached, or refuses ({detail})"
            cure = "Check hub_model_id, the token (hf auth whoami) and the network, or set push_to_hub: false."
            raise ConfigError([Problem("push_to_hub", True, reason, cure)]) from error

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, writing.SAVING) if self._writer.is_aside else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        saving.save_checkpoint(self, trial, partial(super()._save_checkpoint, model, trial))

    # None of the following may raise on one process only.

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        self._writer.attempt(super()._save, output_dir, state_dict)

    def _save_scaler(self, output_dir: str) -> None:
        self._writer.attempt(super()._save_scaler, output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        self._writer.attempt(super()._save_rng_state, output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        together = self._writer.is_aside and (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        if not (together and self._writer.failed_anywhere()):
            self._writer.attempt(super()._save_optimizer_and_scheduler, output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._writer.is_aside:  # else pushed from its final place, which is read in the background
            super()._push_from_checkpoint(checkpoint_folder)

    # Evaluation.

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluate as TRL does, in batches of whole groups.

        Raises:
            ConfigError: an evaluation batch would split a group.
        """
        if problems := list(eval_batch_problems(self.args)):
            raise ConfigError(problems)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def _evaluate(self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False) -> Any:
        if skip_scheduler and self._resumed is not None:  # `eval_on_start` of a run that has been resumed
            return None
        self._writer.go_back = saving.before_evaluation(self)  # should it be left: the resumed run repeats it
        with temporarily(self, _may_leave_evaluation=True):
            return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Evaluate a batch as TRL does, unless a signal ends the run."""
        if self._may_leave_evaluation and any(everywhere(signals.requested)):
            raise SamplerLost(f"evaluation: {SIGNALLED}")
        return super().prediction_step(*args, **kwargs)

    def ends_by_signal(self) -> bool:
        """Return whether a signal has come on any process, and if so end the run after its present step; collective.

        It is a whole step from now on, also for a run that ends otherwise.
        """
        self._step_is_whole()
        self._guard.requested = max(self._guard.requested, *everywhere(signals.requested))
        return bool(self._guard.requested)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate with metrics over all completions instead of batches; the random streams of training are kept."""
        passed = description, prediction_loss_only, ignore_keys, metric_key_prefix
        rows = None
        output: Any
        if has_length(dataloader):
            rows = len(dataloader.dataset) * self.num_generations_eval  # type: ignore[arg-type]
        self._eval_rows = EvalRows(0, rows)
        if self.args.loss_defaults == "trl":
            output = super().evaluation_loop(dataloader, *passed)
            self._name_figures(metric_key_prefix)
            return output
        self._figures.clear()  # a step that failed may have left some
        evaluated = Evaluated(rows)
        with temporarily(self, _evaluated=evaluated), random_streams_kept(), self.collector.paused():
            output = super().evaluation_loop(dataloader, *passed)
        metrics, weights = self._metrics["eval"], self.reward_weights.double()
        figures = evaluated.figures(self.reward_func_names, weights, self.num_generations_eval, self.objective)
        metrics.update({name: [value] for name, value in figures.items()})
        self._figures.log(metrics, self.accelerator)
        output.metrics[f"{metric_key_prefix}_loss"] = metrics.pop("loss", [0.0])[-1]
        self._name_figures(metric_key_prefix)
        return output

    def _name_figures(self, prefix: str) -> None:
        """Put the name of one of several evaluation sets before its figures, to which TRL adds `eval_` alone."""
        metrics, name = self._metrics["eval"], prefix.removeprefix("eval").strip("_")
        for figure in list(metrics) if name and prefix.startswith("eval_") else ():
            metrics[f"{name}_{figure}"] = metrics.pop(figure)

    @property
    def _uses(self) -> int:
        """Micro-batches that train on one generation."""
        return int(self.args.steps_per_generation or 1) * self.num_iterations

    def attempt_ids(self, count: int) -> list[AttemptId]:
        """Return the ids of this process's next `count` attempts, in training or evaluation."""
        if self.model.training:
            return self.attempts_of(self._step // self._uses, count)
        rows = self._eval_rows.next(self.accelerator.process_index * count, count)
        return numbered(self.args.seed, Source.EVALUATION, rows, self.num_generations_eval)

    def attempts_of(self, generation: int, count: int) -> list[AttemptId]:
        """Return the ids of this process's `count` attempts of a generation, which training numbers from 0."""
        first = (generation * self.accelerator.num_processes + self.accelerator.process_index) * count
        return numbered(self.args.seed, Source.TRAINING, range(first, first + count), self.num_generations)

    # Resume.

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
            saved = state.read(Path(checkpoint), self)
            self._resumed = state.Resumed(Path(checkpoint), saved, self.state.global_step)
        self._step = self.state.global_step * self.args.gradient_accumulation_steps
        if self._initial is not None:
            with naming_checkpoint(checkpoint):
                self._initial.read(Path(checkpoint))
            self._first_logps = None
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
        micro_batches, totals = state.restore(self, self._resumed.state, self._resumed.checkpoint)
        if micro_batches:
            self._generation = Generation(micro_batches, totals)
            self._buffered_inputs = self._generation.micro_batches
        if self.collector.ahead is not None:
            rank, of_host = self.accelerator.process_index, self.accelerator.local_process_index
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
