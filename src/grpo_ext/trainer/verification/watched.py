"""A trainer that is watched: the weights around each optimizer step, and the rows that made it."""

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

Weights = dict[str, Tensor]
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "module.")
"""What engines put into the names of parameters."""


def trained_weights(model: Any) -> Weights:
    """All parameters that are trained, whole, whatever engine has taken them apart; every process has to ask."""
    return {plain_name(name): _whole(p).cpu() for name, p in model.named_parameters() if p.requires_grad}


def plain_name(name: str) -> str:
    """A parameter's name without its engine's wrappers."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _whole(parameter: Tensor) -> Tensor:
    if isinstance(parameter, DTensor):
        return parameter.full_tensor().detach().clone()
    if hasattr(parameter, "ds_id"):
        import deepspeed  # which is there, or the parameter would not be its

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return parameter.detach().clone()


class Watched:
    """Mixin in front of a GRPO trainer, TRL's or ours: `steps` and `weights` of what it has trained so far."""

    accelerator: Any
    model: Any
    state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As the trainer's."""
        self.weights: list[Weights] = []
        """Before each optimizer step, and after the last."""
        self.steps: list[list[tuple[int, list[int]]]] = []
        """Micro-batches of each optimizer step, of all processes: generation and rows."""
        super().__init__(*args, **kwargs)
        self.add_callback(_Watcher(self))  # type: ignore[attr-defined]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
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

    def look(self) -> None:
        """Between optimizer steps: note the weights, and forget the micro-batches that have led to them."""
        self.weights.append(trained_weights(self.accelerator.unwrap_model(self.model)))
        self.seen: list[tuple[int, list[int]]] = []

    def save(self, path: Path) -> None:
        """What has been seen, by the first process."""
        if self.accelerator.is_main_process:
            torch.save({"weights": self.weights, "steps": self.steps}, path)


class _Watcher(TrainerCallback):
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if not self.trainer.weights:
            self.trainer.look()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        seen = self.trainer.seen
        several = self.trainer.accelerator.num_processes > 1
        self.trainer.steps.append(gather_object(seen) if several else seen)
        self.trainer.look()
