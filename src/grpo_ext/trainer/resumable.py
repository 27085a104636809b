"""ResumableTrainer: TRL's GRPOTrainer whose run survives being stopped at any moment."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from accelerate.utils import broadcast_object_list
from datasets import IterableDataset
from trl import GRPOTrainer

from grpo_ext.config.engines import check_started
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.errors import RolloutDrift, ServerLost
from grpo_ext.objective.aggregation import StepTotals
from grpo_ext.objective.objective import Objective
from grpo_ext.rollout.dynamic_sampling import DynamicSampler
from grpo_ext.rollout.vllm.drift_check import DriftCheck
from grpo_ext.trainer.advantages import GroupMeans
from grpo_ext.trainer.arguments import check_trained
from grpo_ext.trainer.checkpoints import state
from grpo_ext.trainer.checkpoints.choice import OBJECTIVE_FILE
from grpo_ext.trainer.checkpoints.whole_model import check_saved, gathered
from grpo_ext.trainer.generation import Generation


class ResumableTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` with checkpoints that hold all that the next step depends on."""

    args: GRPOExtConfig
    model: Any
    objective: Objective
    num_iterations: int
    ref_model: Any
    _buffered_inputs: Any
    _drift: DriftCheck | None
    _generation: Generation
    _group_means: GroupMeans
    _sampler: DynamicSampler | None

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; a second call starts from fresh rollouts, and a resumed one evaluates no second time at its start.

        Raises:
            ConfigError: the engine that the launch asks for is not there.
            DataError: the stream ended before the first step.
        """
        check_started(self.accelerator.distributed_type.value, self.ref_model is not None)
        self._buffered_inputs, self._generation = None, Generation()
        self._step = 0
        self._epoch_began = (0, 0)
        starts = self.args.eval_on_start and not resume_from_checkpoint
        try:
            with patch.object(self.args, "eval_on_start", starts):
                output = super().train(resume_from_checkpoint, *args, **kwargs)
        except (ServerLost, RolloutDrift) as error:
            self._save_and_explain(error)
            raise
        check_trained(self.args, self.train_dataset, self.state.global_step)
        return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As transformers', and by every engine a model that loads; in a checkpoint its shards are enough.

        Raises:
            NotSaved: no weights were written.
        """
        if _internal_call:
            super().save_model(output_dir, _internal_call)
            return
        with gathered(self):
            super().save_model(output_dir)
        if self.args.should_save:
            check_saved(Path(output_dir or str(self.args.output_dir)))

    # Where a run goes on.

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self._train_sampler = super()._get_train_sampler(*args, **kwargs)
        return self._train_sampler

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """Epochs that are over, and batches taken of the one that is not."""
        place = super()._init_training_state(max_steps, steps_per_epoch, epochs, checkpoint, trial)
        self._resumed = None
        if checkpoint is None:
            return place
        self.state.compute_steps(self.args, max_steps)  # how often to log, save and evaluate: the recipe's, not its
        self._resumed = state.read(Path(checkpoint), self)
        self._step = self.state.global_step * self.args.gradient_accumulation_steps
        if self._resumed is not None and isinstance(self.train_dataset, IterableDataset):
            return tuple(self._resumed["place"])  # a stream may have ended, and begun anew, at any step
        for _ in range(place[0]):
            next(iter(self._train_sampler), None)  # draws the order of an epoch that is over
        return place

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:  # resumed after its last step
            self.control.should_training_stop = True
            return
        epoch, checkpoint, taken = kwargs["epoch"], kwargs["resume_from_checkpoint"], 0
        if checkpoint is not None and epoch == kwargs["epochs_trained"]:
            taken = kwargs["steps_trained_in_current_epoch"]
            if self._resumed is not None:
                state.restore(self, self._resumed, Path(checkpoint))
        self._epoch_began = (epoch, self._step - taken)
        super()._run_epoch(*args, **kwargs)

    def _continue(self, micro_batches: list[dict[str, Any]], totals: list[StepTotals]) -> None:
        """Train on a generation from where it was left."""
        self._generation = Generation(micro_batches, totals)
        self._buffered_inputs = self._generation.micro_batches

    # What a checkpoint holds.

    def save_objective(self, folder: str | Path) -> None:
        """Write the resolved loss beside a model."""
        if self.args.should_save:
            (Path(folder) / OBJECTIVE_FILE).write_text(json.dumps(self.objective.to_dict(), indent=2))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        self.save_objective(folder)
        epoch, began = self._epoch_began
        state.write(self, folder, (epoch, self._step - began))

    def _save_and_explain(self, error: Exception) -> None:
        """Before a run ends for want of a sound sampler, keep what it has learned."""
        folder = Path(self._get_output_dir(trial=None)) / f"checkpoint-{self.state.global_step}"
        saved = [folder.exists()]
        broadcast_object_list(saved, from_process=0)  # all processes save or none: one may be creating it already
        if self.state.global_step and not saved[0]:
            self._save_checkpoint(self.model, trial=None)
        kept = f"The run can be resumed from {folder}." if self.state.global_step else "No step had been made."
        error.args = (f"{error}\n{kept}",)
