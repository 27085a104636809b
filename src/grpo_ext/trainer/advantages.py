"""What lies between the rewards that TRL gathers and the advantages that it hands on."""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from grpo_ext.objective.advantages import group_means
from grpo_ext.trainer.turns import PADDING


class GroupMeans:
    """Group means of the last generation batches, a column for each reward and one for the total, in checkpoints too.

    Args:
        batches: how many batches are remembered.
    """

    def __init__(self, batches: int) -> None:
        """Nothing is remembered yet."""
        self.batches: deque[Tensor] = deque(maxlen=batches)

    def remember(self, rewards: Tensor, total: Tensor) -> None:
        """Take in a batch: rewards [groups, completions, functions], total [groups, completions]."""
        if self.batches.maxlen:
            columns = [group_means(column) for column in (*rewards.unbind(dim=-1), total)]
            self.batches.append(torch.stack(columns, dim=-1).cpu())

    def on(self, device: torch.device) -> Tensor | None:
        """All of them [past groups, columns], or None where there are none."""
        return torch.cat(list(self.batches)).to(device) if self.batches else None

    def to_list(self) -> list[list[list[float]]]:
        """For JSON."""
        return [batch.tolist() for batch in self.batches]

    def load(self, batches: list[list[list[float]]]) -> None:
        """From what `to_list` gave."""
        self.batches.extend(torch.tensor(batch, dtype=torch.float64) for batch in batches)


def gathered(values: dict[str, Tensor], group: int, accelerator: Any) -> dict[str, Tensor]:
    """Tensors [rows, ..., time] of each process as [groups, completions, ..., time] of all."""
    found = {}
    for name, tensor in values.items():
        padded = accelerator.pad_across_processes(tensor, dim=-1, pad_index=PADDING.get(name, 0))
        found[name] = accelerator.gather(padded.contiguous()).unflatten(0, (-1, group))
    return found


def without_signal(advantages: Tensor) -> Tensor:
    """Groups in which no token has an advantage, [groups], of advantages [groups, completions (, time)]."""
    return ~advantages.flatten(1).any(dim=1)


def per_completion(advantages: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the live tokens of each completion, [completions], of advantages [completions (, time)]."""
    if advantages.dim() == 1 or mask is None:
        return advantages
    mask = mask.flatten(0, -2)
    return (advantages * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def replace_tail(logged: deque, values: list) -> None:
    """Swap what has just been appended to a column of the table of completions."""
    for _ in range(min(len(values), len(logged))):
        logged.pop()
    logged.extend(values)
