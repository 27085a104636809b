"""Protocols of samplers: the policy itself, or what samples beside it by numbered copies of its weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from grpo_ext.errors import SamplerLost, ServerLost


class Sampled(NamedTuple):
    """One sampled completion."""

    ids: list[int]
    """Tokens, with the one that ended the completion, if any."""
    logps: list[float | None] | None
    """Log-probability of each token under the distribution that it was drawn from; None where it is not known."""
    support: Tensor | None
    """Sets that a truncated sampler drew from, as in `packing.sampling_support`; None where the loss needs none."""
    routes: Tensor | None = None
    """Experts that its tokens and those of its context were sent to, as in `packing.routes`, if they are replayed."""


class PolicySampler(Protocol):
    """Samples by the policy's present weights, on the main thread: transformers, or vLLM once it has them."""

    @property
    def collective(self) -> bool:
        """Whether processes generate together, each call with those of the others."""

    @property
    def takes_streams(self) -> bool:
        """Whether a row depends on its own stream of random numbers only."""

    @property
    def limit(self) -> int:
        """Most tokens of a completion, by the settings of the moment."""

    def sample(
        self,
        contexts: list[list[int]],
        limits: Sequence[int],
        streams: Sequence[np.random.Generator] | None = None,
        *,
        fields: Mapping[str, Any] = ...,
        images: Sequence[Any] | None = None,
        group: int = 1,
    ) -> list[Sampled]:
        """Sample a completion after each context; collective if `collective`.

        Args:
            contexts: token ids; processes that generate together may have different numbers of them.
            limits: most tokens of each completion.
            streams: sources of each row's random numbers; None: the random state of torch, or of the engine.
            fields: further inputs of a model that takes images, by row, which transformers reads.
            images: of each row, or None where it has none, which vLLM reads.
            group: number of consecutive rows that have one context.
        """


class Sampler(Protocol):
    """Samples completions beside the training of the policy; one for each process."""

    @property
    def versions(self) -> frozenset[int]:
        """Numbers of the versions that it has."""

    def publish(self, version: int, weights: Mapping[str, Tensor] | None = None) -> None:
        """Copy the policy's present weights, or a copy of older ones, under this number.

        Main thread, between optimizer steps; collective. It may wait for older requests.
        """

    def copy_of(self, version: int) -> dict[str, Tensor] | None:
        """Return a copy of a version for `publish`, to be stored; None where it cannot take one."""

    def sample(
        self,
        version: int,
        contexts: list[list[int]],
        limits: list[int],
        streams: Sequence[np.random.Generator],
        images: Sequence[Any] | None = None,
    ) -> list[Sampled]:
        """Sample a completion after each context.

        Any thread; blocks until all completions are there. A row depends on its weights, context and stream only, and
        on the rounding of its batch.

        Args:
            version: number of published weights.
            contexts: token ids.
            limits: most tokens of each completion.
            streams: source of the random numbers of each row; a row takes as many as its limit, or one seed.
            images: of each row, or None where it has none; a process takes none.
        """

    def forget(self, version: int) -> None:
        """Drop a version that no request will need."""

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which the engine that samples is free for an evaluation; main thread, collective."""

    def close(self) -> None:
        """End the sampler, and requests that have not ended."""


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise on all processes that the sampler is lost if it is on any; collective, main thread."""
    lost: SamplerLost | ServerLost | None = None
    try:
        yield
    except (SamplerLost, ServerLost) as error:
        lost = error
    if PartialState().num_processes > 1:
        found = gather_object([lost])
        lost = lost or next(filter(None, found), None)
    if lost is not None:
        raise lost
