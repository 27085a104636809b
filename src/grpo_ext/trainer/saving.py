"""SavingTrainer: TRL's GRPOTrainer whose checkpoints and final model are complete or absent."""

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.objective.objective import Objective
from grpo_ext.rollout.vllm.lazy_import import GRPOTrainer
from grpo_ext.trainer import card
from grpo_ext.trainer.checkpoints import identity, processes, state, writing
from grpo_ext.trainer.checkpoints.choice import OBJECTIVE_FILE
from grpo_ext.trainer.checkpoints.finish import FINISHED_FILE
from grpo_ext.trainer.checkpoints.manifest import MANIFEST
from grpo_ext.trainer.checkpoints.processes import agreed
from grpo_ext.trainer.findings import check_weights
from grpo_ext.trainer.reference import InitialWeights


class SavingTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` that writes a checkpoint aside and moves it into place when all processes have written it.

    Attributes:
        recipe_record: what defines the run, where a recipe does; else the trainer's own arguments do.
    """

    args: GRPOExtConfig
    model: Any
    objective: Objective
    _advantage_monitor: Any
    _drift: Any
    _generation: Any
    _group_means: Any
    _metrics: Any
    collector: Any
    num_iterations: Any
    recipe_record: Mapping[str, Any] | None = None
    _record: Mapping[str, Any] | None = None
    _epoch_began = (0, 0)
    """The current epoch, and the micro-batches of training before it."""
    _initial: InitialWeights | None = None
    """Those of an adapter, which are its reference."""
    _first_logps: Tensor | None = None
    """Log-probabilities of the reference at the start."""
    _reference_checked = True
    """False once memory was too little for the check."""
    _leaving = False
    """True while a run is ended early: its checkpoint must hold what a resume needs, also with `save_only_model`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._writer = writing.Writer(saves=self.args.should_save)

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, writing.SAVING) if self._writer.is_aside else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint, complete or not at all.

        Raises:
            SaveError: it could not be written; on all processes.
            NonFiniteError: a weight has overflowed; on all processes.
            ConfigError: the reference has moved.
        """
        check_weights(self.model, self.state)
        self.check_reference()
        final = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        folder, whole = final.parent / writing.SAVING / final.name, self._leaving or not self.args.save_only_model
        with self._writer.reporting(final, final.parent), self._writer.aside():
            self._writer.attempt(super()._save_checkpoint, model, trial)
            if whole and self.args.save_only_model:
                self._save_optimizer_and_scheduler(str(folder))
                self._save_scaler(str(folder))
                self._save_rng_state(str(folder))
            self._writer.attempt(self._save_own, folder)
        if str(self.state.best_model_checkpoint) == str(folder):
            self.state.best_model_checkpoint = str(final)
        with self._writer.reporting(final, final.parent):
            facts = {"step": self.state.global_step, "weights_alone": not whole}
            self._writer.attempt_shared(writing.settle, folder, final, self.state, facts, self.args.save_total_limit)
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(final))
        if self.args.push_to_hub_revision and self.is_world_process_zero():
            card.push_revision(self, final)

    def check_reference(self) -> None:
        """Compare the reference with the policy before training, later with itself at the start."""

    def _save_own(self, folder: Path) -> None:
        """Write the files of a checkpoint that are not TRL's."""
        self.save_objective(folder)
        if self.args.should_save:
            identity.write_record(folder, self._record or {})
            self._write_card(folder)
            if self._initial is not None:
                self._initial.write(folder)
        epoch, began = self._epoch_began
        state.write(self, folder, (epoch, self._step - began))

    def _save_and_explain(self, error: Exception) -> None:
        """Save a checkpoint before a run ends because it cannot sample, and name it in the error."""
        self._leaving = True
        folder = Path(self._get_output_dir(trial=None)) / f"checkpoint-{self.state.global_step}"
        saved = agreed((folder / MANIFEST).exists)  # all processes save or none: one may be creating it already
        if self.state.global_step and not saved:
            self._save_checkpoint(self.model, trial=None)
        kept = f"The run can be resumed from {folder}." if self.state.global_step else "No step had been made."
        error.args = (f"{error}\n{kept}",)

    def save_final(self, output_dir: str | Path) -> None:
        """Save the final model, completely or not at all.

        Raises:
            SaveError: it could not be written; on all processes.
            NonFiniteError: a weight has overflowed; on all processes.
        """
        check_weights(self.model, self.state)
        final = Path(output_dir)
        folder = final / writing.SAVING / "model"
        with self._writer.reporting(final, final), self._writer.aside(), processes.gathered(self):
            self._writer.attempt(self.save_model, str(folder), _internal_call=True)  # without a push
            self._writer.attempt(self.save_objective, folder)
            self._writer.attempt(self._write_card, folder)
        with self._writer.reporting(final, final):
            self._writer.attempt_shared(self._writer.publish, folder, final)

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

    def save_objective(self, folder: str | Path) -> None:
        """Write the resolved loss beside a model."""
        if self.args.should_save:
            (Path(folder) / OBJECTIVE_FILE).write_text(json.dumps(self.objective.to_dict(), indent=2))

    def create_model_card(self, *args: object, **kwargs: Any) -> None:
        """Write README.md into `output_dir`; takes TRL's keywords."""
        self._writer.attempt(self._write_card, Path(str(self.args.output_dir)), **kwargs)

    def _write_card(self, folder: Path, **kwargs: Any) -> None:
        if self.is_world_process_zero():
            card.write(self, folder, self._record or self._identity(), **kwargs)

    def _identity(self) -> dict[str, Any]:
        return identity.of_run(self.args, self.model, self.train_dataset, self.recipe_record)

    # Hooks of transformers that write. None may raise on one process only.

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

    def init_hf_repo(self, token: str | None = None) -> None:
        """Create the repository and the branch that the run pushes to.

        Raises:
            ConfigError: the hub cannot be reached, or refuses.
        """
        if self.is_world_process_zero():
            card.make_repository(self.args)
        super().init_hf_repo(token)
        if self.is_world_process_zero():
            card.make_branch(self, self.args.hub_revision)
