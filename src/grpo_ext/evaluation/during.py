"""`eval_sets` while a run trains: at its beginning, at each set's cadence and at its end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import Trainer, TrainerCallback

from grpo_ext.data.eval_sets import EvalSet
from grpo_ext.evaluation.evaluate import evaluate
from grpo_ext.evaluation.results import FOLDER, flat, result, table


class DuringTraining(TrainerCallback):
    """Evaluates the sets; with or without it the run's weights are the same."""

    def __init__(self, trainer: Any, sets: list[tuple[EvalSet, list[dict[str, Any]]]], workers: int | None) -> None:
        """`sets` with their rows."""
        self.trainer, self.sets, self.workers = trainer, sets, workers

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first step; not again where a run goes on."""
        if state.global_step == 0:
            self._evaluate(lambda chosen: True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Where a set's cadence says so."""
        if state.global_step < state.max_steps:
            self._evaluate(lambda chosen: chosen.every is not None and state.global_step % chosen.every == 0)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the last step, not where the run was stopped before it."""
        if state.global_step >= state.max_steps:
            self._evaluate(lambda chosen: True)

    def _evaluate(self, due: Callable[[EvalSet], bool]) -> None:
        for chosen, rows in self.sets:
            if due(chosen):
                self._evaluate_set(chosen, rows)

    def _evaluate_set(self, chosen: EvalSet, rows: list[dict[str, Any]]) -> None:
        trainer, step = self.trainer, self.trainer.state.global_step
        folder = Path(trainer.args.output_dir) / FOLDER / chosen.name
        model = trainer.model.config._name_or_path
        identity = {"model": model, "step": step, "set": chosen}
        kept = folder / f"step_{step}_samples.jsonl"
        samples = evaluate(trainer, chosen, rows, kept=kept, identity=identity, workers=self.workers)
        found = result(chosen, samples, model=model, step=step)
        if trainer.accelerator.is_main_process:
            found.write(folder / f"step_{step}.json")
            Console().print(table([found]))
        due = trainer.control.should_log  # the step's own log, which transformers takes for done by any
        Trainer.log(trainer, flat(found))
        trainer.control.should_log = due
