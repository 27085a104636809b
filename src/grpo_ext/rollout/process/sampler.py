"""ProcessSampler: transformers in a process beside the trainer's."""

import logging
import os
import pickle
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import count
from multiprocessing import Pipe
from multiprocessing.reduction import send_handle
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from grpo_ext.child_processes import EXIT_SECONDS, describe_exit, start_python
from grpo_ext.errors import SamplerLost
from grpo_ext.rollout.process.memory_file import MemoryFile, read
from grpo_ext.rollout.process.messages import Failure, SampleRequest, Start, Table
from grpo_ext.rollout.prompt_cache import Unsupported
from grpo_ext.rollout.samplers import Sampled
from grpo_ext.rollout.seeds import uniform_numbers
from grpo_ext.waiting import Wait, WaitedInVain, shutdown

logger = logging.getLogger(__name__)

STARTING_SECONDS = 60.0
"""Seconds that a new process may need for its imports and its model before a line is logged."""
_PROGRAM = "from grpo_ext.rollout.process.child import main; main()"


class _Published(NamedTuple):
    """A version of the weights."""

    copy: int
    """Its place among all that were published: a version's number may come again with other weights."""
    file: MemoryFile
    table: Table


class Trouble(RuntimeError):
    """A process did not answer a request."""


class ProcessSampler:
    """Samples in a process of its own, which has the policy without adapters.

    `sample` waits for the process's answer; it also ends when the process dies, or when `close` kills it. A request
    that fails, or that makes no progress for `limit` seconds, is sent once more, to a new process.

    Args:
        weights: yields the policy's present weights and buffers under the names of the model without adapters;
            collective where they are spread over processes.
        start: describes model, decoding and machine; called once, on the main thread.
        limit: seconds without progress, `ddp_timeout`.
    """

    def __init__(
        self, weights: Callable[[], Iterator[tuple[str, Tensor]]], start: Callable[[], Start], limit: float
    ) -> None:
        self._weights, self._describe, self._limit = weights, start, limit
        self._start: Start | None = None
        self._process: _Process | None = None
        self._versions: dict[int, _Published] = {}
        self._spare: list[MemoryFile] = []
        self._copies = count()
        self._one_at_a_time, self._starting = threading.Lock(), threading.Lock()
        self._closed = False

    @property
    def versions(self) -> frozenset[int]:
        """Numbers of the versions that are published."""
        return frozenset(self._versions)

    def publish(self, version: int, weights: Mapping[str, Tensor] | None = None) -> None:
        """Copy the policy's present weights, or others, under this number; does not wait for requests."""
        self._closed = False
        if self._start is None:
            self._start = self._describe()
        self._running()  # it starts while the weights are copied
        self.forget(version)
        file = self._spare.pop() if self._spare else MemoryFile()
        named = self._weights() if weights is None else weights.items()
        self._versions[version] = _Published(next(self._copies), file, file.write(named))

    def copy_of(self, version: int) -> dict[str, Tensor]:
        """Return a copy of a version."""
        published = self._versions[version]
        return dict(read(published.table, published.file.descriptor))

    def sample(
        self,
        version: int,
        contexts: list[list[int]],
        limits: list[int],
        streams: Sequence[np.random.Generator],
        images: Sequence[Any] | None = None,
    ) -> list[Sampled]:
        """Sample a completion after each context; a row takes as many numbers of its stream as its limit.

        Raises:
            SamplerLost: the request failed twice, or the sampler was closed.
            Unsupported: the model cannot be decoded exactly.
        """
        assert not any(images or ()), "images are refused with the process"
        if not contexts:
            return []
        uniforms = uniform_numbers(streams, limits, len(contexts), max(limits))
        request = SampleRequest(None, None, contexts, limits, uniforms)
        with self._one_at_a_time:
            try:
                return self._ask(version, request)
            except Trouble as trouble:
                if shutdown().is_set():
                    raise SamplerLost(str(trouble)) from None
                if not self._closed:
                    logger.warning(f"the process that samples completions: {trouble}. It is started and asked again.")
            try:
                return self._ask(version, request)
            except Trouble as trouble:
                raise SamplerLost(f"The process that samples completions failed twice: {trouble}.") from None

    def _ask(self, version: int, request: SampleRequest) -> list[Sampled]:
        try:
            return self._running().sample(request, self._versions[version], self._limit)
        except BaseException:
            self._end_process()
            raise

    def _running(self) -> "_Process":
        """Return the process; start it if there is none."""
        with self._starting:
            if self._closed:
                raise SamplerLost("the process that samples was closed")
            if self._process is None:
                assert self._start is not None
                self._process = _Process(self._start)
            return self._process

    def forget(self, version: int) -> None:
        """Drop a version; the memory is kept for the next one."""
        if (published := self._versions.pop(version, None)) is not None:
            self._spare.append(published.file)

    def paused(self) -> nullcontext[None]:
        """Return an empty context: an evaluation samples in the trainer's process."""
        return nullcontext()

    def close(self) -> None:
        """End the process, also while it samples, and free the memory of all versions."""
        self._closed = True
        self._end_process()
        for version in self.versions:
            self.forget(version)
        while self._spare:
            self._spare.pop().close()

    def _end_process(self) -> None:
        with self._starting:
            process, self._process = self._process, None
        if process is not None:
            process.end()


class _Process:
    """A process that samples, as its parent has it."""

    def __init__(self, start: Start) -> None:
        self._start: Start | None = start
        self._loaded = -1
        self._connection, theirs = Pipe()
        with theirs:
            self._child = start_python(_PROGRAM, (theirs.fileno(), os.getpid()), [theirs.fileno()])

    def sample(self, request: SampleRequest, weights: _Published, limit: float) -> list[Sampled]:
        """Return the completions of a request.

        Raises:
            Trouble: there was no answer, none for `limit` seconds, or a failure; or a signal ends the run.
            Unsupported: the model cannot be decoded exactly.
        """
        stale = weights.copy != self._loaded
        request = request._replace(start=self._start, weights=weights.table if stale else None)
        try:
            self._connection.send_bytes(pickle.dumps(request))
            if stale:
                send_handle(self._connection, weights.file.descriptor, self._child.pid)
            waiting = Wait("The process that samples completions", limit, "ddp_timeout")
            if self._start is not None:
                waiting.silent = STARTING_SECONDS
            answer: list[Sampled] | Failure = []
            while not answer:  # empty while it decodes
                while not self._connection.poll(waiting.seconds()):
                    pass
                answer = pickle.loads(self._connection.recv_bytes())
                waiting.progressed()
        except WaitedInVain as error:
            raise Trouble(str(error)) from None
        except (EOFError, OSError):
            raise Trouble(self._exit()) from None
        if isinstance(answer, Failure) and answer.unsupported:
            raise Unsupported(f"rollout_engine='process': {answer.reason}. Set rollout_engine: auto.")
        if isinstance(answer, Failure):
            raise Trouble(answer.reason)
        self._start, self._loaded = None, weights.copy
        return answer

    def _exit(self) -> str:
        """Return how the process ended, which has closed its connection."""
        try:
            return describe_exit(self._child.wait(EXIT_SECONDS))
        except subprocess.TimeoutExpired:
            return "it closed its connection"

    def end(self) -> None:
        """Kill the process."""
        self._child.kill()
        self._child.wait()
        self._connection.close()
