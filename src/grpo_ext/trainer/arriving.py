"""A generation whose groups train while the others are still sampled and scored (`overlap: step`).

The rows of a process are cut into chunks of whole groups, which are sampled and scored beside the training, in their
order. The main thread waits for a chunk when it comes to the first micro-batch with a row of it, and for no other.
Each process takes as many chunks before its i-th micro-batch as the others, so that their collectives meet.

The denominators of the optimizer step are known when its last chunk is. Until then shares are divided by provisional
ones; behind the last backward pass of the step the gradient is scaled to the true ones. Later steps of the same
generation are those of a generation without overlap.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from grpo_ext.objective.aggregation import StepTotals, aggregations
from grpo_ext.packing.micro_batches import MicroBatch, joined, rows_of
from grpo_ext.trainer.batches import Generation


@dataclass(frozen=True)
class Plan:
    """The rows of each micro-batch of one process, and the chunks that each waits for.

    Attributes:
        chunk: rows of a chunk; the last may have fewer.
        steps: rows of each micro-batch, by optimizer step.
        needed: how many chunks each micro-batch of the first step needs; ascending.
    """

    chunk: int
    steps: list[list[list[int]]]
    needed: list[int]

    @classmethod
    def of(cls, order: Sequence[int], size: int, window: int, chunk: int) -> "Plan":
        """Plan a generation.

        Each step keeps the rows that it has without overlap. Those of the first are in the order of their chunks, so
        that each of its micro-batches needs as few of these as possible.

        Args:
            order: the rows as TRL shuffles them.
            size: rows of a micro-batch.
            window: micro-batches of an optimizer step.
            chunk: rows of a chunk.
        """
        rows = [*sorted(order[: size * window]), *order[size * window :]]
        batches = [rows[i : i + size] for i in range(0, len(rows), size)]
        steps = [batches[i : i + window] for i in range(0, len(batches), window)]
        return cls(chunk, steps, [1 + batch[-1] // chunk for batch in steps[0]])

    @property
    def rows(self) -> int:
        """Rows of the generation."""
        return sum(len(batch) for step in self.steps for batch in step)

    @property
    def chunks(self) -> list[range]:
        """Rows of each chunk."""
        return [range(i, min(i + self.chunk, self.rows)) for i in range(0, self.rows, self.chunk)]

    def agreed(self, accelerator: Accelerator) -> "Plan":
        """Return a plan by which all processes take their chunks before the same micro-batches; collective."""
        mine = torch.tensor([self.needed], device=accelerator.device)
        return Plan(self.chunk, self.steps, accelerator.gather(mine).amax(dim=0).tolist())


def provisional(rows: int, length: int, micro_batches: int, device: torch.device) -> StepTotals:
    """Return totals of an optimizer step before its completions are known: all rows, each of the longest length."""
    return StepTotals(*torch.tensor([rows * length, rows, micro_batches], device=device))


def correction(aggregation: str, assumed: StepTotals, counted: StepTotals) -> float:
    """Return the factor of a loss, and of its gradient, that was divided by the denominator in `assumed`."""
    denominator = aggregations.traits(aggregation).denominator
    assert denominator is not None
    return getattr(assumed, denominator).item() / max(1, getattr(counted, denominator).item())


@torch.no_grad()
def scale(model: nn.Module, factor: float) -> None:
    """Multiply all gradients by a number."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


@dataclass
class Arriving:
    """A generation of which some chunks have been scored.

    Args:
        plan: which rows are where.
        generation: its micro-batches, each empty until its rows have arrived, with provisional totals.
        score: waits for a chunk, scores it and returns its tensors.
        arrange: rearranges micro-batches that arrive together, so that their loads are even.
        finish: called when all chunks are scored.
    """

    plan: Plan
    generation: Generation
    score: Callable[[int], MicroBatch]
    arrange: Callable[[list[MicroBatch]], list[MicroBatch]]
    finish: Callable[[], None]
    losses: list[Tensor] = field(default_factory=list)
    """Losses of the first step's micro-batches, by the provisional totals."""
    _scored: list[MicroBatch] = field(default_factory=list)

    def await_micro_batch(self, place: int) -> None:
        """Score what a micro-batch of the first step needs; before the last one, all that is left."""
        last = place == len(self.plan.needed) - 1
        self._take(len(self.plan.chunks) if last else self.plan.needed[place])

    def _take(self, count: int) -> None:
        begun = len(self._scored)
        for i in range(begun, count):
            self._scored.append(self.score(i))
            for needed, places in groupby(range(len(self.plan.needed)), self.plan.needed.__getitem__):
                if needed == i + 1:
                    self._fill([*places])
        if begun < count == len(self.plan.chunks):
            self._fill_later_steps()
            self.finish()

    def _fill_later_steps(self) -> None:
        first = len(self.plan.needed)
        for step in self.plan.steps[1:]:
            self._fill([*range(first, first + len(step))])
            first += len(step)

    def _fill(self, places: Sequence[int]) -> None:
        """Fill micro-batches whose rows have all arrived."""
        batches = [batch for step in self.plan.steps for batch in step]
        rows = [batches[place] for place in places]
        oldest = min(map(min, rows)) // self.plan.chunk
        known = joined(self._scored[oldest:])
        first = oldest * self.plan.chunk
        filled = self.arrange([rows_of(known, torch.tensor(batch) - first) for batch in rows])
        for place, values in zip(places, filled, strict=True):
            self.generation.micro_batches[place].update(values)
