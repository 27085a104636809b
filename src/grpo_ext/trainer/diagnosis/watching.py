"""The doctor while a run trains: how far a step moves the weights, and a warning for each fault that the log names."""

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from grpo_ext.trainer.checkpoints.shards import local
from grpo_ext.trainer.diagnosis.recording import is_logged
from grpo_ext.trainer.diagnosis.rules import Doctor

logger = logging.getLogger(__name__)

TENSORS, VALUES = 32, 32
"""Of the weights that are looked at: tensors, spread evenly, and values in the middle of each."""


class Watching(TrainerCallback):
    """Measures the steps that are logged, and reads each log as `grpo-ext diagnose` does."""

    def __init__(self, metrics: Any) -> None:
        """`metrics` are the trainer's, by name."""
        self.metrics = metrics
        self.doctor: Doctor | None = Doctor()
        self._before: Tensor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read what was logged up to the checkpoint; what it tells was told then."""
        self.doctor = Doctor()
        for row in state.log_history if state.is_world_process_zero else ():
            self.doctor.read(row)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Keep some weights."""
        self._before = _some(model) if is_logged(state) else None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Compare them."""
        if self._before is not None and self._before.numel():
            change = (_some(model) - self._before).norm() / self._before.norm().clamp(min=1e-12)
            self.metrics["weights/change"].append(change.item())

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Warn of what this log tells for the first time; a rule that fails costs the warnings, not the run."""
        if not state.is_world_process_zero or not state.log_history or self.doctor is None:
            return
        try:
            for finding in self.doctor.read(state.log_history[-1]):
                logger.warning(str(finding))
        except Exception:
            self.doctor = None
            logger.warning("the diagnosis failed, and is left out from here on; please report it", exc_info=True)


def _some(model: Any) -> Tensor:
    trained = [p for p in model.parameters() if p.requires_grad and local(p).numel()]
    chosen = [local(p.detach()).reshape(-1) for p in trained[:: -(-len(trained) // TENSORS) or 1]]
    parts = [values[len(values) // 2 :][:VALUES].float() for values in chosen]
    return torch.cat(parts) if parts else torch.zeros(0)
