"""Micro-batches of one generation: their denominators, and log-probabilities of the old policy.

Rows that are computed together, padded and packed in the same way, have the same log-probabilities to the last bit; in
half precision another micro-batch moves them by hundredths. So old log-probabilities come from the very forward of the
loss: a micro-batch that the loss reaches before the policy moves keeps the log-probabilities of that pass, and the
others get theirs just before it moves.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import pad as trl_pad

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.objective.aggregation import StepTotals, step_totals
from grpo_ext.objective.trajectory import Trajectory
from grpo_ext.packing.micro_batches import PARENTS, MicroBatch, active_mask
from grpo_ext.rollout.rollout_batch import Generated
from grpo_ext.rollout.trajectories import parents_of
from grpo_ext.trainer.diagnosis.positions import later_turns


def padded(
    generated: Generated,
    pad: int,
    multiple: int | None,
    device: torch.device,
    ends: Collection[int] | None = None,
    trajectories: Sequence[Trajectory] = (),
) -> dict[str, Tensor]:
    """Return the rows of a generation as padded tensors: prompts [rows, width] on the left, completions on the right.

    Args:
        generated: the rows.
        pad: token that pads.
        multiple: width is a multiple of it.
        device: of the tensors.
        ends: tokens that end a completion which trains; None: all train.
        trajectories: of the rows, where they have some, whose contexts may have been rewritten.
    """

    def joined(rows: Sequence[Tensor], value: int, side: str = "right") -> Tensor:
        return trl_pad(list(rows), padding_value=value, padding_side=side, pad_to_multiple_of=multiple).to(device)

    prompts, completions = ([torch.tensor(ids) for ids in part] for part in generated[:2])
    batch = {
        "prompt_ids": joined(prompts, pad, "left"),
        "prompt_mask": joined([torch.ones_like(ids) for ids in prompts], 0, "left"),
        "completion_ids": joined(completions, pad),
        "completion_mask": joined([torch.ones_like(ids) for ids in completions], 0),
    }
    if generated.logprobs is not None:
        logps = [[math.nan if logp is None else logp for logp in row] for row in generated.logprobs]
        batch["sampling_per_token_logps"] = joined([torch.tensor(row) for row in logps], 0)
    if trajectories and (parents := parents_of(trajectories, batch["completion_ids"].shape[1])) is not None:
        batch[PARENTS] = parents.to(device)
    if generated.tool_mask is not None:
        batch["tool_mask"] = joined([torch.tensor(mask) for mask in generated.tool_mask], 1)
        batch["later_turns"] = later_turns(active_mask(batch), batch.get(PARENTS))
    if ends is not None:
        whole = torch.tensor([ids[-1] in ends for ids in generated.completion_ids], device=device)[:, None]
        masks = ("completion_mask", "tool_mask")
        batch |= {name: batch[name] * whole.to(batch[name].dtype) for name in masks if name in batch}
    return batch


@dataclass(frozen=True)
class Generation:
    """The micro-batches of one generation, from their arrangement until the next generation replaces them."""

    micro_batches: Sequence[MicroBatch] = ()
    totals: Sequence[StepTotals] = ()
    """Totals of each optimizer step over all processes; empty with stock TRL's denominators."""
    added: Sequence[Sequence[StepTotals]] = ()
    """For each of the losses beside the policy's, those of its own tokens."""

    def __contains__(self, inputs: MicroBatch) -> bool:
        return any(batch is inputs for batch in self.micro_batches)

    def totals_of(self, inputs: MicroBatch) -> StepTotals | None:
        """Return the totals of the optimizer step that a micro-batch belongs to, or None for one from elsewhere."""
        step = self._step_of(inputs)
        return None if step is None else self.totals[step]

    def added_totals_of(self, inputs: MicroBatch) -> list[StepTotals]:
        """Return those of the losses beside the policy's."""
        step = self._step_of(inputs)
        assert step is not None
        return [totals[step] for totals in self.added]

    def _step_of(self, inputs: MicroBatch) -> int | None:
        accumulation = len(self.micro_batches) // max(1, len(self.totals))
        places = (i for i, batch in enumerate(self.micro_batches) if batch is inputs and self.totals)
        return next((i // accumulation for i in places), None)


def arranged(
    batches: Sequence[MicroBatch],
    added: Callable[[MicroBatch], list[Tensor]],
    args: GRPOExtConfig,
    accelerator: Accelerator,
) -> Generation:
    """Return the micro-batches of a generation with the denominators of their steps, unless these are stock TRL's.

    `added` returns the tokens that each of the losses beside the policy's counts.
    """
    if not args.exact_denominators:
        return Generation(batches)
    every = [active_mask(batch) for batch in batches], *zip(*map(added, batches), strict=True)
    totals, *others = (counted(masks, args.gradient_accumulation_steps, accelerator) for masks in every)
    return Generation(batches, totals, others)


def without_known_old(batches: Sequence[MicroBatch], accelerator: Accelerator) -> list[MicroBatch]:
    """Return the batches that hold, on any process, a token whose log-probability the sampler does not know."""
    unknown = [(batch["sampling_per_token_logps"].isnan() & active_mask(batch).bool()).any() for batch in batches]
    anywhere = accelerator.gather(torch.stack(unknown)).view(-1, len(batches)).any(dim=0)
    return [batch for batch, needs in zip(batches, anywhere.tolist(), strict=True) if needs]


# Denominators.


def counted(masks: Sequence[Tensor], accumulation: int, accelerator: Accelerator) -> list[StepTotals]:
    """Totals of each step of `accumulation` micro-batches with these masks over all processes, in one reduction."""
    local = [torch.stack(step_totals([*masks[i : i + accumulation]])) for i in range(0, len(masks), accumulation)]
    return [StepTotals(*row) for row in accelerator.reduce(torch.stack(local), reduction="sum")]


def counted_once(mask: Tensor, micro_batches: int, accelerator: Accelerator) -> StepTotals:
    """Totals as if all of a step's `micro_batches` were like this one: evaluation, or a loss outside of training."""
    return StepTotals(*(accelerator.reduce(torch.stack(step_totals([mask])), reduction="sum") * micro_batches))


def stock_totals(inputs: MicroBatch, micro_batches: int, share: float, processes: int) -> StepTotals:
    """Stock TRL's totals: all rows, and `share` of the generation's tokens."""
    rows, tokens = len(inputs["completion_mask"]), inputs["num_items_in_batch"].clamp(min=1.0) * share
    steps = torch.tensor(float(micro_batches * processes), device=tokens.device)
    return StepTotals(tokens=tokens, sequences=steps * rows, micro_batches=steps)


@contextmanager
def forward_only(model: PreTrainedModel, args: GRPOExtConfig) -> Iterator[None]:
    """Disable gradients, and checkpointing with them: torch warns of a checkpoint without a gradient."""
    kwargs: Any = args.gradient_checkpointing_kwargs
    with torch.no_grad(), disable_gradient_checkpointing(model, kwargs):
        yield
