"""Lifecycle: training that can be stopped at any step, and evaluations that count each row once.

Only the hooks are here and in `saving` and `resuming`. What they do is in `checkpoints`, `nonfinite`, `nan_report`,
`evaluating` and `signals`.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_utils import TrainOutput, has_length

from grpo_ext import __version__
from grpo_ext.config.batches import eval_batch_problems
from grpo_ext.config.engines import check_started
from grpo_ext.config.temporary import temporarily
from grpo_ext.errors import ConfigError, RolloutDrift, SamplerLost, ServerLost
from grpo_ext.packing.collective import is_out_of_memory
from grpo_ext.packing.micro_batches import MicroBatch
from grpo_ext.rollout.random_streams import random_streams_kept
from grpo_ext.rollout.seeds import AttemptId, Source, numbered
from grpo_ext.safe_reading import remove_link
from grpo_ext.tables import show
from grpo_ext.terminal import safe_output, without_notices
from grpo_ext.trainer.batches import Generation
from grpo_ext.trainer.callbacks import completions_table
from grpo_ext.trainer.checkpoints import identity
from grpo_ext.trainer.checkpoints.processes import everywhere
from grpo_ext.trainer.checkpoints.starting import start
from grpo_ext.trainer.evaluating import EvalRows, Evaluated
from grpo_ext.trainer.loss_terms import Figures
from grpo_ext.trainer.nan_report import ObservedBatch, on_cpu
from grpo_ext.trainer.nonfinite import SKIPPED, NonFiniteGuard
from grpo_ext.trainer.resuming import Resuming
from grpo_ext.trainer.save_dry_run import check_saving
from grpo_ext.trainer.setup import check_trained
from grpo_ext.trainer.signals import interrupted, naming_lost_ranks, signals
from grpo_ext.waiting import SIGNALLED


class Lifecycle(Resuming):
    """`trl.GRPOTrainer` that can be stopped and resumed at any step, with a check for NaN before each."""

    num_generations: Any
    num_generations_eval: Any
    _tokenizer: Any
    _figures: Figures
    _evaluated: Evaluated | None = None
    """The evaluation in progress; None with `loss_defaults: trl`."""
    _may_leave_evaluation = False
    """True in an evaluation that is due in training, which the resumed run repeats."""
    _stopped_at: int | None = None
    """The step after which a signal stopped training."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._guard = NonFiniteGuard(self, self._metrics["train"], self._tokenizer, self._dump)
        self._eval_rows = EvalRows()

    def _dump(self, observed: Sequence[ObservedBatch]) -> dict[str, Any]:
        """Return this process's micro-batches of a step in which NaN or inf was found, and what they belong to."""
        origin = {
            "grpo_ext": __version__,
            "step": self.state.global_step + 1,
            "rank": self.accelerator.process_index,
            "processes": self.accelerator.num_processes,
            "settings": identity.settings(self.args),
            "objective": identity.plain(self.objective.to_dict()),
            "model": getattr(getattr(self.model, "config", None), "_name_or_path", None) or None,
            "adapter": is_peft_model(self.model),
            "reward_names": list(self.reward_func_names),
            "reward_weights": self.reward_weights.tolist(),
        }
        if not observed:
            return origin
        totals = self._generation.totals_of(cast(MicroBatch, observed[0].inputs))
        origin["totals"] = None if totals is None else torch.stack(list(totals)).cpu()
        return origin | {"micro_batches": [on_cpu({**seen.inputs, **seen.computed}) for seen in observed]}

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
            self._advantages.group_means.load([])
            self._figures.clear()
            self._metrics["train"].clear()
            self._metrics["eval"].clear()
            self.collector.reset()
            self._epoch_began, self._stopped_at, self._ends_early = (0, 0), None, False
            self.record = identity.of_run(self.args, self.model, self.train_dataset, self.recipe_record)
            checkpoint = start(self.args, resume_from_checkpoint, self.record)
            if self.recipe_record is not None or self.args.save_strategy != "no":
                model = self.accelerator.unwrap_model(self.model)
                check_saving(model, self._tokenizer, self.processing_class, self.args)
            self._guard.start()
            named = naming_lost_ranks(self.args.world_size, self.args.ddp_timeout)
            with signals.training(), named, without_notices():
                output = super().train(checkpoint, *args, **kwargs)
        except (SamplerLost, ServerLost, RolloutDrift) as error:
            self._save_and_explain(error)
            if signals.requested:
                raise interrupted(signals.requested, self.state, of_recipe=self.recipe_record is not None) from error
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self._out_of_memory(error) from error
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
        self._writer.go_back = self._way_back()
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
            steps = self.state.global_step - (0 if self._resumed is None else self._resumed.unknown)
            logs["train_loss"] = self._total_loss_scalar / max(steps, 0.001)  # transformers' depends on its version
        self.num_completions_to_print = 0  # not TRL's table, which reads names as markup and prints any length
        if self.log_completions and self.accelerator.is_main_process:
            name = f"completions_{self.state.global_step:05d}.parquet"
            remove_link(Path(self.args.output_dir or ".") / "completions" / name)  # TRL's writer would follow it
        super().log(logs, start_time)
        if self.log_completions and self.accelerator.is_main_process and self.args.num_completions_to_print != 0:
            show(completions_table(self._logs, self.state.global_step, self.args.num_completions_to_print))

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
        self._writer.go_back = self._way_back_from_evaluation()  # should it be left: the resumed run repeats it
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
        with temporarily(self, _evaluated=evaluated), random_streams_kept(), self._sampler_for_evaluation():
            output = super().evaluation_loop(dataloader, *passed)
        metrics, weights = self._metrics["eval"], self.reward_weights.double()
        figures = evaluated.figures(self.reward_func_names, weights, self.num_generations_eval, self.objective)
        metrics.update({name: [value] for name, value in figures.items()})
        self._figures.log(metrics, self.accelerator)
        output.metrics[f"{metric_key_prefix}_loss"] = metrics.pop("loss", [0.0])[-1]
        self._name_figures(metric_key_prefix)
        return output

    def _sampler_for_evaluation(self) -> AbstractContextManager[None]:
        """Return a context in which what samples beside the training is free, and vLLM gets the present weights."""
        if self.collector.inference_engine is not None:
            self._last_loaded_step = -1
        return self.collector.paused()

    @contextmanager
    def evaluating(self, group: int, settings: AbstractContextManager[None]) -> Iterator[None]:
        """Sample for an evaluation inside the context, in `settings`; what is the training's is restored after it."""
        training, metrics = self.model.training, dict(self._metrics["eval"])
        self.model_wrapped.eval()
        try:
            changed = temporarily(self, num_generations_eval=group)
            with changed, random_streams_kept(), self._sampler_for_evaluation(), settings:
                yield
        finally:
            self.model_wrapped.train(training)
            self._metrics["eval"].clear()
            self._metrics["eval"].update(metrics)

    def _name_figures(self, prefix: str) -> None:
        """Put the name of one of several evaluation sets before its figures, to which TRL adds `eval_` alone."""
        metrics, name = self._metrics["eval"], prefix.removeprefix("eval").strip("_")
        for figure in list(metrics) if name and prefix.startswith("eval_") else ():
            metrics[f"{name}_{figure}"] = metrics.pop(figure)

    @property
    def generation_number(self) -> int:
        """Number of the generation that trains, or begins to, from 0."""
        return self._step // self._uses

    def attempt_ids(self, count: int) -> list[AttemptId]:
        """Return the ids of this process's next `count` attempts, in training or evaluation."""
        if self.model.training:
            return self.attempts_of(self.generation_number, count)
        rows = self._eval_rows.next(self.accelerator.process_index * count, count)
        return numbered(self.args.seed, Source.EVALUATION, rows, self.num_generations_eval)

    def attempts_of(self, generation: int, count: int) -> list[AttemptId]:
        """Return the ids of this process's `count` attempts of a generation, which training numbers from 0."""
        first = (generation * self.accelerator.num_processes + self.accelerator.process_index) * count
        return numbered(self.args.seed, Source.TRAINING, range(first, first + count), self.num_generations)
