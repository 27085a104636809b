"""Record the weights before and after each optimizer step, and the rows of the step."""

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import TrainerCallback

from grpo_ext.trainer.checkpoints.processes import whole

Weights = dict[str, Tensor]
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "module.")
"""Prefixes that engines add to the names of parameters."""


def trained_weights(model: nn.Module) -> Weights:
    """Return all trained parameters, gathered if an engine has split them; call it on every process."""
    return {plain_name(name): whole(p).cpu() for name, p in model.named_parameters() if p.requires_grad}


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of its engine."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class Watched:
    """Mixin for a GRPO trainer, TRL's or ours, that records its steps.

    Attributes:
        weights: before each optimizer step, and after the last.
        steps: micro-batches of each optimizer step, of all processes: generation and rows.
    """

    accelerator: Any
    model: Any
    state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.weights: list[Weights] = []
        self.steps: list[list[tuple[int, list[int]]]] = []
        super().__init__(*args, **kwargs)
        self.add_callback(_Watcher(self))  # type: ignore[attr-defined]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        count = len(output["completion_ids"])
        first = self.accelerator.process_index * count
        output["watched_row"] = torch.arange(first, first + count)
        output["watched_generation"] = torch.full((count,), self.state.global_step)
        return output

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        if self.model.training:
            self.seen.append((int(inputs["watched_generation"][0]), inputs["watched_row"].tolist()))
        return inputs

    def record_weights(self) -> None:
        """Record the weights between two optimizer steps, and forget the micro-batches before."""
        self.weights.append(trained_weights(self.accelerator.unwrap_model(self.model)))
        self.seen: list[tuple[int, list[int]]] = []

    def save(self, path: Path) -> None:
        """Write the recorded steps on the first process."""
        if self.accelerator.is_main_process:
            torch.save({"weights": self.weights, "steps": self.steps}, path)


class _Watcher(TrainerCallback):
    def __init__(self, trainer: Watched) -> None:
        self.trainer = trainer

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        if not self.trainer.weights:
            self.trainer.record_weights()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        seen = self.trainer.seen
        several = self.trainer.accelerator.num_processes > 1
        self.trainer.steps.append(gather_object(seen) if several else seen)
        self.trainer.record_weights()
