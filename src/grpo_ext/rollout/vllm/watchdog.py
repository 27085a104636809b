"""A time limit on calls that cannot be given one, such as a broadcast by NCCL to a process that has died."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

POLL_SECONDS = 1.0


@contextmanager
def abort_when_stalled(
    abort: Callable[[], object], progress: Callable[[], object], failed: Callable[[], bool], seconds: float
) -> Iterator[threading.Event]:
    """Watch the calls in this context from another thread, and call `abort` once if they stall.

    `abort` must make them return. The context yields an event that is set if it was called.

    Args:
        abort: ends what the calls wait for.
        progress: changes as long as the calls make progress.
        failed: returns whether the calls wait in vain.
        seconds: without progress after which they are aborted.
    """
    over, aborted = threading.Event(), threading.Event()

    def watch() -> None:
        seen, since = progress(), time.monotonic()
        while not over.wait(min(POLL_SECONDS, seconds / 4)):
            if (now := progress()) != seen:
                seen, since = now, time.monotonic()
            if failed() or time.monotonic() - since >= seconds:
                aborted.set()
                abort()
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield aborted
    finally:
        over.set()
