"""The fork server of an environment: a process that imports it once, then forks a process for each episode.

The parent holds a `ForkServer`; `main` runs in the child. The child reads on its socket what to import, and on a
datagram socket "fork NUMBER SEED" (with the descriptor that the fork serves), "kill NUMBER" or "stop". On its own
socket it reports ["ended", number, exit code]. It reaps its forks itself, so a PID that it kills is always its own.
A fork adopts what its programs leave behind; when it ends, the child adopts all of it and kills it. If the parent or
the child's warden ends, the child kills its forks and ends; if the child ends, the warden kills what is left.
"""

import contextlib
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from grpo_ext.child_processes import (
    EXIT_SECONDS,
    LOADING_SECONDS,
    Child,
    begin,
    describe_exit,
    traceback_tail,
)
from grpo_ext.environments.composition import EnvironmentSpec, functions_of, maker_of
from grpo_ext.environments.protocol import OUTPUTS
from grpo_ext.environments.session import EnvironmentFailed, FailureKind, Session, serve_session
from grpo_ext.frames import FrameError, parsed_json, read_frame, wait
from grpo_ext.rewards.workers.worker import packed_call, seed_all, send_answer, unpacked_arguments
from grpo_ext.safe_reading import read_end
from grpo_ext.waiting import GRACE_SECONDS, Wait, WaitedInVain
from grpo_ext.warden import adopt_orphans, children, die_with_parent, end_children, kill_with_group, outlive_parent

_PROGRAM = "from grpo_ext.environments.fork_server import main; main()"
PRELOAD = "preload"
"""Class method of an environment, called once with its options before processes are forked: loads what they share."""


def import_request(spec: EnvironmentSpec) -> bytes:
    """Return what a fork server imports for an environment: its class, its options and its tools."""
    return packed_call(str(spec.environment or ""), {"tools": list(spec.tools), "kwargs": dict(spec.kwargs)})


class ForkServer:
    """A child process that forks the processes of one environment.

    Args:
        name: the environment's, for messages.
        imported: what it imports, as `import_request` returns it.
        memory_gib: memory that each process may use.
        withheld: environment variables that they do not get.

    Raises:
        EnvironmentFailed: the environment cannot be imported, or not in time.
        WaitedInVain: a signal ends the run.
    """

    def __init__(self, name: str, imported: bytes, memory_gib: float, withheld: Collection[str] = ()) -> None:
        self.name = name
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with theirs:
            self._child = Child(_PROGRAM, memory_gib, (theirs.fileno(),), withheld)
        self._codes: dict[int, int | None] = {}
        self._running: set[int] = set()
        self._child.stream.send(imported)
        self._ended = self._interrupted = False
        answer = self._loaded()
        if answer is None or answer[0] != "loaded":
            code = self.close()
            late = f"it could not be imported within {LOADING_SECONDS:g} s"
            lost = f"{describe_exit(code)} while it was being imported" if self._ended else late
            raise EnvironmentFailed(f"{FailureKind.DIED}: {answer[1] if answer else lost}")

    def _loaded(self) -> list | None:
        """Return the child's message when it has imported the environment, or None if none comes in time."""
        waited = self._waiting("its import and preload")
        try:
            while (answer := self._next(min(waited.look(), waited.left))) is None and not self._ended:
                if waited.left <= 0:
                    return None
        except WaitedInVain:
            self._child.interrupt()
            self.close()
            raise
        waited.progressed()
        return answer

    def _waiting(self, what: str) -> Wait:
        return Wait(f"environment {self.name}, {what}", LOADING_SECONDS, "loading", GRACE_SECONDS)

    def _next(self, seconds: float) -> list | None:
        """Return the next message of the child, or None if none comes in time."""
        end, stream = time.monotonic() + seconds, self._child.stream
        try:
            body = stream.next()
            while body is None:
                if stream in wait([stream], end):
                    body = stream.receive()
                elif time.monotonic() >= end:
                    return None
            answer = parsed_json(body)
            if not isinstance(answer, list) or not answer:
                raise FrameError
        except EOFError:
            self._ended = True
            return None
        return answer

    @property
    def lost(self) -> bool:
        """Whether the child is gone, or has been interrupted."""
        return self._interrupted or self._child.process.poll() is not None

    def fork(self, number: int, seed: int) -> socket.socket:
        """Return our end of a socket to a new process.

        Raises:
            EnvironmentFailed: the child hangs, and was killed.
            WaitedInVain: a signal ends the run.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._send(f"fork {number} {seed}", theirs.fileno())
        except BaseException:
            ours.close()
            raise
        self._running.add(number)
        return ours

    def output(self, number: int, most: int) -> str:
        """Return the end of the output of a process's programs so far."""
        printed = [read_end(Path(self._child.folder, str(number), name), most) for name in OUTPUTS]
        return "\n--- test ---\n".join(filter(None, printed))

    def exit_code(self, number: int) -> int | None:
        """Return the exit code of a process that closed its socket, or None where it is not known."""
        self.kill(number)
        end = time.monotonic() + EXIT_SECONDS
        while number in self._running:
            if not self._note_end(max(0.0, end - time.monotonic())):
                return None
        return self._codes.get(number)

    def _note_end(self, seconds: float = 0.0) -> bool:
        """Record the end of a process. Return whether one was reported in time."""
        if (message := self._next(seconds)) is None:
            return False
        _, number, code = message
        self._codes[number] = code
        self._running.discard(number)
        return True

    def kill(self, number: int) -> None:
        """Kill a process."""
        while number in self._running and self._note_end():  # a socket full of reports would block the child
            continue
        if number in self._running:
            self._tell(f"kill {number}")

    def drain(self) -> None:
        """Read and forget the ends of processes."""
        while self._note_end():
            continue
        self._codes.clear()

    def _tell(self, command: str) -> None:
        with contextlib.suppress(OSError, EnvironmentFailed, WaitedInVain):  # the child is gone, its forks with it
            self._send(command)

    def _send(self, command: str, *descriptors: int) -> None:
        """Send a command, for which the child may have no room until it has read others; kill a child that hangs."""
        waited = self._waiting("its fork server")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    self._control.sendmsg([command.encode()], rights, socket.MSG_DONTWAIT)  # send_fds drops its flags
                    return waited.progressed()
                if waited.left <= 0:
                    raise EnvironmentFailed(f"{FailureKind.DIED}: its fork server hung for {waited.limit:g} s")
                with selectors.DefaultSelector() as room:  # select.select takes no descriptor above 1,023
                    room.register(self._control, selectors.EVENT_WRITE)
                    room.select(min(waited.look(), max(0.0, waited.left)))
        except (EnvironmentFailed, WaitedInVain):
            self._interrupted = True
            self._child.interrupt()
            raise

    def close(self) -> int:
        """End the child, its forks and the processes they left behind. Return the child's exit code."""
        self._running.clear()
        self._tell("stop")
        code = self._child.kill(EXIT_SECONDS)
        self._control.close()
        return code


