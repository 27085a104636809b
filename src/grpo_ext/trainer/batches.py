"""Micro-batches of one generation: their denominators, and log-probabilities of the old policy.

Rows that are computed together, padded and packed in the same way, have the same log-probabilities to the last bit; in
half precision another micro-batch moves them by hundredths. So old log-probabilities come from the very forward of the
loss: a micro-batch that the loss reaches before the policy moves keeps the log-probabilities of that pass, and the
others get theirs just before it moves.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel
from trl.models.utils import disable_gradient_checkpointing

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.temporary import temporarily
from grpo_ext.objective.aggregation import StepTotals, step_totals
from grpo_ext.packing.micro_batches import MicroBatch, live_mask


@dataclass(frozen=True)
class Generation:
    """The micro-batches of one generation, from their arrangement until the next generation replaces them."""

    micro_batches: Sequence[MicroBatch] = ()
    totals: Sequence[StepTotals] = ()
    """Totals of each optimizer step over all processes; empty with stock TRL's denominators."""

    def __contains__(self, inputs: MicroBatch) -> bool:
        return any(batch is inputs for batch in self.micro_batches)

    def totals_of(self, inputs: MicroBatch) -> StepTotals | None:
        """Return the totals of the optimizer step that a micro-batch belongs to, or None for one from elsewhere."""
        window = len(self.micro_batches) // max(1, len(self.totals))
        places = (i for i, batch in enumerate(self.micro_batches) if batch is inputs and self.totals)
        return next((self.totals[i // window] for i in places), None)


# Denominators.


def counted(micro_batches: Sequence[MicroBatch], window: int, accelerator: Accelerator) -> list[StepTotals]:
    """Totals of each step of `window` micro-batches over all processes, in one reduction."""
    masks = [live_mask(batch) for batch in micro_batches]
    local = [torch.stack(step_totals(masks[i : i + window])) for i in range(0, len(masks), window)]
    return [StepTotals(*row) for row in accelerator.reduce(torch.stack(local), reduction="sum")]


def counted_once(mask: Tensor, micro_batches: int, accelerator: Accelerator) -> StepTotals:
    """Totals as if all of a step's `micro_batches` were like this one: evaluation, or a loss outside of training."""
    return StepTotals(*(accelerator.reduce(torch.stack(step_totals([mask])), reduction="sum") * micro_batches))


def stock_totals(inputs: MicroBatch, micro_batches: int, share: float, processes: int) -> StepTotals:
    """Stock TRL's totals: all rows, and `share` of the generation's tokens."""
    rows, tokens = len(inputs["completion_mask"]), inputs["num_items_in_batch"].clamp(min=1.0) * share
    steps = torch.tensor(float(micro_batches * processes), device=tokens.device)
    return StepTotals(tokens=tokens, sequences=steps * rows, micro_batches=steps)


# The old policy.


def no_early_pass(args: GRPOExtConfig) -> AbstractContextManager[None]:
    """Skip TRL's pass for old log-probabilities, whose rows are not in the loss's micro-batches yet.

    TRL decides by `gradient_accumulation_steps` whether an optimizer step may begin within a generation. With vLLM's
    importance sampling correction it still runs the pass, for the sampler's ratio.
    """
    return temporarily(args, gradient_accumulation_steps=int(args.steps_per_generation or 1) * args.num_iterations)


@contextmanager
def forward_only(model: PreTrainedModel, args: GRPOExtConfig) -> Iterator[None]:
    """Disable gradients, and checkpointing with them: torch warns of a checkpoint without a gradient."""
    kwargs: Any = args.gradient_checkpointing_kwargs
    with torch.no_grad(), disable_gradient_checkpointing(model, kwargs):
        yield
