"""Where environments run: in a process for each episode, in a thread, or in this one; all at the same time."""

import atexit
import itertools
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeAlias

from grpo_ext.child_processes import describe_exit, free_descriptors
from grpo_ext.environments.composition import EnvironmentSpec, functions_of
from grpo_ext.environments.endpoint.server import Endpoint
from grpo_ext.environments.fork_server import ForkServer, import_request
from grpo_ext.environments.session import (
    EnvironmentFailed,
    FailureKind,
    Session,
    SessionRequest,
    encoded,
    serve_session,
)
from grpo_ext.errors import redacted_text, secret_variables
from grpo_ext.frames import FrameError, FrameStream, parsed_json, pickled, wait

logger = logging.getLogger(__name__)
_Imported: TypeAlias = tuple[bytes, tuple[str, ...]]
_OF_AN_ATTEMPT = 4
"""Descriptors, the connections of an agent among them."""
_LARGEST = 2**26
"""Most bytes of an answer."""
_OUTPUT = 2000
"""Bytes of the output of each program of an agent that are kept."""
GRACE = 5.0
"""Seconds by which the deadline is extended for an answer that has begun to arrive."""
SLOW = "Raise turn_timeout, or load slow imports and data once for all episodes in a class method preload."
"""Cure of a timeout."""


class Answer(NamedTuple):
    """The result of a request."""

    value: dict[str, Any]
    failure: str | None
    """Kind and reason, "died: it was killed by SIGKILL"; None if it succeeded."""
    seconds: float


class Connection:
    """The environment of one episode: in a process or thread behind a socket, or in this thread.

    Args:
        spec: its environment.
        number: unique number of the episode.
        channel: socket to the process or thread; None for a `session` in this thread.
        server: the fork server of its process.
        session: answers in this thread.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        number: int,
        channel: socket.socket | None,
        server: ForkServer | None = None,
        session: Session | None = None,
    ) -> None:
        self.spec, self.number, self.channel, self.server, self.session = spec, number, channel, server, session
        if channel is not None:
            self.stream = FrameStream(channel, _LARGEST)
        self.asked_at, self.seconds, self.extended_until, self.paused = 0.0, math.inf, 0.0, 0.0

    def ask(self, request: SessionRequest, seconds: float) -> Answer | None:
        """Begin to send a request, to be answered in `seconds`. Return the answer if it is immediate."""
        self.asked_at, self.seconds, self.extended_until = time.monotonic(), seconds, 0.0
        if self.session is not None:
            value = parsed_json(encoded(self.session.answer(request)))
            failure = ": ".join(value["failed"]) if "failed" in value else None
            return Answer(value, failure, time.monotonic() - self.asked_at)
        self.stream.sent_at = self.asked_at
        self.stream.send(pickled(request))
        return None

    @property
    def deadline(self) -> float:
        """Monotonic time until which an answer may come; its time starts when the request is sent."""
        return max(self.stream.sent_at + self.seconds, self.extended_until)

    def pause(self) -> None:
        """Stop the clock, while an agent waits for the model."""
        if not math.isinf(self.seconds):
            self.seconds, self.paused = math.inf, time.monotonic()

    def resume(self, *, anew: bool) -> None:
        """Start the clock again: anew after the model has answered an agent, else where it stood."""
        if not math.isinf(self.seconds):
            return
        now = time.monotonic()
        self.asked_at += now - self.paused
        self.stream.sent_at = now if anew else self.stream.sent_at + now - self.paused
        self.seconds = self.spec.turn_timeout

    def read(self) -> dict[str, Any] | None:
        """Return the answer, if it is complete.

        Raises:
            EnvironmentFailed: the environment's process is gone, or sent something that is not an answer.
        """
        try:
            body = self.stream.receive()
        except FrameError as error:
            raise EnvironmentFailed(f"{FailureKind.GARBAGE}: {error}") from None
        except EOFError:
            code = None if self.server is None else self.server.exit_code(self.number)
            cause = "it closed its end" if code is None else describe_exit(code)
            raise EnvironmentFailed(f"{FailureKind.DIED}: {cause}") from None
        if body is None:
            return None
        self.stream.received.clear()
        answer = parsed_json(body)
        if not isinstance(answer, dict):
            raise EnvironmentFailed(f"{FailureKind.GARBAGE}: it sent something that is not an answer: {body[:80]!r}")
        if isinstance(failed := answer.get("failed"), list):
            raise EnvironmentFailed(": ".join(map(str, failed)))
        return answer

    def poll(self, readable: bool, now: float) -> Answer | None:
        """Return the answer, or a failure if it is overdue at the monotonic time `now`."""
        try:
            value = self.read() if readable else None
        except EnvironmentFailed as failure:
            return Answer({}, str(failure), now - self.asked_at)
        if value is not None:
            return Answer(value, None, now - self.asked_at)
        if now < self.deadline:
            return None
        if self.stream.received and not self.extended_until:  # an answer larger than a socket that we did not read
            self.extended_until = now + GRACE
            return None
        reason = f"{FailureKind.TIMEOUT}: it did not answer within {self.seconds:g} s. {SLOW}"
        return Answer({}, reason, now - self.asked_at)

    def output(self) -> str:
        """Return the end of the output of an agent's programs, with the place of secrets taken by ***."""
        return "" if self.server is None else redacted_text(self.server.output(self.number, _OUTPUT))

    def close(self) -> None:
        """End the environment with all that it started; a thread ends when its environment returns."""
        if self.channel is not None:
            self.channel.close()
        if self.server is not None:
            self.server.kill(self.number)
        if self.session is not None:
            self.session.close()