# In the child.

_LOOKING_SECONDS = 1.0
"""Between two looks whether the warden still runs."""
_STRAY_SECONDS = 0.5
"""For which processes that an episode leaves behind are hunted; again with the next episode that ends."""


def main() -> None:
    """Run the child; descriptors and limits come as arguments."""
    with begin() as channel, socket.socket(fileno=int(sys.argv[3])) as control:
        path, arguments = pickle.loads(read_frame(channel.makefile("rb")))
        try:
            make_session = _load(path or None, **unpacked_arguments(arguments))
        except BaseException as error:
            send_answer(channel, ["failed", traceback_tail(error)])
            return
        send_answer(channel, ["loaded"])
        _serve_commands(control, channel, make_session)


def _load(path: str | None, tools: Sequence[str], kwargs: Mapping[str, object]) -> Callable[[int], Session]:
    """Import all that an episode needs. Return what makes its session from a seed."""
    environment, functions = maker_of(path), functions_of(tools)
    if hasattr(environment, PRELOAD):
        getattr(environment, PRELOAD)(**kwargs)
    return partial(Session, None if environment is None else partial(environment, **kwargs), functions)


def _serve_commands(control: socket.socket, channel: socket.socket, make_session: Callable[[int], Session]) -> None:
    """Serve commands until "stop", or until the parent closes its end."""
    forks: dict[int, int] = {}  # pid -> number
    wakeup, wakeup_writer = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(wakeup_writer, False)
    signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ours = (control.fileno(), channel.fileno(), wakeup, wakeup_writer)
    adopt_orphans()
    parent, preloaded = os.getppid(), set(children())
    outlive_parent()  # to end the forks before
    while True:
        with selectors.DefaultSelector() as selector:
            for source in (control, channel, wakeup):
                selector.register(source, selectors.EVENT_READ)
            readable = [key.fileobj for key, _ in selector.select(_LOOKING_SECONDS)]
        received, descriptors, _, _ = socket.recv_fds(control, 256, 1) if control in readable else (b"", [], 0, None)
        command, *numbers = received.decode().split() or [""]
        if command == "stop" or channel in readable or os.getppid() != parent:
            end_children()
            return
        if command == "fork":
            number, seed = map(int, numbers)
            try:
                forks[_fork(descriptors[0], make_session, number, seed, ours)] = number
            except OSError:  # too many processes: only this episode is lost
                send_answer(channel, ["ended", number, None])
            os.close(descriptors[0])
        elif command == "kill":
            for process in [pid for pid, number in forks.items() if number == int(numbers[0])]:
                kill_with_group(process)
        if wakeup in readable:
            os.read(wakeup, 4096)
        for process, code in list(_ended(forks)):
            number = forks.pop(process)
            end_children({*forks, *preloaded}, _STRAY_SECONDS)  # what it has left behind
            shutil.rmtree(_folder(number), ignore_errors=True)
            send_answer(channel, ["ended", number, code])


def _fork(
    descriptor: int, make_session: Callable[[int], Session], number: int, seed: int, inherited: Sequence[int]
) -> int:
    """Fork a process that serves one episode. Return its PID."""
    parent = os.getpid()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        die_with_parent(parent, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # so that it can be killed with all that it starts
        adopt_orphans()
        for fd in inherited:
            os.close(fd)
        seed_all(seed)
        folder = _folder(number)
        folder.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        serve_session(socket.socket(fileno=descriptor), make_session(seed))
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def _folder(number: int) -> Path:
    """Return the folder of an episode's temporary files."""
    return Path(tempfile.gettempdir(), str(number))


def _ended(forks: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Yield PIDs and exit codes of forks that ended; kill what they started before their PIDs are free."""
    for process in list(forks):
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            kill_with_group(process)
            yield process, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
