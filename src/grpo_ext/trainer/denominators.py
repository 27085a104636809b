"""The denominators of the optimizer step that a trainer's micro-batch belongs to."""

from typing import Any

import torch
from torch import Tensor

from grpo_ext.objective.aggregation import StepTotals, step_totals


class Denominators:
    """Totals of each optimizer step that a trainer's generation batch holds, counted once over all processes."""

    def __init__(self, trainer: Any) -> None:
        """Nothing is counted yet."""
        self.trainer = trainer
        self.totals: list[StepTotals] = []
        self._counted: list[dict[str, Any]] = []

    def count(self, micro_batches: list[dict[str, Any]]) -> None:
        """Take in a generation batch, in one reduction; nothing to do where it is the last one again."""
        args, accelerator = self.trainer.args, self.trainer.accelerator
        if not args.exact_denominators or micro_batches is self._counted:
            return
        masks = [batch["completion_mask"] * batch.get("tool_mask", 1) for batch in micro_batches]
        n = args.gradient_accumulation_steps
        local = torch.stack([torch.stack(step_totals(masks[i : i + n])) for i in range(0, len(masks), n)])
        self.totals = [StepTotals(*row) for row in accelerator.reduce(local, reduction="sum")]
        self._counted = micro_batches

    def of(self, inputs: dict[str, Any], mask: Tensor, mode: str) -> StepTotals:
        """Totals of the step to which a micro-batch belongs."""
        trainer = self.trainer
        steps = trainer.current_gradient_accumulation_steps if mode == "train" else 1
        if not trainer.args.exact_denominators:
            return self._stock(inputs, mask, mode, steps)
        for i, micro_batch in enumerate(self._counted):
            if micro_batch is inputs:
                return self.totals[i // trainer.args.gradient_accumulation_steps]
        alone = trainer.accelerator.reduce(torch.stack(step_totals([mask])), reduction="sum")
        return StepTotals(*(alone * steps))  # evaluation; or a loss asked for outside of a training loop

    def _stock(self, inputs: dict[str, Any], mask: Tensor, mode: str, steps: int) -> StepTotals:
        """Stock TRL's: all rows, and the generation batch's tokens scaled to one accumulation window."""
        tokens = inputs["num_items_in_batch"].clamp(min=1.0)
        if mode == "train":
            tokens = tokens * steps / self.trainer.args.steps_per_generation
        micro_batches = torch.tensor(float(steps * self.trainer.accelerator.num_processes), device=mask.device)
        return StepTotals(tokens=tokens, sequences=micro_batches * len(mask), micro_batches=micro_batches)
