"""Prompts, completions and rewards that depend only on their place in the global batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer

EOS, SILENT = 1, 2
"""Special tokens; a group whose completions begin with `SILENT` has equal rewards."""
ORDINARY = 3


@dataclass(frozen=True)
class Rows:
    """The rows of every generation of a run.

    Args:
        vocabulary: number of the model's tokens.
        group: completions of a prompt.
        longest: maximum tokens of a completion, below the recipe's limit.
        rewards: number of reward functions.
    """

    vocabulary: int
    group: int
    longest: int = 7
    rewards: int = 1

    def prompt(self, generation: int, group: int) -> list[int]:
        """Return the token ids of a prompt; the length depends on the group."""
        return self._drawn(7_000_000 + 1000 * generation + group, 2, 6)

    def completion(self, generation: int, row: int) -> list[int]:
        """Return the token ids of a row of the global batch; every fifth is truncated, the others end."""
        ids = self._drawn(1000 * generation + row, 1, self.longest)
        if (generation + row // self.group) % 3 == 2:
            ids[0] = SILENT
        return ids if self.is_cut(row) else [*ids, EOS]

    @staticmethod
    def is_cut(row: int) -> bool:
        """Return whether a completion has no end token."""
        return row % 5 == 0

    def _drawn(self, seed: int, shortest: int, longest: int) -> list[int]:
        g = torch.Generator().manual_seed(seed)
        length = int(torch.randint(shortest, longest, (), generator=g))
        return torch.randint(ORDINARY, self.vocabulary, (length,), generator=g).tolist()

    def rollout(self, prompts: list, trainer: Trainer) -> dict[str, Any]:
        """Return this process's part of the current generation; a `rollout_func` of TRL."""
        first = trainer.accelerator.process_index * len(prompts)
        mine, generation = range(first, first + len(prompts)), trainer.state.global_step
        return {
            "prompt_ids": [self.prompt(generation, row // self.group) for row in mine],
            "completion_ids": [self.completion(generation, row) for row in mine],
            "logprobs": None,
        }

    def reward_functions(self) -> list[Callable[..., list[float]]]:
        """Return the reward functions."""
        return [_scorer(k) for k in range(self.rewards)]


def row_score(ids: list[int], function: int = 0) -> float:
    """Return a reward in [0, 1], with ties."""
    return 0.5 if ids[0] == SILENT else sum((t * (7 + function)) % 13 for t in ids) % 8 / 7


def _scorer(function: int) -> Callable[..., list[float]]:
    def scored(completion_ids: list[list[int]], **_: object) -> list[float]:
        return [row_score(ids, function) for ids in completion_ids]

    scored.__name__ = f"fixed_{function}"
    return scored
