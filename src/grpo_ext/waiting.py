"""One way to wait for another process: a limit, a line after some silence, and an end at once on a signal."""

import asyncio
import logging
import math
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)


class _Other:
    """Facts about something that a run waits for, known by all the waits of its threads.

    Attributes:
        longest: seconds of the longest silence that a line has named.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        self._heard, self._silent_since = -math.inf, math.inf
        self._lock = threading.Lock()

    @property
    def patience(self) -> float:
        """Seconds of silence after which a line names it: the longest one before, from 8 to 30."""
        return min(max(SILENT_SECONDS, self.longest), max(SILENT_SECONDS, MOST_SILENT_SECONDS))

    def hear(self) -> bool:
        """Note a sign of life. Return whether a line has named the silence before it."""
        with self._lock:
            self._heard, since = time.monotonic(), self._silent_since
            self._silent_since = math.inf
            if since == math.inf:
                return False
            self.longest = max(self.longest, self._heard - since)
            return True

    def silence(self, since: float, patience: float) -> float | None:
        """Return seconds of silence for a wait that began at `since`, if a line is to name it; one of all waits."""
        with self._lock:
            since = max(since, self._heard)
            seconds = time.monotonic() - since
            if seconds < patience or self._silent_since != math.inf:
                return None
            self._silent_since = since
            return seconds


class Shutdown(threading.Event):
    """The end of a run by a signal: waits then end without what they wait for.

    Attributes:
        since: time at which it was set, by `time.monotonic`; infinity while it is not set.
        others: what the run has waited for, by name.
    """

    since = math.inf

    def __init__(self) -> None:
        super().__init__()
        self.others: defaultdict[str, _Other] = defaultdict(_Other)

    def set(self) -> None:
        """Set it."""
        self.since = min(self.since, time.monotonic())
        super().set()


_of_runs = [Shutdown()]
"""One for each run in progress, the innermost last; the first is of no run and is never set."""


def shutdown() -> Shutdown:
    """Return the shutdown of the run in progress; one that is never set where there is no run."""
    return _of_runs[-1]


@contextmanager
def ended_by(event: Shutdown) -> Iterator[None]:
    """Let all waits of this process end when `event` is set, for a `with` block."""
    _of_runs.append(event)
    try:
        yield
    finally:
        _of_runs.remove(event)


SIGNALLED = "not waited for, since a signal ends the run"
POLL_SECONDS = 0.5
SILENT_SECONDS, MOST_SILENT_SECONDS = 8.0, 30.0
"""After which a line names what is waited for: the first time, and at most."""
GRACE_SECONDS = 5.0
"""For which a run that a signal ends still waits for rewards and environments: what was sampled would be lost."""


class WaitedInVain(RuntimeError):
    """What was waited for has not come.

    Attributes:
        since: time of its last sign of life, by `time.monotonic`.
    """

    def __init__(self, message: str, since: float) -> None:
        super().__init__(message)
        self.since = since


class Interrupted(BaseException):
    """Others' code was ended by another thread, or by a signal that ends the run: no failure of its own."""


class Wait:
    """A wait that ends when there was no progress for `limit` seconds, or on a signal.

    A run that ends by a signal saves its last whole step; what it waited for is made again when it resumes.

    Args:
        what: is waited for; the subject of a message. Waits for the same, also of other threads, share one line.
        limit: seconds without progress.
        setting: that sets the limit.
        grace: seconds for which it goes on after a signal.

    Attributes:
        silent: seconds without progress after which a line names what is waited for.
        since: time of the last progress, by `time.monotonic`.
    """

    def __init__(self, what: str, limit: float, setting: str, grace: float = 0.0) -> None:
        self.what, self.limit, self.setting, self.grace = what, limit, setting, grace
        self._other = shutdown().others[what]
        self.silent, self.since = self._other.patience, time.monotonic()

    def progressed(self) -> None:
        """Note a sign of life, or the end of the wait."""
        self.since = time.monotonic()
        if self._other.hear():
            logger.warning(f"{self.what}: it answers again.")

    @property
    def left(self) -> float:
        """Seconds to the limit."""
        return self.since + self.limit - time.monotonic()

    def seconds(self) -> float:
        """Return for how long to wait until this is called again.

        Raises:
            WaitedInVain: the limit has passed, or a signal ends the run.
        """
        seconds = self.look()
        if self.left <= 0:
            raise WaitedInVain(f"no sign of life for {self.setting}={self.limit:g} s", self.since)
        return min(seconds, self.left)

    def look(self) -> float:
        """Return the same where the caller keeps the limit.

        Raises:
            WaitedInVain: a signal ends the run.
        """
        if _signalled(self.grace):
            raise WaitedInVain(SIGNALLED, self.since)
        if (silent := self._other.silence(self.since, self.silent)) is not None:
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + self.left))
            line = f"no sign of life for {silent:.0f} s. Waiting until {until} ({self.setting}={self.limit:g} s)."
            logger.warning(f"{self.what}: {line}")
        return POLL_SECONDS


def _signalled(grace: float) -> bool:
    """Return whether a signal ends the run since `grace` seconds."""
    return time.monotonic() - shutdown().since >= grace


_LEAVE = getattr(signal, "SIGRTMIN", 0)
"""Signal that a thread sends to the main one, so that others' code there is left; none on macOS and Windows."""


@contextmanager
def named(what: str, cure: str) -> Iterator[None]:
    """Write a line if a `with` block, which runs others' code in this process without a limit, takes long.

    Args:
        what: runs; the subject of the line.
        cure: ends the line.

    Raises:
        Interrupted: a signal ends the run, and the block, in the main thread, has not ended in its grace.
    """
    other, began, over = shutdown().others[what], time.monotonic(), threading.Event()
    patience, thread = other.patience, threading.current_thread()
    leaves = _LEAVE and thread is threading.main_thread()

    def leave(*_: object) -> None:
        if not over.is_set():
            raise Interrupted(f"{what}: {SIGNALLED}")

    def watch() -> None:
        while not over.wait(min(POLL_SECONDS, patience)):
            if (silent := other.silence(began, patience)) is not None:
                logger.warning(f"{what}: it has not returned for {silent:.0f} s, and nothing limits it. {cure}")
            if leaves and _signalled(GRACE_SECONDS):
                signal.pthread_kill(thread.ident or 0, _LEAVE)

    before = signal.signal(_LEAVE, leave) if leaves else None
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
        if leaves:
            signal.signal(_LEAVE, before or signal.SIG_IGN)
        if other.hear():
            logger.warning(f"{what}: it has returned.")


async def awaited(result: Awaitable[T]) -> T:
    """Return the result of others' async code.

    Raises:
        Interrupted: a signal ends the run, and it has not come in its grace.
    """
    task = asyncio.current_task()
    assert task is not None

    async def watch() -> None:
        while not _signalled(GRACE_SECONDS):
            await asyncio.sleep(POLL_SECONDS)
        task.cancel()

    watcher = asyncio.ensure_future(watch())  # not the code itself: a SystemExit in a task ends its loop
    try:
        return await result
    except asyncio.CancelledError:
        if not watcher.done():
            raise
        task.uncancel()
        raise Interrupted(SIGNALLED) from None
    finally:
        watcher.cancel()


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Run `call` in a daemon thread, which does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
