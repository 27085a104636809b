"""Warn where a run does not learn: consecutive generations in which every advantage is zero."""

import logging
import math

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

PATIENCE = 5
"""Consecutive generations without any advantage before the warning."""


class AdvantageMonitor:
    """Warns once after PATIENCE generations of training in which every advantage was zero.

    Args:
        names: the rewards, as they are logged.
        warns: True on one process.
    """

    def __init__(self, names: list[str], *, warns: bool = True) -> None:
        self.names = names
        self.warned = not warns
        self.rewards: list[Tensor] = []

    def add(self, rewards: Tensor, all_zero: bool) -> None:
        """Add a generation: rewards [groups, completions, functions], and whether all advantages were 0."""
        self.rewards = [*self.rewards, rewards.cpu()] if all_zero and not self.warned else []
        if len(self.rewards) == PATIENCE:
            self.warned = True
            logger.warning(self.describe())
            self.rewards = []

    def to_list(self) -> list[list]:
        """Return the rewards of the counted generations, for a checkpoint."""
        return [rewards.tolist() for rewards in self.rewards]

    def load(self, rewards: list[list], warned: bool) -> None:
        """Restore `to_list` and `warned`."""
        self.rewards = [torch.tensor(values, dtype=torch.float64) for values in rewards]
        self.warned = self.warned or warned

    def describe(self) -> str:
        """Return the values of each reward, and what to do."""
        columns = torch.cat(self.rewards).flatten(0, 1).T
        given = ", ".join(f"{name} {_values(column)}" for name, column in zip(self.names, columns, strict=True))
        return (
            f"no signal in {PATIENCE} generations in a row: within every group all rewards were equal, so every "
            f"advantage was zero and no gradient came of them. Rewards of these {columns.shape[1]} completions: "
            f"{given}. Read some of them (log_completions: true). A reward that is always 0 asks for what the model "
            "never writes: describe it in system_prompt, or raise max_completion_length if completions are cut off. A "
            "reward that is always 1 needs harder prompts."
        )


def _values(column: Tensor) -> str:
    known = sorted({value for value in column.tolist() if not math.isnan(value)})
    unscored = int(column.isnan().sum())
    if not known:
        return "None throughout (not scored)"
    given = f"{known[0]:g} throughout" if len(known) == 1 else f"{known[0]:g} to {known[-1]:g}, equal in each group"
    return f"{given} ({unscored} not scored)" if unscored else given
