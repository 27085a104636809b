"""The doctor while a run trains: how far a step moves the weights, and a warning for each fault that the log names."""

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from grpo_ext.trainer.checkpoints.processes import local
from grpo_ext.trainer.diagnosis.recording import is_logged
from grpo_ext.trainer.diagnosis.rules import Doctor

logger = logging.getLogger(__name__)

TENSORS, VALUES = 8, 128
"""Of the weights that are looked at: tensors, spread evenly, and values in the middle of each."""


class Watching(TrainerCallback):
    """Measures the steps that are logged, and reads each log as `grpo-ext diagnose` does."""

    def __init__(self, metrics: Any) -> None:
        """`metrics` are the trainer's, by name."""
        self.metrics = metrics
        self.doctor: Doctor | None = Doctor()
        self._looked_at: list[tuple[Any, int]] = []
        self._before = torch.zeros(0)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Read what was logged up to the checkpoint, and told then; choose the weights that are looked at."""
        self.doctor = Doctor()
        for row in state.log_history if state.is_world_process_zero else ():
            self.doctor.read(row)
        self._looked_at = _chosen(model)
        self._before = _values(self._looked_at)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare the weights with those after the step before: an engine may have made the step in its backward."""
        logged = is_logged(state)
        if not self._before.numel() or not (logged or is_logged(state, ahead=1)):
            return
        before, self._before = self._before, _values(self._looked_at)
        if logged:
            change, was = torch.linalg.vector_norm(torch.stack([self._before - before, before]), dim=1).tolist()
            self.metrics["weights/change"].append(change / max(was, 1e-12))

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


def _chosen(model: Any) -> list[tuple[Any, int]]:
    """Parameters of which this process has a part that is trained, and where in it the values are."""
    trained = [p for p in model.parameters() if p.requires_grad and local(p).numel()]
    return [(p, local(p).numel() // 2) for p in trained[:: -(-len(trained) // TENSORS) or 1]]


def _values(looked_at: list[tuple[Any, int]]) -> Tensor:
    parts = [local(p).reshape(-1)[start : start + VALUES] for p, start in looked_at]
    return torch.cat([part.to(parts[0].device) for part in parts]).float() if parts else torch.zeros(0)
