"""Diagnosis during training: how far a step moves the weights, and a warning for each fault that the log shows."""

import logging
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers import TrainingArguments as Arguments

from grpo_ext.trainer.checkpoints.processes import local
from grpo_ext.trainer.diagnosis.recording import is_logged
from grpo_ext.trainer.diagnosis.rules import Doctor

logger = logging.getLogger(__name__)

Place = tuple[Tensor, int]
TENSORS, VALUES = 8, 128
"""Sampled weights: evenly spaced tensors, and values in the middle of each."""


class Watching(TrainerCallback):
    """Measures the logged steps, and reads each log like `grpo-ext diagnose`.

    Args:
        metrics: the trainer's metrics of training.
    """

    def __init__(self, metrics: MutableMapping[str, list[float]]) -> None:
        self.metrics = metrics
        self.doctor: Doctor | None = Doctor()
        self._sampled: list[Place] = []
        self._before = torch.zeros(0)

    def on_train_begin(
        self, args: Arguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: object
    ) -> None:
        """Read the log history of the checkpoint, and choose the weights to sample."""
        self.doctor = Doctor()
        for row in state.log_history if state.is_world_process_zero else ():
            self.doctor.read(row)
        self._sampled = _chosen(model)
        self._before = _values(self._sampled)

    def on_optimizer_step(self, args: Arguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Compare the weights with those after the previous step: an engine may make the step in its backward."""
        logged = is_logged(state)
        if not self._before.numel() or not (logged or is_logged(state, ahead=1)):
            return
        before, self._before = self._before, _values(self._sampled)
        if logged:
            change, was = torch.linalg.vector_norm(torch.stack([self._before - before, before]), dim=1).tolist()
            self.metrics["weights/change"].append(change / max(was, 1e-12))

    def on_log(self, args: Arguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Warn of faults that this log is the first to show; an error in a rule ends the warnings, not the run."""
        if not state.is_world_process_zero or not state.log_history or self.doctor is None:
            return
        try:
            for finding in self.doctor.read(state.log_history[-1]):
                logger.warning(str(finding))
        except Exception:
            self.doctor = None
            logger.warning("the diagnosis failed and is off from here on; please report it", exc_info=True)


def _chosen(model: nn.Module) -> list[Place]:
    """Return trained parameters with a part on this process, and the place of the sampled values in that part."""
    trained = [p for p in model.parameters() if p.requires_grad and local(p).numel()]
    return [(p, local(p).numel() // 2) for p in trained[:: -(-len(trained) // TENSORS) or 1]]


def _values(sampled: list[Place]) -> Tensor:
    parts = [local(p).reshape(-1)[start : start + VALUES] for p, start in sampled]
    return torch.cat([part.to(parts[0].device) for part in parts]).float() if parts else torch.zeros(0)
