"""Lines to environments: what is sent and received in part, what is written that is no answer, what is left behind."""

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
from grpo_ext.environments.hosts import Line, answers
from grpo_ext.environments.protocol import Conversation
from grpo_ext.environments.seat import LENGTH, Seat, serve
from support.processes import PATIENCE

LONG = "a" * 2**22
"""More than a socket holds."""


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield Line(EnvironmentSpec("any", None), 0, channel=ours), theirs


def frame(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def received(theirs, request):
    """Read a request, answer it."""
    with theirs.makefile("rb") as file:
        assert pickle.loads(file.read(LENGTH.unpack(file.read(LENGTH.size))[0])) == request
    with suppress(OSError):
        theirs.sendall(frame(json.dumps({"observation": LONG}).encode()))


def test_time_in_which_nobody_looks_does_not_run_out_while_something_is_sent(pair):
    """Neither the request nor the answer fits the socket, and its time is up at every look."""
    line, theirs = pair
    request = "step", LONG
    other = threading.Thread(target=received, args=(theirs, request), daemon=True)
    line.ask(request, PATIENCE)
    line.deadline = time.monotonic()
    other.start()
    while line.unsent:
        select.select([], [line.channel], [], PATIENCE)  # the other side reads while nobody looks
        found, _ = answers([line], 0.0, None)
        assert found == []
    while not line.received:
        line.deadline = time.monotonic() + 1.0
        answers([line], 0.0, None)
    line.deadline = time.monotonic()
    [(_, answer)], _ = answers([line], PATIENCE, None)
    assert (answer.failure, len(answer.value["observation"])) == (None, len(LONG))
    other.join()


def test_an_answer_that_never_ends_is_given_up(pair):
    line, theirs = pair
    line.ask(("step", {}), 0.05)
    theirs.sendall(LENGTH.pack(100))
    time.sleep(0.1)
    assert answers([line], 0.0, None) == ([], False)
    line.deadline = time.monotonic()
    [(_, answer)], _ = answers([line], PATIENCE, None)
    assert answer.failure.startswith("timeout: it did not answer within 0.05 s. Raise turn_timeout")
    assert "preload" in answer.failure


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (frame(b"nope"), "garbage: what it wrote is no answer: b'nope'"),
        (frame(b"[" * 100_000), "garbage: what it wrote is no answer"),
        (frame(b'{"failed": ["raised", 7]}'), "raised: 7"),
        (frame(b'{"failed": 7}'), None),
        (LENGTH.pack(2**40), "garbage: an answer of 1099511627776 bytes"),
    ],
)
def test_what_is_written_over_a_line_is_an_answer_or_a_failure(pair, body, told):
    line, theirs = pair
    line.ask(("step", {}), PATIENCE)
    theirs.sendall(body)
    [(_, answer)], _ = answers([line], PATIENCE, None)
    assert answer.failure is told is None or answer.failure.startswith(told)


class Waits(Conversation):
    async def reset(self, row):
        await asyncio.sleep(0)


def test_who_is_given_up_closes_what_it_has_opened():
    ours, theirs = socket.socketpair()
    seat = Seat(Waits, (), 0)
    with ours:
        ours.sendall(frame(pickle.dumps(("reset", {}))))
    serve(theirs, seat)
    assert seat._loop.is_closed()
