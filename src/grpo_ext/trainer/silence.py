"""A run that learns nothing says so: generations in a row without any advantage, and what its rewards were."""

import logging
import math

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

PATIENCE = 5
"""Generations without a signal in a row that are told of, once."""


class Silence:
    """Counts generations of training in which no completion had an advantage."""

    def __init__(self, names: list[str], *, tells: bool = True) -> None:
        """`names` are the rewards', as they are logged; one process of several `tells`."""
        self.names = names
        self.warned = not tells
        self.rewards: list[Tensor] = []

    def note(self, rewards: Tensor, silent: bool) -> None:
        """Take in a generation: rewards [groups, completions, functions], and whether all advantages were 0."""
        self.rewards = [*self.rewards, rewards.cpu()] if silent and not self.warned else []
        if len(self.rewards) == PATIENCE:
            self.warned = True
            logger.warning(self.describe())
            self.rewards = []

    def to_list(self) -> list[list]:
        """Rewards of the generations that are counted, for a checkpoint."""
        return [rewards.tolist() for rewards in self.rewards]

    def load(self, rewards: list[list], warned: bool) -> None:
        """Go on counting where `to_list` and `warned` were taken."""
        self.rewards = [torch.tensor(values, dtype=torch.float64) for values in rewards]
        self.warned = self.warned or warned

    def describe(self) -> str:
        """What each reward gave, and what helps."""
        columns = torch.cat(self.rewards).flatten(0, 1).T
        given = ", ".join(f"{name} {_values(column)}" for name, column in zip(self.names, columns, strict=True))
        return (
            f"no signal in {PATIENCE} generations in a row: all completions of a prompt were worth the same, so that "
            f"nothing was learned. Rewards of these {columns.shape[1]} completions: {given}. Read some of them "
            "(log_completions: true): a reward that is 0 throughout asks for what the model never writes (say it in "
            "system_prompt, or raise max_completion_length if they are cut off), one that is 1 throughout for harder "
            "prompts."
        )


def _values(column: Tensor) -> str:
    known = sorted({value for value in column.tolist() if not math.isnan(value)})
    unscored = int(column.isnan().sum())
    if not known:
        return "None throughout (not scored)"
    told = f"{known[0]:g} throughout" if len(known) == 1 else f"{known[0]:g} to {known[-1]:g}, alike in each group"
    return f"{told} ({unscored} not scored)" if unscored else told
