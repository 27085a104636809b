"""Connections to environments: messages in part, answers that are invalid, environments that are left behind."""

import asyncio
import json
import pickle
import select
import socket
import threading
import time
from contextlib import suppress

import pytest

from grpo_ext.environments.composition import EnvironmentSpec
from grpo_ext.environments.hosts import Connection, answers
from grpo_ext.environments.protocol import Conversation
from grpo_ext.environments.session import Session, serve_session
from grpo_ext.frames import HEADER, frame, read_frame
from support.processes import PATIENCE

LONG = "a" * 2**22
"""More than a socket holds."""


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield Connection(EnvironmentSpec("any", None), 0, ours), theirs


def answer_once(theirs, request):
    with theirs.makefile("rb") as file:
        assert pickle.loads(read_frame(file)) == request
    with suppress(OSError):
        theirs.sendall(frame(json.dumps({"observation": LONG}).encode()))


def let_time_run_out(connection):
    connection.stream.sent_at, connection.extended_until = -connection.seconds, -1.0


def test_a_timeout_does_not_count_the_time_in_which_a_long_message_is_sent(pair):
    """Neither the request nor the answer fits the socket, and the time is up at every poll."""
    connection, theirs = pair
    request = "step", LONG
    other = threading.Thread(target=answer_once, args=(theirs, request), daemon=True)
    connection.ask(request, PATIENCE)
    other.start()
    while connection.stream.unsent:
        let_time_run_out(connection)
        select.select([], [connection.channel], [], PATIENCE)
        assert answers([connection], 0.0) == ([], set())
    while not connection.stream.received:
        connection.stream.sent_at = time.monotonic()
        answers([connection], 0.0)
    connection.stream.sent_at, connection.extended_until = -connection.seconds, 0.0
    [(_, answer)], _ = answers([connection], PATIENCE)
    assert (answer.failure, len(answer.value["observation"])) == (None, len(LONG))
    other.join()


def test_an_answer_that_is_never_complete_times_out(pair):
    connection, theirs = pair
    connection.ask(("step", {}), 0.05)
    theirs.sendall(HEADER.pack(100))
    time.sleep(0.1)
    assert answers([connection], 0.0) == ([], set())
    let_time_run_out(connection)
    [(_, answer)], _ = answers([connection], PATIENCE)
    assert answer.failure.startswith("timeout: it did not answer within 0.05 s. Raise turn_timeout")
    assert "preload" in answer.failure


def test_the_time_in_which_another_connection_is_read_is_not_counted(pair, monkeypatch):
    """Such as the seconds in which the end of its process is awaited; the answer of this one may be there by then."""
    slow, theirs = pair
    ours, silent = socket.socketpair()
    ours.setblocking(False)
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    waiting = Connection(EnvironmentSpec("any", None), 1, ours)
    monkeypatch.setattr(slow, "read", lambda: now.__setitem__(0, 9.0) or {})
    with ours, silent:
        slow.ask(("step", {}), 4.0)
        waiting.ask(("step", {}), 4.0)
        theirs.sendall(frame(b"{}"))
        found, _ = answers([slow, waiting], 4.0)
    assert [connection for connection, _ in found] == [slow]


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        (frame(b"nope"), "garbage: it sent something that is not an answer: b'nope'"),
        (frame(b"[" * 100_000), "garbage: it sent something that is not an answer"),
        (frame(b'{"failed": ["raised", 7]}'), "raised: 7"),
        (frame(b'{"failed": []}'), ""),
        (frame(b'{"failed": 7}'), None),
        (HEADER.pack(2**40), "garbage: it sent an answer of 1099511627776 bytes"),
    ],
)
def test_whatever_is_sent_is_an_answer_or_a_failure(pair, body, failure):
    connection, theirs = pair
    connection.ask(("step", {}), PATIENCE)
    theirs.sendall(body)
    [(_, answer)], _ = answers([connection], PATIENCE)
    assert answer.failure is failure is None or answer.failure.startswith(failure)


class Waits(Conversation):
    async def reset(self, row):
        await asyncio.sleep(0)


def test_a_session_whose_client_leaves_closes_its_event_loop():
    ours, theirs = socket.socketpair()
    session = Session(Waits, (), 0)
    with ours:
        ours.sendall(frame(pickle.dumps(("reset", {}))))
    serve_session(theirs, session)
    assert session._loop.is_closed()
