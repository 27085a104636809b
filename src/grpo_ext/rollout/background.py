"""One thread that works on requests while the main thread trains, first in, first out.

The thread waits for a request, which the main thread submits. The main thread waits for a result, which the thread
sets whether its work succeeds or fails. No request waits for a later one, and `close` answers those that have not
begun, so neither can wait for ever. The thread is a daemon: the process ends without it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")

LAST_SECONDS = 5.0
"""Seconds for which `close` waits for work that has begun."""


class Closed(RuntimeError):
    """The background was closed before it began a request."""


class Background(Generic[Request, Result]):
    """Works on requests in one thread, in their order.

    Args:
        work: makes the result of a request. It runs in the thread: it must not start a collective, nor read what the
            main thread changes.
    """

    def __init__(self, work: Callable[[Request], Result]) -> None:
        self.work = work
        self._requests: SimpleQueue[tuple[Request, Future[Result]] | None] = SimpleQueue()
        self._unfinished: list[Future[Result]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="grpo_ext background")
        self._thread.start()

    def submit(self, request: Request) -> Future[Result]:
        """Queue a request; the future gets its result, or the exception that ended it."""
        future: Future[Result] = Future()
        if self._closed:
            future.set_exception(Closed("the background is closed"))
            return future
        self._unfinished = [*(earlier for earlier in self._unfinished if not earlier.done()), future]
        self._requests.put((request, future))
        return future

    def wait(self) -> None:
        """Wait until all requests have ended, also those that fail."""
        for future in list(self._unfinished):
            future.exception()

    def stop(self) -> None:
        """Begin no further request: they fail with `Closed`."""
        self._closed = True
        self._requests.put(None)

    def close(self) -> None:
        """End the thread after the request that it works on; later ones fail with `Closed`."""
        self.stop()
        self._thread.join(LAST_SECONDS)

    def _run(self) -> None:
        while (item := self._requests.get()) is not None:
            request, future = item
            try:
                if self._closed:
                    raise Closed("the background was closed before this request")
                future.set_result(self.work(request))
            except BaseException as error:
                future.set_exception(error)
