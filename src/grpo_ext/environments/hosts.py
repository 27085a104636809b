"""Where environments run: a process for each attempt, a thread, or here and now; asked alike, all at the same time."""

import atexit
import itertools
import json
import math
import os
import pickle
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from grpo_ext.environments.composition import EnvironmentSpec, functions_of
from grpo_ext.environments.seat import GARBAGE, LENGTH, Seat, serve
from grpo_ext.rewards.workers.pool import LAST_SECONDS, LOADING_SECONDS, Worker, cause_of_death
from grpo_ext.rewards.workers.worker import packed

CHILD = "from grpo_ext.environments.nursery_child import main; main()"
LARGEST = 2**26
"""Bytes of an answer; more is no answer."""
GRACE = 5.0
"""Seconds that an answer may go on, whose beginning is there when its time is up."""
TIMEOUT, DIED = "timeout", "died"
"""Kinds of failure that are known here."""
SLOW = "Raise turn_timeout; what is slow to import or load, load once for all attempts in a class method preload."
"""Cure of a timeout."""


class Answer(NamedTuple):
    """What came of a request."""

    value: dict[str, Any]
    failure: str | None
    """Kind and reason, "died: it was killed by SIGKILL"; None where there is none."""
    seconds: float


class Failed(RuntimeError):
    """A kind of failure and its reason."""


@dataclass(eq=False)
class Line:
    """One attempt's environment, as it is spoken to."""

    spec: EnvironmentSpec
    number: int
    nursery: "Nursery | None" = None
    channel: socket.socket | None = None
    """To a process or a thread; None where it answers at once."""
    seat: Seat | None = None
    asked: float = 0.0
    deadline: float = float("inf")
    seconds: float = float("inf")
    """That an answer may take, from when the request is sent."""
    late: bool = False
    """Whether it was still writing when its time was up."""
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    received: bytearray = field(default_factory=bytearray)

    def ask(self, request: tuple[str, Any], seconds: float) -> None:
        """Begin to send a request."""
        body = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        self.unsent = memoryview(LENGTH.pack(len(body)) + body)
        self.asked, self.seconds, self.late = time.monotonic(), seconds, False
        self.deadline = self.asked + seconds
        self.push()

    def push(self) -> None:
        """Send what is taken now; that nobody is there shows when the answer is read."""
        assert self.channel is not None
        try:
            while self.unsent:
                self.unsent = self.unsent[self.channel.send(self.unsent) :]
                self.deadline = time.monotonic() + self.seconds
        except BlockingIOError:
            pass
        except OSError:
            self.unsent = memoryview(b"")

    def read(self) -> dict[str, Any] | None:
        """The answer, if all of it is there.

        Raises:
            Failed: it is none, or nobody is there any more.
        """
        assert self.channel is not None
        try:
            chunk = self.channel.recv(1 << 20)
        except BlockingIOError:
            return None
        except OSError:
            chunk = b""
        if not chunk:
            raise Failed(f"{DIED}: {self._cause()}")
        self.received += chunk
        if len(self.received) < LENGTH.size:
            return None
        size = LENGTH.unpack_from(self.received)[0]
        if size > LARGEST:
            raise Failed(f"{GARBAGE}: an answer of {size} bytes, where {LARGEST} are the most")
        if len(self.received) < LENGTH.size + size:
            return None
        body = bytes(self.received[LENGTH.size : LENGTH.size + size])
        self.received.clear()
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise Failed(f"{GARBAGE}: what it wrote is no answer: {body[:80]!r}")
        if isinstance(failed := answer.get("failed"), list):
            raise Failed(": ".join(map(str, failed)))
        return answer

    def _cause(self) -> str:
        code = None if self.nursery is None else self.nursery.exit_code(self.number)
        return "it closed its side" if code is None else cause_of_death(code)

    def close(self) -> None:
        """End it with all that it started; a thread ends when its environment returns."""
        if self.channel is not None:
            self.channel.close()
        if self.nursery is not None:
            self.nursery.kill(self.number)
        if self.seat is not None:
            self.seat.close()


