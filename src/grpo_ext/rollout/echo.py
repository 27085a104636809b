"""A sampler that repeats the last tokens of each context."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from torch import Tensor

from grpo_ext.rollout.samplers import Sampled


class EchoSampler:
    """Samples nothing: each completion is the end of its context."""

    versions: frozenset[int] = frozenset()

    def publish(self, version: int, weights: Mapping[str, Tensor] | None = None) -> None:
        """Note the version."""
        self.versions |= {version}

    def copy_of(self, version: int) -> dict[str, Tensor] | None:
        """Return no weights."""
        return {}

    def sample(
        self, version: int, contexts: list[list[int]], limits: list[int], streams: Sequence[np.random.Generator]
    ) -> list[Sampled]:
        """Return the last tokens of each context, as many as its stream says."""
        lengths = [int(stream.integers(1, limit + 1)) for stream, limit in zip(streams, limits, strict=True)]
        ends = [context[-length:] for context, length in zip(contexts, lengths, strict=True)]
        return [Sampled(ids, [0.0] * len(ids), None) for ids in ends]

    def forget(self, version: int) -> None:
        """Forget the version."""
        self.versions -= {version}

    def paused(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def close(self) -> None:
        """Do nothing."""
