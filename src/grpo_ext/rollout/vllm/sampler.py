"""A vLLM server as a sampler beside training: every process sends its own requests, the main one the weights."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from grpo_ext.errors import ServerLost
from grpo_ext.rollout.samplers import Sampled, failing_together
from grpo_ext.rollout.vllm.client import Client, ServerTrouble, in_thread
from grpo_ext.rollout.vllm.generation import LONGEST_PAUSE, Generation, broadcast, first, seeded_request
from grpo_ext.rollout.vllm.repairs import Repairs, shared_store
from grpo_ext.rollout.vllm.server import CONNECTIONS
from grpo_ext.rollout.vllm.support import read
from grpo_ext.rollout.vllm.weights import HostCopy
from grpo_ext.waiting import shutdown

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class ServerSampler:
    """Samples by a vLLM server, which holds one version of the weights; each process sends its own rows.

    Each row is a request of its own with a seed from its stream. The settings of sampling are those of the moment when
    this object is made. Weights go to the server from the main process, which keeps a copy of them in its memory: if
    the server dies while a request waits, a thread of the main process pushes the copy once the server is back, and
    the request is sent again. No collective is started by a thread other than the main one.
    """

    _client: Client
    _repairs: Repairs

    def __init__(self, generation: Generation) -> None:
        self._generation, self._copy = generation, HostCopy()
        self._settings, self._bound = generation.settings(), generation.sets_bound if generation.keeps else None
        self._version: int | None = None
        self._running, self._held, self._closed = 0, False, True
        self._changed = threading.Condition()

    @property
    def versions(self) -> frozenset[int]:
        """Numbers of the versions that the server has: at most one."""
        return frozenset(() if self._version is None else (self._version,))

    def _open(self) -> None:
        """Connect this process, and repairs for all; collective."""
        self._client = self._connected()
        repair = self._repair if self._generation.accelerator.is_main_process else None
        self._repairs = Repairs(shared_store(self._generation), self._client, repair)
        self._closed = False

    def _connected(self) -> Client:
        """Return the client of this process: the main one's that pushes weights, or one for requests only."""
        generation = self._generation
        with failing_together():
            try:
                return generation.vllm_client if generation.accelerator.is_main_process else generation.new_client()
            except Exception as error:
                raise ServerLost(f"vLLM server: {error}") from error

    # Weights.

    def publish(self, version: int, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Push the policy's present weights in place of the version before; main thread, collective.

        Waits until all `sample` calls of this process have returned, then, in a barrier, for those of the others: no
        request is computed by two versions, and the prefix cache that is reset then holds nothing that still grows. A
        call returns when the server has answered, or when a repair of the server has failed; neither needs the main
        thread of any process.

        Raises:
            ServerLost: the server died and did not come back; on all processes.
        """
        if self._closed:
            self._open()
        with self._alone():
            self._generation.sync_weights(self._copy)
            self._client.serving = broadcast(self._client.serving)
            self._version = version

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the server to other users of `vllm_generation`, such as an evaluation; main thread, collective.

        Waits as `publish` does. `sample` calls that come meanwhile wait until the end of the context, when the server
        has the published weights again.

        Raises:
            ServerLost: the server died and did not come back; on all processes.
        """
        if self._closed:  # no weights to keep
            yield
            return
        with self._alone():
            yield
            if self._version is not None:
                self._generation.on_main(partial(self._generation.push_again, self._copy))
                self._client.serving = broadcast(self._client.serving)

    def copy_of(self, version: int) -> None:
        """Return None: weights go to the server as they are gathered."""

    def forget(self, version: int) -> None:
        """Do nothing: a push has replaced the version before."""

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold back `sample` calls for a `with` block, which begins when those of all processes have returned."""
        with self._changed:
            self._held = True
            self._changed.wait_for(lambda: not self._running)
        self._generation.accelerator.wait_for_everyone()
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    def _repair(self, trouble: ServerTrouble) -> None:
        """Make the server answer by the published weights again; a thread of the main process."""
        client, device = self._client, self._generation.accelerator.device
        if client.healthy() and client.identity() == client.serving:
            logger.warning(f"vLLM server: {trouble}. It still has the weights and is asked again.")
            return
        if device.type == "cuda":  # a thread begins with the first device
            torch.cuda.set_device(device)
        self._generation.push_again(self._copy, [trouble])

    def close(self) -> None:
        """End all waits; the server drops requests that it still computes when this process ends.

        A later `publish` opens the sampler again.
        """
        if self._closed:
            return
        self._repairs.close()
        with self._changed:
            self._closed, self._version = True, None
            self._changed.notify_all()

    # Completions.

    def sample(
        self, version: int, contexts: list[list[int]], limits: list[int], streams: Sequence[np.random.Generator]
    ) -> list[Sampled]:
        """Sample a completion after each context by the published weights; any thread, blocks.

        Waits for the server's answers; for a server that has died, until it is back or `vllm_server_timeout` seconds
        have passed since its last sign of life; and in `publish` and `paused` until they end.

        Raises:
            ServerLost: the server did not come back or refuses a request, or the sampler was closed.
            RuntimeError: the server no longer has this version.
        """
        seeds = [int(stream.integers(2**31)) for stream in streams]
        rows = zip(contexts, limits, seeds, strict=True)
        with self._entered(version):
            return self._all([partial(self._sampled, *row) for row in rows])

    @contextmanager
    def _entered(self, version: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._held)
            if self._closed:
                raise ServerLost("the run has ended")
            if version != self._version:
                raise RuntimeError(
                    f"version {version} of the weights is gone: a vLLM server holds one, now {self._version}."
                )
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _all(self, requests: Sequence[Callable[[], Sampled]]) -> list[Sampled]:
        """Return the answers to requests, `CONNECTIONS` of them at a time, or raise what one of them raised.

        Their threads do not keep a process from ending. After a failure no further request is sent.
        """
        places, failed = threading.Semaphore(CONNECTIONS), threading.Event()

        def answer(request: Callable[[], Sampled]) -> Sampled | None:
            with places:
                return None if self._closed or failed.is_set() else request()

        answers = [in_thread(partial(answer, request)) for request in requests]
        waiting = set(answers)
        while waiting and not self._closed:
            ended, waiting = wait(waiting, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            if any(future.exception() is not None for future in ended):
                failed.set()
        if self._closed:
            raise ServerLost("the run has ended")
        found = [future.result() for future in answers]
        return [row for row in found if row is not None]

    def _sampled(self, context: list[int], limit: int, seed: int) -> Sampled:
        """Request one completion, again after each repair of the server."""
        generation, troubles = self._generation, list[ServerTrouble]()
        request = seeded_request(self._settings, limit, seed)
        while True:
            repairs = self._repairs.made
            try:
                return read(*first(self._client.complete([context], **request)), bound=self._bound)
            except ServerTrouble as trouble:
                troubles.append(trouble)
            except RuntimeError as error:
                raise ServerLost(f"vLLM server: {error}") from error
            late = time.monotonic() - troubles[0].since > generation.server_timeout
            if late or shutdown().wait(min(0.5 * len(troubles), LONGEST_PAUSE)):
                raise generation.lost(troubles[-1])
            self._repairs.wait(repairs, troubles)