class Nursery:
    """Forks the processes of one environment from one that has imported it."""

    def __init__(self, spec: EnvironmentSpec, memory_gib: float) -> None:
        """Import it.

        Raises:
            Failed: it cannot be imported, or not in time.
        """
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._worker = Worker(memory_gib, CHILD, (theirs.fileno(),))
        finally:
            theirs.close()
        self._codes: dict[int, int | None] = {}
        self._living: set[int] = set()
        arguments = {"tools": list(spec.tools), "kwargs": dict(spec.kwargs)}
        request = packed(str(spec.environment or ""), arguments)
        self._worker.unsent = memoryview(LENGTH.pack(len(request)) + request)
        self._worker.push()
        self._ended = False
        answer = self._next(LOADING_SECONDS)
        if answer is None or answer[0] != "loaded":
            code = self.close()
            late = f"it could not be imported within {LOADING_SECONDS:g} s"
            lost = f"{cause_of_death(code)} while it was being imported" if self._ended else late
            raise Failed(f"{DIED}: {answer[1] if answer else lost}")

    def _next(self, seconds: float) -> tuple | None:
        """The next that it says, or None."""
        end = time.monotonic() + seconds
        try:
            answer = self._worker.next_answer()
            while answer is None:
                with selectors.DefaultSelector() as selector:
                    selector.register(self._worker.answers, selectors.EVENT_READ)
                    if self._worker.unsent:  # a request that is larger than a pipe
                        selector.register(self._worker.requests, selectors.EVENT_WRITE)
                    ready = {key.fd for key, _ in selector.select(max(0.0, end - time.monotonic()))}
                if not ready:
                    return None
                self._worker.push()
                if self._worker.answers in ready:
                    answer = self._worker.read()
        except EOFError:
            self._ended = True
            return None
        return answer

    @property
    def lost(self) -> bool:
        """Whether the process is gone."""
        return self._worker.process.poll() is not None

    def fork(self, number: int, seed: int) -> socket.socket:
        """Our end of a line to a new process."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [f"fork {number} {seed}".encode()], [theirs.fileno()])
        self._living.add(number)
        ours.setblocking(False)
        return ours

    def exit_code(self, number: int) -> int | None:
        """Of a process that has closed its line; None where nobody can say."""
        self.kill(number)
        end = time.monotonic() + LAST_SECONDS
        while number in self._living:
            if not self._heed(max(0.0, end - time.monotonic())):
                return None
        return self._codes.get(number)

    def _heed(self, seconds: float = 0.0) -> bool:
        """Take note of a process that has ended, if it says so in time."""
        said = self._next(seconds)
        if said is not None:
            self._codes[said[1]] = said[2]
            self._living.discard(said[1])
        return said is not None

    def kill(self, number: int) -> None:
        """End a process."""
        while number in self._living and self._heed():  # what nobody reads would stop its writing
            continue
        if number in self._living:
            self._tell(f"kill {number}")

    def drain(self) -> None:
        """Forget those that are gone."""
        while self._heed():
            continue
        self._codes.clear()

    def _tell(self, what: str) -> None:
        try:
            self._control.send(what.encode())
        except OSError:  # it is gone, and its forks with it
            return

    def close(self) -> int:
        """End it, its forks and what they left behind; return its exit code."""
        self._living.clear()
        self._tell("stop")
        code = self._worker.kill(LAST_SECONDS)
        self._control.close()
        return code


class Hosts:
    """All environments of a process that are open now."""

    def __init__(self, memory_gib: float = 8.0) -> None:
        """Nothing is started before the first is opened."""
        self.memory_gib = memory_gib
        self._nurseries: dict[str, Nursery] = {}
        self._refused: dict[str, Failed] = {}
        """Those that could not be imported, until the next generation."""
        self._numbers = itertools.count()
        self._owner = os.getpid()
        atexit.register(self.close)

    def open(self, spec: EnvironmentSpec, seed: int) -> Line:
        """An environment for one attempt, not yet reset.

        Raises:
            Failed: it cannot be started.
        """
        number = next(self._numbers)
        if spec.isolated:
            nursery = self._nursery(spec)
            return Line(spec, number, nursery, nursery.fork(number, seed))
        seat = Seat(spec.make, functions_of(spec.tools), seed)
        if spec.at_once:
            return Line(spec, number, seat=seat)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        threading.Thread(target=serve, args=(theirs, seat), daemon=True, name=f"environment {spec.name}").start()
        return Line(spec, number, channel=ours)

    def _nursery(self, spec: EnvironmentSpec) -> Nursery:
        nursery = self._nurseries.get(spec.name)
        if nursery is not None and nursery.lost:
            nursery.close()
            nursery = None
        if nursery is None:
            if spec.name in self._refused:
                raise self._refused[spec.name]
            try:
                nursery = self._nurseries[spec.name] = Nursery(spec, self.memory_gib)
            except Failed as failure:
                self._refused[spec.name] = failure
                raise
        return nursery

    def drain(self) -> None:
        """Take note of the processes that have ended."""
        self._refused.clear()
        for nursery in self._nurseries.values():
            nursery.drain()

    def close(self) -> None:
        """End all processes; a further `open` starts others."""
        if os.getpid() == self._owner:
            while self._nurseries:
                self._nurseries.popitem()[1].close()


def answers(lines: list[Line], seconds: float, also: int | None) -> tuple[list[tuple[Line, Answer]], bool]:
    """Those that have answered or are overdue, and whether descriptor `also` is readable; waits for the first of them.

    At most so many seconds.
    """
    end = time.monotonic() + seconds
    while True:
        found, spoken = _look(lines, end, also)
        if found or spoken or time.monotonic() >= end:
            return found, spoken


def _look(lines: list[Line], end: float, also: int | None) -> tuple[list[tuple[Line, Answer]], bool]:
    """As `answers`, but what is sent or received in part ends it too."""
    with selectors.DefaultSelector() as selector:
        for line in lines:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unsent else 0)
            selector.register(line.channel, events, line)  # type: ignore[arg-type]
        if also is not None:
            selector.register(also, selectors.EVENT_READ)
        until = min((line.deadline for line in lines), default=math.inf)
        found = {key.data: events for key, events in selector.select(max(0.0, min(end, until) - time.monotonic()))}
    return list(_answered(lines, found)), None in found


def _answered(lines: list[Line], found: Mapping[Line, int]) -> Iterator[tuple[Line, Answer]]:
    now = time.monotonic()
    for line in lines:
        answer = None
        if found.get(line, 0) & selectors.EVENT_WRITE:
            line.push()
        if found.get(line, 0) & selectors.EVENT_READ:
            answer = _read(line, now)
        if answer is None and now >= line.deadline:
            if line.received and not line.late:  # more than a socket holds, while nobody looked
                line.late, line.deadline = True, now + GRACE
                continue
            reason = f"{TIMEOUT}: it did not answer within {line.seconds:g} s. {SLOW}"
            answer = Answer({}, reason, now - line.asked)
        if answer is not None:
            yield line, answer


def _read(line: Line, now: float) -> Answer | None:
    try:
        value = line.read()
    except Failed as failure:
        return Answer({}, str(failure), now - line.asked)
    return None if value is None else Answer(value, None, now - line.asked)
