"""A vLLM server as a sampler beside training: every process sends its own requests, the main one the weights."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed import DistError, HashStore, Store, TCPStore

from grpo_ext.errors import ServerLost
from grpo_ext.rollout.samplers import Sampled, failing_together
from grpo_ext.rollout.vllm.client import Client
from grpo_ext.rollout.vllm.generation import Generation
from grpo_ext.rollout.vllm.gloo import open_store
from grpo_ext.rollout.vllm.pushed import LONGEST_PAUSE, broadcast
from grpo_ext.rollout.vllm.requester import Call, Request, Requester, seed_of
from grpo_ext.rollout.vllm.server import ServerTrouble
from grpo_ext.rollout.vllm.transfer import address_seen_by
from grpo_ext.rollout.vllm.weights import HostCopy
from grpo_ext.waiting import in_thread, shutdown

logger = logging.getLogger(__name__)
REPAIR_SECONDS = 0.2
"""Between two looks for a repair that is requested, or has been made."""


class Repairs:
    """Repairs of one server, numbered from 0: any thread asks for the next one, a thread of the main process makes it.

    A request remembers how many repairs had been made when it was sent. If it fails, its thread asks for the repair
    with that number and waits for the verdict, which is the same for all threads and processes: the identity of the
    server that has the weights again, or the message that ends the run. What unblocks it: the main process's thread
    waits for the server for a limited time and gives a verdict either way, at once if it has made this repair for
    another request; `closed` ends all waits of a process, and so does the end of the main process.

    Args:
        store: where the processes meet.
        client: of this process.
        repair: on the main process: makes the server answer by the published weights again, or raises.
        closed: ends all waits of this process, once it is set.
    """

    def __init__(
        self, store: Store, client: Client, repair: Callable[[ServerTrouble], object] | None, closed: threading.Event
    ) -> None:
        self.done = 0
        self._store, self._client, self._closed, self._lock = store, client, closed, threading.Lock()
        if repair is not None:
            in_thread(partial(self._watch, repair))

    def wait(self, number: int, troubles: Sequence[ServerTrouble]) -> None:
        """Ask for a repair and wait until it has been made; any thread.

        Args:
            number: of the repair: `done` when the request was sent.
            troubles: failures of the request, attempt by attempt.

        Raises:
            ServerLost: the server did not come back.
        """
        silent = time.monotonic() - troubles[0].since
        try:
            self._store.set(f"asked {number}", json.dumps([str(troubles[-1]), silent]))
            while not self._store.check([f"verdict {number}"]):
                if self._closed.wait(REPAIR_SECONDS):
                    raise ServerLost("the run has ended")
            identity, lost = json.loads(self._store.get(f"verdict {number}"))
        except DistError as error:
            raise ServerLost(f"{troubles[-1]}; the main process, which pushes weights, has ended") from error
        if lost:
            raise ServerLost(lost)
        with self._lock:
            if number == self.done:
                self.done, self._client.serving = number + 1, identity

    def _watch(self, repair: Callable[[ServerTrouble], object]) -> None:
        """Give a verdict on each repair that is asked for; after the first that fails, the same one on all."""
        number, lost = 0, ""
        while not self._closed.wait(REPAIR_SECONDS):
            if not self._store.check([f"asked {number}"]):
                continue
            message, silent = json.loads(self._store.get(f"asked {number}"))
            try:
                if not lost:
                    repair(ServerTrouble(message, since=time.monotonic() - silent))
            except Exception as error:
                lost = str(error)
            self._store.set(f"verdict {number}", json.dumps([self._client.serving, lost]))
            number += 1


def shared_store(generation: Generation) -> Store:
    """Return a store in which all processes meet; collective."""
    if generation.accelerator.num_processes == 1:
        return HashStore()
    opened: list[TCPStore] = []
    address = address_seen_by(os.environ.get("MASTER_ADDR", "localhost"))

    def listen() -> None:
        opened.append(open_store(address, 0, generation.server_timeout, trainer=True))

    generation.on_main(listen)
    address, port = broadcast((address, opened[0].port if opened else 0))
    return opened[0] if opened else open_store(address, port, generation.server_timeout, trainer=False)


class ServerSampler:
    """Samples by a vLLM server; each process sends its own rows.

    A server holds one version of whole weights, and as many of an adapter as the run needs, side by side.

    Each row is a request of its own with a seed from its stream. The settings of sampling are those of the moment when
    this object is made. Weights go to the server from the main process, which keeps a copy of them in its memory: if
    the server dies while a request waits, a thread of the main process pushes the copy once the server is back, and
    the request is sent again. No collective is started by a thread other than the main one.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation, self._copy = generation, HostCopy()
        self._settings, self._bound = generation.settings(), generation.support_bound
        self._adapters: dict[int, str | None] = {}
        """The published versions, each with its adapter's name where only that is pushed."""
        self._running, self._held, self._closed = 0, False, threading.Event()
        self._closed.set()
        self._changed = threading.Condition()

    @property
    def versions(self) -> frozenset[int]:
        """Numbers of the versions that the server has: at most one of whole weights."""
        return frozenset(self._adapters)

    def _open(self) -> None:
        """Connect this process, which only sends requests unless it is the main one; collective."""
        generation, main = self._generation, self._generation.accelerator.is_main_process
        with failing_together():
            try:
                url, timeout = generation.server_url, generation.server_timeout
                self._client: Client = generation.vllm_client if main else Client(url, timeout)
            except Exception as error:
                raise ServerLost(f"vLLM server: {error}") from error
        closed = threading.Event()
        self._repairs = Repairs(shared_store(generation), self._client, self._repair if main else None, closed)
        self._requester = Requester(self._client, self._settings, self._bound, self._repeated, closed)
        self._closed = closed

    # Weights.

    def publish(self, version: int, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Push the policy's present weights; main thread, collective.

        An adapter comes beside those before. Whole weights replace the version before: the call first waits until all
        `sample` calls of this process have returned, then, in a barrier, for those of the others. So no request is
        computed by two versions, and the prefix cache that is reset then holds nothing that still grows. A call
        returns when the server has answered, or when a repair of the server has failed; neither needs the main thread
        of any process.

        Raises:
            ServerLost: the server died and did not come back; on all processes.
        """
        if self._closed.is_set():
            self._open()
        beside = self._generation.adapts
        with nullcontext() if beside else self._alone():
            self._generation.sync_weights(self._copy)
            self._client.serving = broadcast(self._client.serving)
            self._keep({**(self._adapters if beside else {}), version: self._generation.adapter})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the server to other users of `vllm_generation`, such as an evaluation; main thread, collective.

        Waits as `publish` does. `sample` calls that come meanwhile wait until the end of the context, when the server
        has the published weights again.

        Raises:
            ServerLost: the server died and did not come back; on all processes.
        """
        if self._closed.is_set():  # no weights to keep
            yield
            return
        with self._alone():
            yield
            if self._adapters:
                self._generation.on_main(partial(self._generation.push_again, self._copy))
                self._client.serving = broadcast(self._client.serving)

    def copy_of(self, version: int) -> None:
        """Return None: weights go to the server as they are gathered."""

    def forget(self, version: int) -> None:
        """Let the next push drop an adapter; whole weights stay until a push replaces them."""
        if self._generation.adapts:
            self._keep({number: name for number, name in self._adapters.items() if number != version})

    def _keep(self, adapters: dict[int, str | None]) -> None:
        self._adapters = adapters
        self._generation.kept = [name for name in adapters.values() if name is not None]

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
        with self._changed:
            self._closed.set()
            self._adapters = {}
            self._changed.notify_all()

    # Completions.

    def sample(
        self,
        version: int,
        contexts: list[list[int]],
        limits: list[int],
        streams: Sequence[np.random.Generator],
        images: Sequence[Any] | None = None,
    ) -> list[Sampled]:
        """Sample a completion after each context by the published weights; any thread, blocks.

        Waits for the server's answers; for a server that has died, until it is back or `vllm_server_timeout` seconds
        have passed since its last sign of life; and in `publish` and `paused` until they end.

        Raises:
            ServerLost: the server did not come back or refuses a request, or the sampler was closed.
            RuntimeError: the server no longer has this version.
        """
        rows = zip(contexts, limits, map(seed_of, streams), images or [None] * len(contexts), strict=True)
        with self._entered(version) as name:
            requests = [Request([context], limit, seed, 1, name, seen) for context, limit, seed, seen in rows]
            return self._requester.ask_all(requests)

    @contextmanager
    def _entered(self, version: int) -> Iterator[str | None]:
        with self._changed:
            self._changed.wait_for(lambda: self._closed.is_set() or not self._held)
            if self._closed.is_set():
                raise ServerLost("the run has ended")
            if version not in self._adapters:
                held = ", ".join(map(str, self._adapters))
                raise RuntimeError(f"version {version} of the weights is gone: the vLLM server has {held or 'none'}.")
            self._running += 1
        try:
            yield self._adapters[version]
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _repeated(self, call: Call) -> list[Sampled]:
        """Return what a request returns, sent again after each repair of the server."""
        generation, troubles = self._generation, list[ServerTrouble]()
        while True:
            repairs = self._repairs.done
            try:
                return call()
            except ServerTrouble as trouble:
                troubles.append(trouble)
            except RuntimeError as error:
                raise ServerLost(f"vLLM server: {error}") from error
            late = time.monotonic() - troubles[0].since > generation.server_timeout
            if late or shutdown().wait(min(0.5 * len(troubles), LONGEST_PAUSE)):
                raise generation.lost(troubles[-1])
            self._repairs.wait(repairs, troubles)
