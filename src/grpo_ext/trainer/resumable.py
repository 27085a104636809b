"""ResumableTrainer: TRL's GRPOTrainer whose run survives being stopped at any moment."""

import json
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from trl import GRPOTrainer

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.errors import RolloutDrift, ServerLost
from grpo_ext.objective.objective import Objective
from grpo_ext.rollout.dynamic_sampling import DynamicSampler
from grpo_ext.trainer.advantages import GroupMeans
from grpo_ext.trainer.arguments import check_trained
from grpo_ext.trainer.checkpoints.choice import HISTORY_FILE, OBJECTIVE_FILE, SAMPLING_FILE


class ResumableTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` with checkpoints that hold all that the next step depends on."""

    args: GRPOExtConfig
    model: Any
    objective: Objective
    _buffered_inputs: Any
    _group_means: GroupMeans
    _sampler: DynamicSampler | None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; a second call starts from fresh rollouts.

        Raises:
            DataError: the stream ended before the first step.
        """
        self._buffered_inputs = None
        self._step = 0
        try:
            output = super().train(*args, **kwargs)
        except (ServerLost, RolloutDrift) as error:
            self._save_and_explain(error)
            raise
        check_trained(self.args, self.train_dataset, self.state.global_step)
        return output

    def save_objective(self, folder: str | Path) -> None:
        """Write the resolved loss beside a model."""
        if self.args.should_save:
            (Path(folder) / OBJECTIVE_FILE).write_text(json.dumps(self.objective.to_dict(), indent=2))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        self.save_objective(folder)
        if self.objective.remembered_batches and self.args.should_save:
            (folder / HISTORY_FILE).write_text(json.dumps(self._group_means.to_list()))
        if self._sampler is not None and self.args.should_save:
            (folder / SAMPLING_FILE).write_text(json.dumps({"drawn": self._sampler.prompts.drawn}))

    def _save_and_explain(self, error: Exception) -> None:
        """Before a run ends for want of a sound sampler, keep what it has learned."""
        folder = Path(self._get_output_dir(trial=None)) / f"checkpoint-{self.state.global_step}"
        saved = [folder.exists()]
        broadcast_object_list(saved, from_process=0)  # all processes save or none: one may be creating it already
        if self.state.global_step and not saved[0]:
            self._save_checkpoint(self.model, trial=None)
        kept = f"The run can be resumed from {folder}." if self.state.global_step else "No step had been made."
        error.args = (f"{error}\n{kept}",)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        path = Path(checkpoint or "") / HISTORY_FILE
        if checkpoint is not None and path.exists():
            self._group_means.load(json.loads(path.read_text()))
        path = Path(checkpoint or "") / SAMPLING_FILE
        if checkpoint is not None and self._sampler is not None and path.exists():
            self._sampler.prompts.drawn = json.loads(path.read_text())["drawn"]
