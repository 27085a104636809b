"""ResumableTrainer: TRL's GRPOTrainer whose run survives being stopped at any moment."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset
from trl.data_utils import is_conversational

from grpo_ext.config.engines import check_started
from grpo_ext.errors import RolloutDrift, ServerLost
from grpo_ext.objective.aggregation import StepTotals
from grpo_ext.objective.objective import Objective
from grpo_ext.rollout.dynamic_sampling import DynamicSampler
from grpo_ext.rollout.vllm.drift_check import DriftCheck
from grpo_ext.trainer import hub
from grpo_ext.trainer.batches import Generation
from grpo_ext.trainer.checkpoints import identity, state
from grpo_ext.trainer.checkpoints.choice import OBJECTIVE_FILE
from grpo_ext.trainer.checkpoints.finish import CARD
from grpo_ext.trainer.checkpoints.manifest import MANIFEST
from grpo_ext.trainer.checkpoints.starting import start
from grpo_ext.trainer.credit import GroupMeans
from grpo_ext.trainer.guarded import GuardedTrainer
from grpo_ext.trainer.model_card import model_card
from grpo_ext.trainer.setup import check_trained
from grpo_ext.trainer.silence import Silence


class ResumableTrainer(GuardedTrainer):
    """`trl.GRPOTrainer` with checkpoints that hold all that the next step depends on."""

    model: Any
    objective: Objective
    num_iterations: int
    ref_model: Any
    _buffered_inputs: Any
    _drift: DriftCheck | None
    _generation: Generation
    _group_means: GroupMeans
    _sampler: DynamicSampler | None
    _silence: Silence
    _unrestored: str | None = None
    """The checkpoint of a resumed run, until its sums and its open generation have been restored."""
    recipe_record: Mapping[str, Any] | None = None
    """What defines the run, where a recipe does; else the trainer's own arguments do."""

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; a second call starts from fresh rollouts, and a resumed one evaluates no second time at its start.

        Raises:
            ConfigError: the launch's engine is not there, or the checkpoint is damaged or of another run.
            DataError: the stream ended before the first step.
        """
        check_started(self.accelerator.distributed_type.value, self.ref_model is not None)
        self._buffered_inputs, self._generation = None, Generation()
        self._step = 0
        self._epoch_began = (0, 0)
        self._record = self._identity()
        checkpoint, self._branch = start(self.args, resume_from_checkpoint, self._record)
        starts = self.args.eval_on_start and not checkpoint
        try:
            with patch.object(self.args, "eval_on_start", starts):
                output = super().train(checkpoint, *args, **kwargs)
        except (ServerLost, RolloutDrift) as error:
            self._save_and_explain(error)
            raise
        check_trained(self.args, self.train_dataset, self.state.global_step)
        return output

    # Where a run goes on.

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self._train_sampler = super()._get_train_sampler(*args, **kwargs)
        return self._train_sampler

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """Epochs that are over, and batches taken of the one that is not."""
        place = super()._init_training_state(max_steps, steps_per_epoch, epochs, checkpoint, trial)
        self._resumed, self._unrestored = None, checkpoint
        if checkpoint is None:
            return place
        self.state.compute_steps(self.args, max_steps)  # how often to log, save and evaluate: the recipe's, not its
        state.restore_callbacks(self)
        state.find_best_checkpoint(self.state, Path(checkpoint))
        self._resumed = state.read(Path(checkpoint), self)
        self._step = self.state.global_step * self.args.gradient_accumulation_steps
        if self._resumed is not None and isinstance(self.train_dataset, IterableDataset):
            return tuple(self._resumed["place"])  # a stream may have ended, and begun anew, at any step
        for _ in range(place[0]):
            next(iter(self._train_sampler), None)  # draws the order of an epoch that is over
        return place

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """As transformers', which leaves the adapter that is trained as it is where there is another beside it."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        state.load_default_adapter(model or self.model, Path(resume_from_checkpoint))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn of missing weights, but not of tied ones, which a checkpoint stores once."""
        tied = getattr(self.accelerator.unwrap_model(self.model), "all_tied_weights_keys", None) or {}
        load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """And then, from the same random numbers, what was due after the checkpoint and before the next step."""
        super()._load_rng_state(checkpoint)
        if state.evaluation_due(self.args, self.state, *self._resumed_at):
            self.control.should_evaluate = True
            self.control.should_save = self.args.load_best_model_at_end  # else the best one would not be known
            epoch = self._epoch_began[0]
            self._maybe_log_save_evaluate(self._tr_loss, None, self.model, None, epoch, None, time.time())

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        checkpoint, taken = self._unrestored, 0
        self._resumed_at = self.state.max_steps, kwargs["steps_trained_in_current_epoch"] == 0
        if checkpoint is not None:
            taken = kwargs["steps_trained_in_current_epoch"]
            self._restore(checkpoint)
        self._epoch_began = (kwargs["epoch"], self._step - taken)
        if self.state.global_step >= self.state.max_steps:  # resumed after its last step
            if checkpoint is not None:
                self._load_rng_state(checkpoint)
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _restore(self, checkpoint: str) -> None:
        self._unrestored = None
        if self._resumed is not None:
            state.restore(self, self._resumed, Path(checkpoint))

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers', also where a run resumes after the last step of its last epoch, so that none is run."""
        if (checkpoint := self._unrestored) is not None:
            epoch, taken = self._resumed["place"] if self._resumed else (0, 0)
            self._resumed_at, self._epoch_began = (self.state.max_steps, True), (epoch, self._step - taken)
            self._restore(checkpoint)
            self._load_rng_state(checkpoint)
        return super()._finalize_training(*args, **kwargs)

    def _continue(self, micro_batches: list[dict[str, Any]], totals: list[StepTotals]) -> None:
        """Train on a generation from where it was left."""
        self._generation = Generation(micro_batches, totals)
        self._buffered_inputs = self._generation.micro_batches

    # What a checkpoint holds.

    def save_objective(self, folder: str | Path) -> None:
        """Write the resolved loss beside a model."""
        if self.args.should_save:
            (Path(folder) / OBJECTIVE_FILE).write_text(json.dumps(self.objective.to_dict(), indent=2))

    def _identity(self) -> dict[str, Any]:
        """What defines the run, its data included."""
        name = getattr(getattr(self.model, "config", None), "_name_or_path", None) or None
        record = self.recipe_record or identity.record_of(self.args, model=name)
        data = self.train_dataset
        chat = is_conversational(data[0]) if isinstance(data, Dataset) and len(data) else None
        return {**record, "data": identity.data_digest(data), "conversational": chat}

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write README.md into `output_dir`; TRL's keywords hold."""
        self._contained(self._write_card, Path(str(self.args.output_dir)), **kwargs)

    def _write_card(
        self, folder: Path, model_name: str | None = None, tags: Any = None, dataset_name: Any = None, **_: Any
    ) -> None:
        if not self.is_world_process_zero():
            return
        adapters, address = getattr(self.model, "peft_config", {}), str(self.hub_model_id or self.args.output_dir)
        record = getattr(self, "_record", None) or self._identity()
        card = model_card(
            model_name or Path(address).name,
            address=address,
            record={"dataset_name": dataset_name, **record},
            objective=self.objective,
            rewards=dict(zip(self.reward_func_names, self.reward_weights.tolist(), strict=True)),
            log=self.state.log_history,
            adapter_of=adapters["default"].base_model_name_or_path if "default" in adapters else None,
            steps=(self.state.global_step, self.state.max_steps),
            tags=[*self._tag_names, *([tags] if isinstance(tags, str) else tags or ())],
            tracked=hub.tracked(),
        )
        (folder / CARD).write_text(card, encoding="utf-8")

    def _save_beside_model(self, folder: Path) -> None:
        self.save_objective(folder)
        self._write_card(folder)

    def _save_own(self, folder: Path) -> None:
        self.save_objective(folder)
        if self.args.should_save:
            identity.write_record(folder, self._record)
            self._write_card(folder)
        epoch, began = self._epoch_began
        state.write(self, folder, (epoch, self._step - began))

    def _save_and_explain(self, error: Exception) -> None:
        """Before a run ends for want of a sound sampler, keep what it has learned."""
        folder = Path(self._get_output_dir(trial=None)) / f"checkpoint-{self.state.global_step}"
        saved = [(folder / MANIFEST).exists()]
        broadcast_object_list(saved, from_process=0)  # all processes save or none: one may be creating it already
        if self.state.global_step and not saved[0]:
            self._save_checkpoint(self.model, trial=None)
        kept = f"The run can be resumed from {folder}." if self.state.global_step else "No step had been made."
        error.args = (f"{error}\n{kept}",)
