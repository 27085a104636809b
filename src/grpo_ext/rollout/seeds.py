"""Seeds: the one place that derives them, from a run's seed, the purpose, the prompt and the attempt at the prompt.

No random state is involved: batches, processes, resumption and evaluations in between do not change a seed.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

import numpy as np


class Purpose(IntEnum):
    """What a seed is for; seeds of two purposes are independent."""

    GAME = 1
    """An environment, alike for all attempts at a prompt."""
    SAMPLING = 2
    """The completions of one attempt."""
    CHUNK = 3
    """Everything that one chunk of an evaluation set draws."""


class Source(IntEnum):
    """What asks for a prompt; prompts are numbered within each source."""

    TRAINING = 0
    """The training sampler; the number goes on from one generation to the next."""
    FRESH = 1
    """Dynamic sampling, which numbers the prompts that it draws."""
    EVALUATION = 2
    """An evaluation set, whose prompts have the same numbers in each evaluation."""


class AttemptId(NamedTuple):
    """One attempt at one prompt."""

    seed: int
    """Of the run, or of the evaluation set."""
    source: Source
    prompt: int
    attempt: int

    @property
    def game(self) -> int:
        """Seed of the environment."""
        return derived(Purpose.GAME, self.seed, self.source, self.prompt)

    def stream(self) -> np.random.Generator:
        """Random numbers that sample the attempt."""
        return np.random.default_rng(np.random.SeedSequence((Purpose.SAMPLING, *self)))


def derived(purpose: Purpose, *identity: int) -> int:
    """A seed in [0, 2^32); `identity` begins with the seed of the run or evaluation set."""
    return int(np.random.SeedSequence((purpose, *identity)).generate_state(1)[0])


def numbered(seed: int, source: Source, rows: Iterable[int], group: int) -> list[AttemptId]:
    """Attempts of rows that are numbered over all processes, `group` consecutive rows to a prompt."""
    return [AttemptId(seed, source, *divmod(row, group)) for row in rows]
