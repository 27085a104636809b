"""One way to wait for another process: a limit, a line when nothing happens, and an end at once on a signal."""

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class Shutdown(threading.Event):
    """The end of a run by a signal: waits then end without what they wait for.

    Attributes:
        since: time at which it was set, by `time.monotonic`; infinity while it is not set.
    """

    since = math.inf

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
SILENT_SECONDS = 8.0
GRACE_SECONDS = 5.0
"""For which a run that a signal ends still waits for rewards and environments: what was sampled would be lost."""


_told_of: dict[str, float] = {}
"""Seconds of the longest wait that a line has told of, by what was waited for."""


class WaitedInVain(RuntimeError):
    """What was waited for has not come.

    Attributes:
        since: time of its last sign of life, by `time.monotonic`.
    """

    def __init__(self, message: str, since: float) -> None:
        super().__init__(message)
        self.since = since


class Wait:
    """A wait that ends when there was no progress for `limit` seconds, or on a signal.

    A run that ends by a signal saves its last whole step; what it waited for is made again when it resumes.

    Args:
        what: is waited for; the subject of a message.
        limit: seconds without progress.
        setting: that sets the limit.
        grace: seconds for which it goes on after a signal.

    Attributes:
        silent: seconds without progress after which a line says what is waited for: 8, and twice the longest of which
            a line has told.
        since: time of the last progress, by `time.monotonic`.
    """

    def __init__(self, what: str, limit: float, setting: str, grace: float = 0.0) -> None:
        self.what, self.limit, self.setting, self.grace = what, limit, setting, grace
        self.silent, self._told = max(SILENT_SECONDS, 2 * _told_of.get(what, 0.0)), False
        self.since = time.monotonic()

    def progressed(self) -> None:
        """Note a sign of life."""
        if self._told:
            _told_of[self.what] = max(_told_of.get(self.what, 0.0), time.monotonic() - self.since)
            logger.warning(f"{self.what}: it answers again.")
        self.since, self._told = time.monotonic(), False

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
        now = time.monotonic()
        silent = now - self.since
        if now - shutdown().since >= self.grace:
            raise WaitedInVain(SIGNALLED, self.since)
        if silent >= self.silent and not self._told:
            self._told = True
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + self.limit - silent))
            line = f"no sign of life for {silent:.0f} s. Waiting until {until} ({self.setting}={self.limit:g} s)."
            logger.warning(f"{self.what}: {line}")
        return POLL_SECONDS
