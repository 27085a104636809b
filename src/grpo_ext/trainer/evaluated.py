"""The completions of one evaluation, each counted once, whatever its batches and processes.

TRL averages over batches, and counts rows twice that fill up the last one; `eval_loss` there is that of the first
process, since the number of prompts is taken for that of completions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from trl.trainer.utils import nanstd

from grpo_ext.objective.aggregation import StepTotals
from grpo_ext.objective.combinations import weighted_total
from grpo_ext.trainer.credit import group_shares


class Evaluated:
    """What is known of the completions so far.

    Args:
        rows: completions of the whole evaluation; None where nobody knows, and none is taken for a filler.
    """

    def __init__(self, rows: int | None) -> None:
        """None is seen yet."""
        self.rows, self.seen = rows, 0
        self.rewards: list[Float[Tensor, "rows functions"]] = []
        self.lengths: list[Int[Tensor, "rows 2"]] = []
        self.silent: list[Bool[Tensor, " groups"]] = []

    def take(self, rewards: Float[Tensor, "rows functions"]) -> int:
        """Keep the rewards of a batch of all processes; returns how many of its rows are no fillers."""
        real = len(rewards) if self.rows is None else min(len(rewards), self.rows - self.seen)
        self.seen += len(rewards)
        self.rewards.append(rewards[:real])
        self.lengths[-1] = self.lengths[-1][:real]
        return real

    def take_silent(self, silent: Bool[Tensor, " groups"], group: int) -> None:
        """Keep which groups of the batch have no advantage, after `take`, without those that fill up."""
        self.silent.append(silent[: len(self.rewards[-1]) // group])

    def take_lengths(self, tokens: Sequence[int], truncated: Sequence[bool], accelerator: Any) -> None:
        """Keep lengths of this process's completions and whether they were cut, until `take`."""
        local = torch.tensor([tokens, truncated], device=accelerator.device).T.contiguous()
        self.lengths.append(accelerator.gather(local))

    def figures(
        self, names: Sequence[str], weights: Float[Tensor, " functions"], group: int, objective: Any
    ) -> dict[str, float]:
        """Under TRL's names: rewards of each function `names` and their total, lengths; `group` to a prompt."""
        rewards = torch.cat(self.rewards).double()
        figures = {}
        for column, name in zip(rewards.unbind(dim=1), names, strict=True):
            figures[f"rewards/{name}/mean"], figures[f"rewards/{name}/std"] = column.nanmean(), nanstd(column)
        grouped = rewards.view(-1, group, rewards.shape[1])
        total = weighted_total(grouped, weights.to(grouped), missing=objective.missing_rewards)
        figures["reward"], figures["reward_std"] = total.nanmean(), nanstd(total)
        figures["advantages/zero_variance_groups"] = torch.cat(self.silent).double().mean()
        lengths, cut = torch.cat(self.lengths).double().unbind(dim=1)
        figures["completions/clipped_ratio"] = cut.mean()
        ended = lengths[cut == 0] if (cut == 0).any() else lengths.new_zeros(1)
        for kind, values in (("", lengths), ("terminated_", ended)):
            for figure in ("mean", "min", "max"):
                figures[f"completions/{figure}_{kind}length"] = getattr(values, figure)()
        return {name: value.item() for name, value in figures.items()} | group_shares(grouped, names)


def batch_weight(objective: Any, totals: StepTotals) -> Float[Tensor, ""]:
    """What the loss of a batch counts in a mean over batches: the number that its aggregation divides by.

    0 for a batch without a live token, whose denominators count as 1 so that its loss is 0.
    """
    one = torch.ones((1, 1), dtype=torch.float64, device=totals.tokens.device)
    unit = StepTotals(*(one.squeeze() for _ in totals))
    return objective.aggregate(one, one, unit) / objective.aggregate(one, one, totals) * (totals.tokens > 0)
