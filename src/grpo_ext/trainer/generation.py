"""A generation as it is trained on, and the denominators of the optimizer steps that it makes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_ext.objective.aggregation import StepTotals, step_totals

MicroBatch = dict[str, Any]


def live_mask(inputs: Mapping[str, Any]) -> Tensor:
    """Completion tokens [rows, time] that the policy wrote and that are trained on."""
    return inputs["completion_mask"] * inputs.get("tool_mask", 1)


@dataclass(frozen=True)
class Generation:
    """The micro-batches of one generation, from their arrangement until the next generation takes their place."""

    micro_batches: Sequence[MicroBatch] = ()
    totals: Sequence[StepTotals] = ()
    """Of each optimizer step, over all processes; none with stock TRL's denominators."""

    def __contains__(self, inputs: MicroBatch) -> bool:
        return any(batch is inputs for batch in self.micro_batches)

    def totals_of(self, inputs: MicroBatch) -> StepTotals | None:
        """Of the optimizer step that a micro-batch belongs to, or None for one from elsewhere."""
        window = len(self.micro_batches) // max(1, len(self.totals))
        places = (i for i, batch in enumerate(self.micro_batches) if batch is inputs and self.totals)
        return next((self.totals[i // window] for i in places), None)


def counted(micro_batches: Sequence[MicroBatch], window: int, accelerator: Any) -> list[StepTotals]:
    """Totals of each step of `window` micro-batches over all processes, in one reduction."""
    masks = [live_mask(batch) for batch in micro_batches]
    local = [torch.stack(step_totals(masks[i : i + window])) for i in range(0, len(masks), window)]
    return [StepTotals(*row) for row in accelerator.reduce(torch.stack(local), reduction="sum")]


def counted_alone(mask: Tensor, micro_batches: int, accelerator: Any) -> StepTotals:
    """Totals as if all of a step's `micro_batches` were like this one: evaluation, or a loss outside of training."""
    return StepTotals(*(accelerator.reduce(torch.stack(step_totals([mask])), reduction="sum") * micro_batches))


def stock(inputs: MicroBatch, micro_batches: int, share: float, processes: int) -> StepTotals:
    """Stock TRL's: all rows, and `share` of the generation's tokens."""
    rows, tokens = len(inputs["completion_mask"]), inputs["num_items_in_batch"].clamp(min=1.0) * share
    steps = torch.tensor(float(micro_batches * processes), device=tokens.device)
    return StepTotals(tokens=tokens, sequences=steps * rows, micro_batches=steps)
