"""Agreement between the threads of all processes about a server that has failed a request."""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from torch.distributed import DistError, HashStore, Store, TCPStore

from grpo_ext.errors import ServerLost
from grpo_ext.rollout.vllm.client import Client, ServerTrouble, address_seen_by, in_thread
from grpo_ext.rollout.vllm.generation import Generation, broadcast
from grpo_ext.rollout.vllm.gloo import open_store

POLL_SECONDS = 0.2


class Repairs:
    """Repairs of one server, numbered from 0: any thread asks for the next one, a thread of the main process makes it.

    A request remembers how many repairs had been made when it was sent. If it fails, its thread asks for the repair
    with that number and waits for the verdict, which is the same for all threads and processes: the identity of the
    server that has the weights again, or the message that ends the run. What unblocks it: the main process's thread
    waits for the server for a limited time and gives a verdict either way, at once if it has made this repair for
    another request; `close` ends all waits of a process, and so does the end of the main process.

    Args:
        store: where the processes meet.
        client: of this process.
        repair: on the main process: makes the server answer by the published weights again, or raises.
    """

    def __init__(self, store: Store, client: Client, repair: Callable[[ServerTrouble], object] | None) -> None:
        self.made = 0
        self._store, self._client = store, client
        self._lock, self._closed = threading.Lock(), threading.Event()
        if repair is not None:
            in_thread(partial(self._watch, repair))

    def wait(self, number: int, troubles: Sequence[ServerTrouble]) -> None:
        """Ask for a repair and wait until it has been made; any thread.

        Args:
            number: of the repair: `made` when the request was sent.
            troubles: failures of the request, attempt by attempt.

        Raises:
            ServerLost: the server did not come back.
        """
        silent = time.monotonic() - troubles[0].since
        try:
            self._store.set(f"asked {number}", json.dumps([str(troubles[-1]), silent]))
            while not self._store.check([f"verdict {number}"]):
                if self._closed.wait(POLL_SECONDS):
                    raise ServerLost("the run has ended")
            identity, lost = json.loads(self._store.get(f"verdict {number}"))
        except DistError as error:
            raise ServerLost(f"{troubles[-1]}; the main process, which pushes weights, has ended") from error
        if lost:
            raise ServerLost(lost)
        with self._lock:
            if number == self.made:
                self.made, self._client.serving = number + 1, identity

    def close(self) -> None:
        """End the waits of this process."""
        self._closed.set()

    def _watch(self, repair: Callable[[ServerTrouble], object]) -> None:
        """Give a verdict on each repair that is asked for; after the first that fails, the same one on all."""
        number, lost = 0, ""
        while not self._closed.wait(POLL_SECONDS):
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
