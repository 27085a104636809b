"""Evaluate `eval_sets` while a run trains: before its first step, at each set's interval and after its last step."""

from pathlib import Path

from transformers import Trainer, TrainerCallback, TrainerState

from grpo_ext.data.eval_sets import EvalSet
from grpo_ext.data.rows import Row
from grpo_ext.errors import SamplerLost
from grpo_ext.evaluation.evaluate import digest, evaluate
from grpo_ext.evaluation.results import EVALUATION, logged_figures, result, table
from grpo_ext.tables import show
from grpo_ext.trainer.grpo_trainer import GRPOExtTrainer


class DuringTraining(TrainerCallback):
    """Evaluate sets while training; the run's weights are the same without it.

    A signal leaves an evaluation between two of its chunks. The resumed run completes it before its first step.

    Args:
        trainer: trains, and samples for the evaluation.
        sets: evaluation sets with their rows.
        workers: worker processes of the rewards.
    """

    def __init__(self, trainer: GRPOExtTrainer, sets: list[tuple[EvalSet, list[Row]]], workers: int | None) -> None:
        self.trainer, self.sets, self.workers = trainer, sets, workers

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Evaluate before the first step; where the run resumes, what was due after its last one and was left."""
        for chosen, rows in self.sets:
            if state.global_step == 0 or (_due(chosen, state) and not _is_logged(chosen, state)):
                self._evaluate(chosen, rows)

    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Evaluate the sets whose interval ends at this step, until a signal comes."""
        for chosen, rows in self.sets:
            if not _due(chosen, state) or self.trainer.ends_by_signal():
                continue
            try:
                self._evaluate(chosen, rows)
            except SamplerLost:
                if not self.trainer.ends_by_signal():
                    raise

    def on_train_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Evaluate after the last step, unless the run was stopped before it."""
        for chosen, rows in self.sets if state.global_step >= state.max_steps else ():
            self._evaluate(chosen, rows)

    def _evaluate(self, chosen: EvalSet, rows: list[Row]) -> None:
        trainer, step = self.trainer, self.trainer.state.global_step
        folder = Path(str(trainer.args.output_dir)) / EVALUATION / chosen.name
        model = trainer.model.config._name_or_path
        identity = {"model": model, "step": step, "set": chosen, "run": digest(trainer.record)}
        kept = folder / f"step_{step}_samples.jsonl"
        samples = evaluate(trainer, chosen, rows, kept=kept, identity=identity, workers=self.workers)
        evaluation = result(chosen, samples, model=model, step=step)
        if trainer.accelerator.is_main_process:
            evaluation.write(folder / f"step_{step}.json")
            show(table([evaluation]))
        due = trainer.control.should_log  # the step's own log; any log resets this flag
        Trainer.log(trainer, logged_figures(evaluation))
        trainer.control.should_log = due


def _due(chosen: EvalSet, state: TrainerState) -> bool:
    """Return whether the interval of a set ends at this step, which is not the last one."""
    return chosen.every is not None and state.global_step % chosen.every == 0 and state.global_step < state.max_steps


def _is_logged(chosen: EvalSet, state: TrainerState) -> bool:
    rows = (row for row in state.log_history if row["step"] == state.global_step)
    return any(name.startswith(f"eval_{chosen.name}/") for row in rows for name in row)
