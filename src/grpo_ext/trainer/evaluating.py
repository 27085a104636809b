"""Evaluations that count each completion once, however it is split into batches and processes.

TRL averages over batches and counts the filler rows of the last batch twice. TRL's `eval_loss` is the loss of the
first process only, because it takes the number of prompts for the number of completions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_ext.objective.aggregation import StepTotals
from grpo_ext.objective.combinations import weighted_total
from grpo_ext.objective.objective import Objective
from grpo_ext.objective.ratios import widest
from grpo_ext.trainer.advantages import group_shares, reward_figures
from grpo_ext.trainer.log import length_figures


@dataclass
class EvalRows:
    """Rows of an evaluation, over all processes: how many are done, and how many there are (None: unknown)."""

    seen: int = 0
    total: int | None = None

    def next(self, first: int, count: int) -> list[int]:
        """Return the numbers of `count` further rows, from the `first` of the batch; fillers are the first rows."""
        rows = range(self.seen + first, self.seen + first + count)
        return list(rows) if self.total is None else [row % self.total for row in rows]


class Evaluated:
    """The completions of one evaluation.

    Args:
        rows: completions of the whole evaluation; None if unknown, so that no row counts as a filler.
    """

    def __init__(self, rows: int | None) -> None:
        self.rows, self.seen = rows, 0
        self.rewards: list[Float[Tensor, "rows functions"]] = []
        self.lengths: list[Int[Tensor, "rows 2"]] = []
        self.zero_variance: list[Bool[Tensor, " groups"]] = []

    def add_completions(
        self, ids: list[list[int]], tool_mask: list[list[int]] | None, ends: set[int], accelerator: Accelerator
    ) -> None:
        """Add the lengths of this process's completions, and whether they were truncated; before `mask_fillers`."""
        lengths = [len(row) for row in ids] if tool_mask is None else [sum(mask) for mask in tool_mask]
        local = torch.tensor([lengths, [row[-1] not in ends for row in ids]], device=accelerator.device)
        self.lengths.append(accelerator.gather(local.T.contiguous()).cpu())

    def mask_fillers(self, mask: Int[Tensor, "batch time"], rewards: Tensor, rank: int) -> Int[Tensor, "batch time"]:
        """Add the rewards of a batch of all processes, and return this one's completion mask, 0 for filler rows."""
        real, local = len(rewards) if self.rows is None else min(len(rewards), self.rows - self.seen), len(mask)
        self.seen += len(rewards)
        self.rewards.append(rewards[:real])
        self.lengths[-1] = self.lengths[-1][:real]
        return mask * (torch.arange(local, device=mask.device) + rank * local < real)[:, None]

    def add_zero_variance(self, zero_variance: Bool[Tensor, " groups"], group: int) -> None:
        """Add which groups of the batch have no advantage, after `mask_fillers`."""
        self.zero_variance.append(zero_variance[: len(self.rewards[-1]) // group])

    def figures(
        self, names: Sequence[str], weights: Float[Tensor, " functions"], group: int, objective: Objective
    ) -> dict[str, float]:
        """Return TRL's metrics: each reward of `names`, their total, lengths; `group` completions to a prompt."""
        rewards = torch.cat(self.rewards).double()
        grouped = rewards.view(-1, group, rewards.shape[1])
        total = weighted_total(grouped, weights.to(grouped), missing=objective.missing_rewards)
        figures = reward_figures(rewards, total, names)
        figures["advantages/zero_variance_groups"] = torch.cat(self.zero_variance).double().mean().item()
        lengths, cut = torch.cat(self.lengths).double().unbind(dim=1)
        return figures | length_figures(lengths, cut) | group_shares(grouped, names)


def batch_weight(objective: Objective, totals: StepTotals) -> Float[Tensor, ""]:
    """Return the weight of a batch in a mean of losses over batches: the number that its aggregation divides by.

    It is 0 for a batch without an active token, whose denominators count as 1 so that its loss is 0.
    """
    device = totals.tokens.device
    one = torch.ones((1, 1), dtype=widest(device), device=device)
    unit = StepTotals(*(one.squeeze() for _ in totals))
    return objective.aggregate(one, one, unit) / objective.aggregate(one, one, totals) * (totals.tokens > 0)
