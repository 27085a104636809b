"""Derive seeds from a run's seed, a purpose, a prompt and an attempt at the prompt.

No random state is involved: batches, processes, resumption and evaluations do not change a seed.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np


class Purpose(IntEnum):
    """Use of a seed; seeds of different purposes are independent."""

    GAME = 1
    """An environment; the same for all attempts at a prompt."""
    SAMPLING = 2
    """The completions of one attempt."""
    CHUNK = 3
    """All random numbers of one chunk of an evaluation set."""


class Source(IntEnum):
    """Origin of a prompt; prompts are numbered within each source."""

    TRAINING = 0
    """The training sampler; numbers continue from one generation to the next."""
    FRESH = 1
    """Dynamic sampling; numbers count the prompts drawn."""
    EVALUATION = 2
    """An evaluation set; numbers are the same in each evaluation."""


class AttemptId(NamedTuple):
    """One attempt at one prompt."""

    seed: int
    """Seed of the run, or of the evaluation set."""
    source: Source
    prompt: int
    attempt: int

    @property
    def game(self) -> int:
        """Seed of the environment."""
        return derived(Purpose.GAME, self.seed, self.source, self.prompt)

    def stream(self) -> np.random.Generator:
        """Return the generator of the random numbers that sample the attempt."""
        return np.random.default_rng(np.random.SeedSequence((Purpose.SAMPLING, *self)))


def derived(purpose: Purpose, *identity: int) -> int:
    """Return a seed in [0, 2^32); `identity` begins with the seed of the run or evaluation set."""
    return int(np.random.SeedSequence((purpose, *identity)).generate_state(1)[0])


def numbered(seed: int, source: Source, rows: Iterable[int], group: int) -> list[AttemptId]:
    """Return the attempts of rows that are numbered over all processes, `group` consecutive rows per prompt."""
    return [AttemptId(seed, source, *divmod(row, group)) for row in rows]


def uniform_numbers(
    streams: Sequence[np.random.Generator], limits: Sequence[int], rows: int, width: int
) -> np.ndarray:
    """Return numbers in [0, 1), [rows, width], by which rows sample tokens: of each stream as many as its limit.

    There may be more rows than streams, and `width` is at least each limit; what is left is 0.
    """
    numbers = np.zeros((rows, width))
    for row, stream, limit in zip(numbers, streams, limits, strict=False):
        row[:limit] = stream.random(limit)
    return numbers