def _imported(spec: EnvironmentSpec) -> _Imported:
    return import_request(spec), spec.secrets


def most_episodes(*, raised: bool = True) -> int:
    """Return how many episodes fit at once into this process's hard limit of descriptors, to which it is `raised`."""
    return max(1, free_descriptors(raised=raised) // _OF_AN_ATTEMPT)


class EnvironmentHost:
    """The open environments of this process; the first to be opened starts the first fork server.

    Args:
        memory_gib: memory that each process of an environment may use.
        sampling: the recipe's settings of sampling, from which an agent's requests may not differ.
    """

    def __init__(self, memory_gib: float = 8.0, sampling: Mapping[str, Any] | None = None) -> None:
        self.memory_gib, self.sampling = memory_gib, dict(sampling or {})
        self._endpoint: Endpoint | None = None
        self._servers: dict[_Imported, ForkServer] = {}
        """By what they have imported: environments of one name may have other options."""
        self._failed: dict[_Imported, EnvironmentFailed] = {}
        """Environments that could not be imported in this generation."""
        self._numbers, self._told = itertools.count(), set[str]()
        self._owner = os.getpid()
        atexit.register(self.close)

    def open(self, spec: EnvironmentSpec, seed: int) -> Connection:
        """Return an environment for one episode, not yet reset.

        Raises:
            EnvironmentFailed: it cannot be started.
            WaitedInVain: a signal ends the run.
        """
        number = next(self._numbers)
        if spec.isolated:
            server = self._server(spec)
            try:
                return Connection(spec, number, server.fork(number, seed), server)
            except EnvironmentFailed as failure:
                self._failed[_imported(spec)] = failure
                raise
        session = Session(spec.make, functions_of(spec.tools), seed)
        if spec.at_once:
            return Connection(spec, number, None, session=session)
        ours, theirs = socket.socketpair()
        name = f"environment {spec.name}"
        threading.Thread(target=serve_session, args=(theirs, session), daemon=True, name=name).start()
        return Connection(spec, number, ours)

    @property
    def endpoint(self) -> Endpoint:
        """The server of the agents' requests, which the first use starts."""
        if self._endpoint is None:
            self._endpoint = Endpoint(self.sampling)
        return self._endpoint

    def _server(self, spec: EnvironmentSpec) -> ForkServer:
        imported = _imported(spec)
        server = self._servers.get(imported)
        if server is not None and not server.lost:
            return server
        if server is not None:
            self._servers.pop(imported).close()
        if imported in self._failed:
            raise self._failed[imported]
        try:
            server = ForkServer(spec.name, imported[0], self.memory_gib, self._withheld(spec))
            self._servers[imported] = server
        except EnvironmentFailed as failure:
            self._failed[imported] = failure
            raise
        return server

    def _withheld(self, spec: EnvironmentSpec) -> set[str]:
        """Return the variables that an environment does not get, and name them in the log once."""
        withheld = secret_variables(os.environ).keys() - set(spec.secrets) if spec.is_agent else set()
        if withheld and spec.name not in self._told:
            self._told.add(spec.name)
            names = ", ".join(sorted(withheld))
            logger.warning(f"environment {spec.name}: it does not get {names}. Name what it needs in its `secrets`.")
        return withheld

    def drain(self) -> None:
        """Forget the processes that have ended, and try again to import environments that could not be imported."""
        self._failed.clear()
        for server in self._servers.values():
            server.drain()

    def close(self) -> None:
        """End all processes; a further `open` starts new ones."""
        if os.getpid() == self._owner:
            while self._servers:
                self._servers.popitem()[1].close()
            if self._endpoint is not None:
                self._endpoint.close()
                self._endpoint = None


def answers(
    connections: list[Connection], seconds: float, also: Collection[int] = ()
) -> tuple[list[tuple[Connection, Answer]], set[int]]:
    """Wait at most `seconds` for an answer, a timeout, or one of the descriptors `also` to be readable.

    Returns:
        Connections that have answered or are overdue, with their answers; the descriptors that are readable.
    """
    end = time.monotonic() + seconds
    while True:
        until = min((connection.deadline for connection in connections), default=end)
        readable = wait([connection.stream for connection in connections], min(end, until), also)
        now = time.monotonic()  # before `poll`, which may wait for the end of a process: others may answer meanwhile
        polled = [(connection, connection.poll(connection.stream in readable, now)) for connection in connections]
        ready = [(connection, answer) for connection, answer in polled if answer is not None]
        woken = {descriptor for descriptor in also if descriptor in readable}
        if ready or woken or time.monotonic() >= end:
            return ready, woken
