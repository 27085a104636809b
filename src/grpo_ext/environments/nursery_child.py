"""The process that environments are forked from: it imports one of them once, then forks a process for each attempt.

It is told on its pipe what to import, and on a datagram socket to fork ("fork NUMBER SEED", with the descriptor that
the fork shall serve), to end a fork ("kill NUMBER") or to stop; it says ("ended", number, exit code) on its other
pipe. It reaps its forks itself, so that what it kills is always its own, and adopts what they leave behind, which it
ends when the last of them is gone. When whoever asks goes, the kernel ends it; when it goes, its forks.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from grpo_ext.environments.composition import functions_of, maker_of
from grpo_ext.environments.seat import Seat, serve
from grpo_ext.rewards.workers.worker import (
    die_with_parent,
    last_lines,
    receive,
    seed_all,
    send,
    started,
    unpacked,
)

PRELOAD = "preload"
"""Class method of an environment, called once with its options before processes are forked: what they can share."""


def main() -> None:
    """Entry point: descriptors and limits come as arguments."""
    if not started():
        return
    control = socket.socket(fileno=int(sys.argv[5]))
    with open(int(sys.argv[1]), "rb") as requests, open(int(sys.argv[2]), "wb") as answers:
        path, arguments = receive(requests)
        try:
            seat = prepared(path or None, **unpacked(arguments))
        except BaseException as error:
            send(answers, ("failed", last_lines(error)))
            return
        send(answers, ("loaded",))
        _tend(control, requests, answers, seat)


def prepared(path: str | None, tools: list[str], kwargs: dict[str, Any]) -> Any:
    """What makes a seat for a seed, with all imported that an attempt needs."""
    environment, functions = maker_of(path), functions_of(tools)
    if hasattr(environment, PRELOAD):
        getattr(environment, PRELOAD)(**kwargs)
    return partial(Seat, None if environment is None else partial(environment, **kwargs), functions)


def _tend(control: socket.socket, requests: BinaryIO, answers: BinaryIO, seat: Any) -> None:
    """Do as told until told to stop, or until nobody is there any more."""
    forks: dict[int, int] = {}  # process -> number
    woken, wakes = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _adopt()
    while True:
        waiting: list[Any] = [control, requests, woken]
        readable, _, _ = select.select(waiting, [], [])
        said, descriptors, _, _ = socket.recv_fds(control, 256, 1) if control in readable else (b"", [], 0, None)
        word, *numbers = said.decode().split() or [""]
        if word == "stop" or requests in readable:
            for process in forks:
                _kill(process)
            _end_strays()
            return
        if word == "fork":
            number, seed = map(int, numbers)
            try:
                forks[_fork(descriptors[0], seat, number, seed, (control, requests, answers, woken, wakes))] = number
            except OSError:  # too many processes: nobody serves this one, and the others go on
                send(answers, ("ended", number, None))
            os.close(descriptors[0])
        elif word == "kill":
            for process in [p for p, number in forks.items() if number == int(numbers[0])]:
                _kill(process)
        if woken in readable:
            os.read(woken, 4096)
        for process, code in list(_ended(forks)):
            number = forks.pop(process)
            shutil.rmtree(_folder(number), ignore_errors=True)
            send(answers, ("ended", number, code))
            if not forks:
                _end_strays()


def _fork(descriptor: int, seat: Any, number: int, seed: int, ours: tuple[Any, ...]) -> int:
    """The number of a process that serves one attempt."""
    parent = os.getpid()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # so that it can be killed with whatever it starts
        for file in ours:
            os.close(file if isinstance(file, int) else file.fileno())
        seed_all(seed)
        folder = _folder(number)
        folder.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        serve(socket.socket(fileno=descriptor), seat(seed))
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def _folder(number: int) -> Path:
    """For an attempt's temporary files."""
    return Path(tempfile.gettempdir(), str(number))


def _kill(process: int) -> None:
    """End a fork, or what it has left, with all that it started; it may not have its session yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(process, signal.SIGKILL)


def _ended(forks: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Forks that are gone, and their exit codes; what they started goes before their number is free."""
    for process in list(forks):
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            _kill(process)
            yield process, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


_PR_SET_CHILD_SUBREAPER = 36
_ENDING_SECONDS = 3.0


def _adopt() -> None:
    """Have what a fork leaves behind become this process's child (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end_strays() -> None:
    """End and reap every child that there is, and theirs, which they hand up as they go."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    end = time.monotonic() + _ENDING_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(OSError):  # a kernel that does not tell
            for process in children.read_text().split():
                _kill(int(process))
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.001)
        except ChildProcessError:
            return
