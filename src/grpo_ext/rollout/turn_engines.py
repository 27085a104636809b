"""Engines that sample turns of conversations: a trainer's own or a sampler beside it, in waves, or a vLLM server."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate.utils import gather_object

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.temporary import temporarily
from grpo_ext.objective.trajectory import Sample
from grpo_ext.rollout.samplers import Sampler
from grpo_ext.rollout.seeds import AttemptId, drawn
from grpo_ext.rollout.transformers_engine import GroupedEngine
from grpo_ext.rollout.vllm.server import CONNECTIONS

if TYPE_CHECKING:
    from grpo_ext.rollout.vllm.generation import Generation


@dataclass(frozen=True)
class Sampling:
    """How a trainer samples, during one generation."""

    args: GRPOExtConfig
    version: int
    """Optimizer steps that made the weights."""
    training: bool
    processes: int
    sharded: bool
    """Whether the weights are spread over processes, which then generate together."""
    positions: int | None
    """Positions that policy and sampler have."""
    filler: int
    """Token of a row that only fills up a wave."""
    complete: Callable[[list[list[int]]], tuple[list[list[int]], list[list[float | None]] | None]]
    """Samples completions of contexts, and their log-probabilities if it knows them."""
    at_most: Callable[[int], AbstractContextManager[None]]
    """Limits the length of completions for a `with` block."""
    vllm: "Generation | None"
    grouped: GroupedEngine | None
    """The engine of transformers that decodes groups, if it is used."""


def engine_of(sampling: Sampling, attempts: Sequence[AttemptId]) -> "WaveEngine":
    """Return the engine that suits, for one generation of `attempts`."""
    args = sampling.args
    server = sampling.vllm is not None and args.vllm_mode == "server" and sampling.processes == 1
    kind = ServerEngine if server and args.environment_waves == "ready" else WaveEngine
    return kind(sampling, attempts)


class WaveEngine:
    """A trainer's own engine, a wave at a time, with a stream of random numbers for each attempt.

    With transformers the tokens of an attempt depend on its own stream and on the logits, so that the attempts in its
    wave can change no more than their rounding. Where the engine cannot take streams (`generate`), and with
    `environment_waves: turn`, a wave waits for all environments, so that a run is a function of its recipe and seed.
    """

    pending = 0
    descriptor: int | None = None

    def __init__(self, sampling: Sampling, attempts: Sequence[AttemptId]) -> None:
        args = sampling.args
        self.sampling, self.version = sampling, sampling.version
        self._streams = [attempt.stream() for attempt in attempts]
        server = sampling.vllm is not None and (args.vllm_mode == "server" or args.vllm_tensor_parallel_size > 1)
        self._together = sampling.processes > 1 and (sampling.sharded or server)

    @property
    def waits(self) -> bool:
        """Whether a wave waits until all environments have answered."""
        args, grouped = self.sampling.args, self.sampling.grouped
        colocated = self.sampling.vllm is not None and args.vllm_mode == "colocate"
        takes_streams = colocated or (grouped is not None and not grouped.refusal)
        return args.environment_waves == "turn" or self._together or not takes_streams

    def close(self) -> None:
        """End the engine after a generation."""

    def anyone(self, here: bool) -> bool:
        """Return whether any process that generates together with this one still has an attempt."""
        return any(gather_object([here])) if self._together else here

    def generate(
        self, contexts: list[list[int]], limits: list[int], attempts: list[int]
    ) -> list[tuple[int, Sample]]:  # fmt: skip
        """Sample a turn after each context."""
        return list(zip(attempts, self._wave(contexts, limits, attempts), strict=True))

    def _wave(self, contexts: list[list[int]], limits: list[int], attempts: list[int]) -> list[Sample]:
        rows, longest = len(contexts), max(limits, default=1)
        beyond = [len(ids) + longest > (self.sampling.positions or math.inf) for ids in contexts]
        if any(beyond) and not all(beyond) and not self._together:  # those must not run out of positions
            return self._in_two(contexts, limits, attempts, beyond)
        if self._together:  # collective: the same number of rows and tokens on every process
            sizes = gather_object([(rows, longest)])
            rows, longest = max(row for row, _ in sizes), max(length for _, length in sizes)
        if not rows:
            return []
        asked = contexts + [[self.sampling.filler]] * (rows - len(contexts))
        streams = [self._streams[number] for number in attempts]
        with self.sampling.at_most(longest), self._seeded(streams, limits, rows, longest):
            ids, logprobs = self.sampling.complete(asked)
        known = [None] * rows if logprobs is None else logprobs
        return [
            Sample(sampled[:limit], None if its is None else its[:limit])
            for sampled, its, limit in zip(ids, known, limits, strict=False)
        ]

    def _in_two(
        self, contexts: list[list[int]], limits: list[int], attempts: list[int], beyond: list[bool]
    ) -> list[Sample]:
        found: dict[int, Sample] = {}
        for part in (False, True):
            places = [i for i, late in enumerate(beyond) if late is part]
            chosen = ([values[i] for i in places] for values in (contexts, limits, attempts))
            found |= dict(zip(places, self._wave(*chosen), strict=True))  # type: ignore[arg-type]
        return [found[i] for i in range(len(contexts))]

    @contextmanager
    def _seeded(
        self, streams: Sequence[np.random.Generator], limits: Sequence[int], rows: int, width: int
    ) -> Iterator[None]:
        """Make every row draw from its own stream; a turn takes as many numbers as it may sample tokens."""
        sampling, grouped = self.sampling, self.sampling.grouped
        if sampling.vllm is not None:
            if sampling.args.vllm_mode == "server" and sampling.training and sampling.processes > 1:
                yield  # all rows in one request, which can have only one seed
                return
            with sampling.vllm.seeded([int(stream.integers(2**31)) for stream in streams]):
                yield
            return
        if grouped is None:
            yield
            return
        with temporarily(grouped, uniforms=torch.from_numpy(drawn(streams, limits, rows, width))):
            yield


class SamplerEngine:
    """A sampler beside the policy, a wave at a time; for any thread.

    Args:
        sampler: has the weights.
        published: the number of the weights there.
        version: optimizer steps that made the weights.
        attempts: of one generation.
        waits: whether a wave waits until all environments have answered.
    """

    pending = 0
    descriptor: int | None = None

    def __init__(
        self, sampler: Sampler, published: int, version: int, attempts: Sequence[AttemptId], *, waits: bool
    ) -> None:
        self.sampler, self.published, self.version, self.waits = sampler, published, version, waits
        self._streams = [attempt.stream() for attempt in attempts]

    def generate(
        self, contexts: list[list[int]], limits: list[int], attempts: list[int]
    ) -> list[tuple[int, Sample]]:  # fmt: skip
        """Sample a turn after each context."""
        if not contexts:
            return []
        streams = [self._streams[number] for number in attempts]
        sampled = self.sampler.sample(self.published, contexts, limits, streams)
        return [(number, Sample(made.ids, list(made.logps))) for number, made in zip(attempts, sampled, strict=True)]

    def anyone(self, here: bool) -> bool:
        """Return whether an attempt of this process is left."""
        return here

    def close(self) -> None:
        """End the engine after a generation; the sampler stays."""


class ServerEngine(WaveEngine):
    """A vLLM server that one process trains with: each turn is a request of its own, sent when it is ready.

    A request that is done writes a byte to a pipe, which wakes the loop. Should the server die, failed requests are
    sent again once it is back and has the weights.
    """

    waits = False

    def __init__(self, sampling: Sampling, attempts: Sequence[AttemptId]) -> None:
        super().__init__(sampling, attempts)
        self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="turn")
        self._asked: dict[Future[Sample], tuple[list[int], int, int]] = {}
        self._pipe_read, self._pipe_write = os.pipe()
        os.set_blocking(self._pipe_read, False)
        self.descriptor = self._pipe_read

    @property
    def pending(self) -> int:  # type: ignore[override]
        """Turns that are being sampled."""
        return len(self._asked)

    def generate(
        self, contexts: list[list[int]], limits: list[int], attempts: list[int]
    ) -> list[tuple[int, Sample]]:  # fmt: skip
        """Send a request for each context; return the turns that have come back."""
        for turn in zip(contexts, limits, attempts, strict=True):
            self._ask(*turn)
        done = [future for future in self._asked if future.done()]
        with suppress(BlockingIOError):  # a request may be done a moment before its byte is in the pipe
            os.read(self._pipe_read, max(1, len(done)))
        found, failed = [], []
        for future in done:
            turn = self._asked.pop(future)
            if (error := future.exception()) is None:
                found.append((turn[2], future.result()))
            else:
                assert isinstance(error, Exception)
                failed.append((error, turn))
        if failed:
            server = self.sampling.vllm
            assert server is not None
            server.wait_for_server([error for error, _ in failed])
            server.sync_weights()
            for _, turn in failed:
                self._ask(*turn)
        return found

    def _ask(self, context: list[int], limit: int, attempt: int) -> None:
        seed = int(self._streams[attempt].integers(2**31))
        future = self._threads.submit(self._sampled, context, limit, seed)
        self._asked[future] = (context, limit, attempt)
        future.add_done_callback(lambda _: os.write(self._pipe_write, b"."))

    def _sampled(self, context: list[int], limit: int, seed: int) -> Sample:
        assert self.sampling.vllm is not None
        ids, logprobs = self.sampling.vllm.completion_of(context, limit, seed)
        return Sample(ids, [known[0] for known in logprobs])

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)
        os.close(self._pipe_read)
        os.close(self._pipe_write)
