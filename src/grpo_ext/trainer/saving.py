"""Checkpoints and final models that are complete or absent: what a trainer's hooks of saving do."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from traceback import clear_frames
from typing import Any

import torch

from grpo_ext.bounded import remove_link, write_text
from grpo_ext.errors import OutOfMemory
from grpo_ext.rollout.random_streams import random_state
from grpo_ext.trainer import card, in_flight
from grpo_ext.trainer.checkpoints import identity, processes, state, writing
from grpo_ext.trainer.checkpoints.choice import OBJECTIVE_FILE
from grpo_ext.trainer.checkpoints.finish import CARD
from grpo_ext.trainer.checkpoints.manifest import MANIFEST
from grpo_ext.trainer.checkpoints.processes import agreed
from grpo_ext.trainer.findings import check_weights


def after_step(trainer: Any) -> Callable[[], None]:
    """Return a function that brings the trainer back to this whole step, from within the next or an evaluation."""
    found, restore, run = state.of(trainer), random_state(), trainer.state
    epoch_began, seen, logged = trainer._epoch_began, run.num_input_tokens_seen, len(run.log_history)

    def go_back() -> None:
        restore()
        state.go_back(trainer, found)
        trainer._epoch_began, run.num_input_tokens_seen = epoch_began, seen
        del run.log_history[logged:]

    return go_back


def before_evaluation(trainer: Any) -> Callable[[], None]:
    """Return a function that brings the trainer back to this moment, from within an evaluation after a whole step."""
    to_step, table = after_step(trainer), state.table_of(trainer._logs)
    callbacks = [(callback, dict(vars(callback))) for callback in state.stateful(trainer.callback_handler.callbacks)]

    def go_back() -> None:
        to_step()
        state.fill_table(trainer._logs, table)
        for callback, attributes in callbacks:
            vars(callback).update(attributes)

    return go_back


def save_checkpoint(trainer: Any, trial: Any, stock: Callable[[], None]) -> None:
    """Write a checkpoint aside and move it into place when all processes have written it.

    Args:
        trainer: the trainer.
        trial: of a search of hyperparameters, which has a folder of its own.
        stock: TRL's and transformers' part.

    Raises:
        SaveError: it could not be written; on all processes.
        NonFiniteError: a weight has overflowed; on all processes.
        ConfigError: the reference has moved.
    """
    args, run, writer = trainer.args, trainer.state, trainer._writer
    check_weights(trainer.model, run)
    trainer.check_reference()
    final = Path(trainer._get_output_dir(trial)) / f"checkpoint-{run.global_step}"
    folder, whole = final.parent / writing.SAVING / final.name, trainer._ends_early or not args.save_only_model
    with writer.reporting(final, final.parent), writer.aside():
        writer.attempt(stock)
        if whole and args.save_only_model:
            trainer._save_optimizer_and_scheduler(str(folder))
            trainer._save_scaler(str(folder))
            trainer._save_rng_state(str(folder))
        writer.attempt(_save_own, trainer, folder)
    if str(run.best_model_checkpoint) == str(folder):
        run.best_model_checkpoint = str(final)
    with writer.reporting(final, final.parent):
        facts = {"step": run.global_step, "weights_alone": not whole}
        writer.attempt_shared(writing.settle, folder, final, run, facts, args.save_total_limit)
    if args.push_to_hub:
        trainer._push_from_checkpoint(str(final))


def _save_own(trainer: Any, folder: Path) -> None:
    """Write the files of a checkpoint that are not TRL's."""
    save_objective(trainer, folder)
    if trainer.args.should_save:
        identity.write_record(folder, trainer._record or {})
        if trainer._initial is not None:
            trainer._initial.write(folder)
    epoch, began = trainer._epoch_began
    state.write(trainer, folder, (epoch, trainer._step - began))
    if (ahead := trainer.collector.ahead) is not None:
        replaces = trainer.collector.dynamic is not None and trainer.args.should_save
        made = ahead.in_flight(waits=not trainer._ends_early, replaces=replaces)
        in_flight.write(folder, trainer.accelerator.process_index, made)


def save_and_explain(trainer: Any, error: Exception) -> None:
    """Save a checkpoint before a run ends because it cannot sample, and name it in the error."""
    trainer._ends_early, step, resumed = True, trainer.state.global_step, trainer._resumed
    folder = Path(trainer._get_output_dir(None)) / f"checkpoint-{step}"
    saved = agreed((folder / MANIFEST).exists)  # all processes save or none: one may be creating it already
    if resumed is not None and resumed.pending:  # its state is not restored yet
        folder = resumed.checkpoint
    elif step and not saved:
        trainer._writer.go_back()
        trainer._save_checkpoint(trainer.model, trial=None)
    kept = f"The run can be resumed from {folder}." if step else "No step had been made."
    error.args = (f"{error}\n{kept}",)


def out_of_memory(trainer: Any, error: Exception) -> OutOfMemory:
    """Return the error that ends a run which has too little memory.

    A checkpoint of the last whole step is saved by a run of one process, unless the optimizer was changing weights.
    """
    step, steps = trainer.state.global_step, trainer.state.max_steps
    found = OutOfMemory(f"After step {step} of {steps}", error)
    if trainer.accelerator.num_processes > 1 or trainer._guard.updating:
        return found
    clear_frames(error.__traceback__)  # what the step has computed
    trainer.model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    try:
        save_and_explain(trainer, found)
    except Exception as trouble:
        found.args = (f"{found}\nNo checkpoint could be saved: {trouble}",)
    return found


def save_final(trainer: Any, final: Path) -> None:
    """Save the final model, completely or not at all; see `Lifecycle.save_final`."""
    check_weights(trainer.model, trainer.state)
    folder, writer = final / writing.SAVING / "model", trainer._writer
    with writer.reporting(final, final), writer.aside(), processes.gathered(trainer):
        writer.attempt(trainer.save_model, str(folder), _internal_call=True)  # without a push
        writer.attempt(save_objective, trainer, folder)
    with writer.reporting(final, final):
        writer.attempt_shared(writer.publish, folder, final)
        trainer.create_model_card()


def save_objective(trainer: Any, folder: Path) -> None:
    """Write the resolved loss beside a model."""
    if trainer.args.should_save:
        write_text(folder / OBJECTIVE_FILE, json.dumps(trainer.objective.to_dict(), indent=2))


def write_card(trainer: Any, stock: Callable[[], None]) -> None:
    """Write TRL's model card by `stock`, and add the section with the loss and figures of the run."""
    if trainer.is_world_process_zero():
        path, run = Path(trainer.args.output_dir) / CARD, trainer.state
        remove_link(path)  # TRL would write to what it leads to
        stock()
        section = card.results(trainer.objective, (run.global_step, run.max_steps), run.log_history)
        write_text(path, path.read_text(encoding="utf-8") + section)


def run_identity(trainer: Any) -> dict[str, Any]:
    """Return what defines the run: the recipe's record where there is one, else the arguments."""
    return identity.of_run(trainer.args, trainer.model, trainer.train_dataset, trainer.recipe_record)
