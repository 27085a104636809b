"""Fixed rows: prompts, completions and rewards that depend on their place in the global batch and on nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

PAD, EOS, SILENT = 0, 1, 2
"""Tokens with a meaning of their own; a group whose completions begin with `SILENT` scores the same throughout."""
ORDINARY = 3


@dataclass(frozen=True)
class Rows:
    """Every generation of a run, whoever asks for which part of it.

    Args:
        vocabulary: tokens of the model.
        group: completions of a prompt.
        longest: tokens of a completion at most, below the recipe's limit.
        rewards: how many functions score.
    """

    vocabulary: int
    group: int
    longest: int = 7
    rewards: int = 1

    def prompt(self, generation: int, group: int) -> list[int]:
        """Token ids, of another length for each group."""
        return self._drawn(7_000_000 + 1000 * generation + group, 2, 6)

    def completion(self, generation: int, row: int) -> list[int]:
        """Token ids of a row of the global batch; every fifth was cut, the others have ended."""
        ids = self._drawn(1000 * generation + row, 1, self.longest)
        if (generation + row // self.group) % 3 == 2:
            ids[0] = SILENT
        return ids if self.is_cut(row) else [*ids, EOS]

    @staticmethod
    def is_cut(row: int) -> bool:
        """Whether a completion ends without saying so."""
        return row % 5 == 0

    def _drawn(self, seed: int, shortest: int, longest: int) -> list[int]:
        g = torch.Generator().manual_seed(seed)
        length = int(torch.randint(shortest, longest, (), generator=g))
        return torch.randint(ORDINARY, self.vocabulary, (length,), generator=g).tolist()

    def rollout(self, prompts: list, trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: this process's part of the generation that begins at this optimizer step."""
        first = trainer.accelerator.process_index * len(prompts)
        mine, generation = range(first, first + len(prompts)), trainer.state.global_step
        return {
            "prompt_ids": [self.prompt(generation, row // self.group) for row in mine],
            "completion_ids": [self.completion(generation, row) for row in mine],
            "logprobs": None,
        }

    def reward_functions(self) -> list[Callable[..., list[float]]]:
        """As many as score, each of another name."""
        return [_scorer(k) for k in range(self.rewards)]


def score(ids: list[int], function: int = 0) -> float:
    """A reward in [0, 1], with ties."""
    return 0.5 if ids[0] == SILENT else sum((t * (7 + function)) % 13 for t in ids) % 8 / 7


def _scorer(function: int) -> Callable[..., list[float]]:
    def scored(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [score(ids, function) for ids in completion_ids]

    scored.__name__ = f"fixed_{function}"
    return scored
