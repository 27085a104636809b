"""A pool of persistent worker processes: what hangs, crashes or eats memory there costs one answer, not the run."""

import atexit
import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_ext.rewards.workers.worker import LENGTH, packed

WORKER = "from grpo_ext.rewards.workers.worker import main; main()"
FOLDER = "grpo_ext_worker_"
"""How the names of workers' folders begin; the namespace and the number of their process follow."""
LOADING_SECONDS = 120.0
"""How long a function's module may take to import, on top of its own timeout."""
LAST_SECONDS = 5.0
"""How long a worker that has closed its pipe may take to end, so that its exit code is its own."""
LARGEST = 2**28
"""Most bytes of an answer."""
NO_TIME_LEFT = "no time was left to score it"


@dataclass
class Job:
    """One call of one function."""

    path: str
    arguments: dict[str, Any]
    timeout: float
    seed: int = 0
    """Of `random` and NumPy's global generator."""
    place: int | None = None
    """Which worker makes the call, counted modulo their number; None: any."""


@dataclass
class Outcome:
    """What became of a job."""

    status: Literal["scored", "failed", "misshapen", "timeout", "died"]
    values: list[Any] = field(default_factory=list)
    extras: list[tuple[str, list]] = field(default_factory=list)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    reason: str = ""
    seconds: float = 0.0

    def misshapen(self, rows: int) -> bool:
        """Whether the function returned something else than one value per row: a mistake in it, on any completions."""
        return self.status == "misshapen" or (self.status == "scored" and len(self.values) != rows)


class Unreadable(EOFError):
    """What a worker sent is not an answer: other code writes to its pipe."""


_living: set["Worker"] = set()
"""Workers of this process."""
_starting = threading.Lock()
"""Held while one is started."""
ENDING_SECONDS = 5.0


def end_workers() -> None:
    """End all workers of this process at once, for one that does not come to its own end; none starts hereafter."""
    _starting.acquire(timeout=ENDING_SECONDS)  # for good: another thread would replace those that it misses
    for worker in list(_living):
        with contextlib.suppress(Exception):
            worker.kill()


def remove_left_behind() -> None:
    """Remove folders of workers whose process was killed, and could not."""
    mine = f"{FOLDER}{_namespace()}_"
    for folder in Path(tempfile.gettempdir()).glob(f"{mine}*_*"):
        owner = folder.name.removeprefix(mine).partition("_")[0]
        if owner.isdecimal() and not _alive(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def _namespace() -> int:
    """Of the numbers of processes: containers may share a temporary folder, but not these."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


class Worker:
    """One worker process, its two pipes and its folder for temporary files.

    Args:
        memory_gib: what it may use; 0 for no limit.
        program: what it runs, handed its descriptors, the limit and our process's number.
        fds: further descriptors that it gets, and is told of last.
    """

    def __init__(self, memory_gib: float, program: str, fds: Sequence[int] = ()) -> None:
        """Start it; a few hundred milliseconds pass before it answers."""
        with _starting:
            self._start(memory_gib, program, fds)
        self.unsent = memoryview(b"")
        self._received = bytearray()
        self.job: Job | None = None
        self.started = self.deadline = 0.0

    def _start(self, memory_gib: float, program: str, fds: Sequence[int]) -> None:
        requests, self.requests = os.pipe()
        self.answers, answers = os.pipe()
        os.set_blocking(self.requests, False)  # whoever does not read must not stop us
        self._open = [self.requests, self.answers]
        self._folder = tempfile.mkdtemp(prefix=f"{FOLDER}{_namespace()}_{os.getpid()}_")
        command = [sys.executable, "-c", program, str(requests), str(answers)]
        path = os.pathsep.join(filter(None, sys.path))  # it imports what we can import
        try:
            self.process = subprocess.Popen(
                [*command, str(memory_gib), str(os.getpid()), *map(str, fds)],
                pass_fds=(requests, answers, *fds),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, "TMPDIR": self._folder},
                start_new_session=True,  # so that it can be killed with whatever it started
            )
        except BaseException:
            self._discard()
            raise
        finally:
            os.close(requests)
            os.close(answers)
        _living.add(self)

    def give(self, job: Job, request: bytes) -> bool:
        """Begin to send a job; False when the worker is dead."""
        self.job, self.started = job, time.monotonic()
        self.deadline = self.started + job.timeout + LOADING_SECONDS
        self.unsent = memoryview(LENGTH.pack(len(request)) + request)
        return self.push()

    def push(self) -> bool:
        """Send what the pipe takes now; False when the worker is dead."""
        try:
            while self.unsent:
                self.unsent = self.unsent[os.write(self.requests, self.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.unsent = memoryview(b"")
            return False
        return True

    def read(self) -> tuple | None:
        """The next complete answer, if there is one.

        Raises:
            EOFError: the worker is gone, or (`Unreadable`) sent what is not an answer.
        """
        chunk = os.read(self.answers, 1 << 20)
        if not chunk:
            raise EOFError
        self._received += chunk
        return self.next_answer()

    def next_answer(self) -> tuple | None:
        """A complete answer among the bytes already read.

        Raises:
            Unreadable: they are not an answer.
        """
        if len(self._received) < LENGTH.size:
            return None
        size = LENGTH.unpack_from(self._received)[0]
        if size > LARGEST:
            raise Unreadable(f"it sent an answer of {size} bytes, of which at most {LARGEST} are read")
        if len(self._received) < LENGTH.size + size:
            return None
        body = bytes(self._received[LENGTH.size : LENGTH.size + size])
        del self._received[: LENGTH.size + size]
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, list) or not answer:
            raise Unreadable(f"it sent what is not an answer: {body[:80]!r}")
        return tuple(answer)

    def kill(self, grace: float = 0.0) -> int:
        """End it with all it started, after the seconds in which it may end by itself; returns the exit code."""
        if self._open:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._discard()
        return self.process.wait()

    def _discard(self) -> None:
        """Close the pipes and remove the folder, in which a sandboxed program may have closed its own to us."""
        _living.discard(self)
        while self._open:
            os.close(self._open.pop())
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, 0o700)
        shutil.rmtree(self._folder, ignore_errors=True)


class Pool:
    """Workers that score jobs in parallel; a context manager, and closed at exit."""

    def __init__(self, workers: int, *, memory_gib: float = 8.0) -> None:
        """Nothing is started before the first job."""
        self.size = workers
        self.memory_gib = memory_gib
        self._workers: list[Worker | None] = [None] * workers
        """By place."""
        self._owner = os.getpid()
        remove_left_behind()
        atexit.register(self.close)

    def run(self, jobs: Sequence[Job], *, deadline: float | None = None) -> list[Outcome]:
        """Outcome of each job, in order; jobs not begun by `deadline` (monotonic seconds) count as timed out."""
        outcomes: dict[int, Outcome] = {}
        waiting = list(range(len(jobs)))
        busy: dict[Worker, tuple[int, int]] = {}  # place, job
        try:
            while waiting or busy:
                if deadline is not None and time.monotonic() > deadline:
                    outcomes |= {i: Outcome("timeout", reason=NO_TIME_LEFT) for i in waiting}
                    waiting.clear()
                for place, i in self._due(jobs, waiting, {taken for taken, _ in busy.values()}):
                    try:
                        request = packed(jobs[i].path, jobs[i].arguments, jobs[i].seed)
                    except ValueError as error:
                        outcomes[i] = Outcome("failed", reason=str(error))
                    else:
                        busy[self._give(place, jobs[i], request)] = place, i
                for worker, outcome in self._wait(busy):
                    place, i = busy.pop(worker)
                    outcomes[i] = outcome
                    if outcome.status in ("timeout", "died"):
                        self._end(place)
        finally:
            for place, _ in busy.values():  # interrupted: their answers are not read any more
                self._end(place)
        return [outcomes[i] for i in range(len(jobs))]

    def _due(self, jobs: Sequence[Job], waiting: list[int], taken: set[int]) -> Iterator[tuple[int, int]]:
        """Take a job from `waiting` for each free place; first places with a worker, and jobs bound to a place."""
        free = [place for place in range(self.size) if place not in taken]
        bound = [None if job.place is None else job.place % self.size for job in jobs]
        for place in sorted(free, key=lambda place: self._workers[place] is None):
            ours, anyones = ([i for i in waiting if bound[i] == wanted] for wanted in (place, None))
            for i in (ours or anyones)[:1]:
                waiting.remove(i)
                yield place, i

    def _give(self, place: int, job: Job, request: bytes) -> Worker:
        """The worker of a place with the job; a fresh one where there is none, or it has died."""
        worker = self._workers[place]
        if worker is not None and worker.give(job, request):
            return worker
        self._end(place)
        worker = self._workers[place] = Worker(self.memory_gib, WORKER)
        worker.give(job, request)  # should it be dead already, the end of its answers will say so
        return worker

    def _wait(self, busy: Collection[Worker]) -> list[tuple[Worker, Outcome]]:
        """Workers that are done, one way or the other; waits until there may be one."""
        if not busy:
            return []
        events = _events(busy, min(worker.deadline for worker in busy))
        now = time.monotonic()
        finished: dict[Worker, Outcome] = {}
        for worker, pipe in events:
            if pipe == worker.requests and worker not in finished:
                worker.push()
            elif pipe == worker.answers and (outcome := self._collect(worker)) is not None:
                finished[worker] = outcome
        for worker in busy:
            if worker not in finished and now >= worker.deadline:
                assert worker.job is not None
                reason = f"it did not answer within {worker.job.timeout:g} s"
                finished[worker] = Outcome("timeout", reason=reason, seconds=now - worker.started)
        return list(finished.items())

    def _collect(self, worker: Worker) -> Outcome | None:
        """Read what a worker has sent; None while its job is not done."""
        assert worker.job is not None
        try:
            answer = worker.read()
            while answer is not None and answer[0] == "loaded":
                worker.started = time.monotonic()
                worker.deadline = worker.started + worker.job.timeout
                answer = worker.next_answer()
        except Unreadable as error:
            return Outcome("died", reason=str(error), seconds=time.monotonic() - worker.started)
        except EOFError:
            seconds = time.monotonic() - worker.started
            return Outcome("died", reason=cause_of_death(worker.kill(LAST_SECONDS)), seconds=seconds)
        if answer is None:
            return None
        return _outcome(answer, time.monotonic() - worker.started)

    def close(self) -> None:
        """End all workers."""
        if os.getpid() != self._owner:  # a forked child must not touch its parent's workers
            return
        for place in range(self.size):
            self._end(place)

    def _end(self, place: int) -> None:
        """End the worker of a place, if there is one."""
        worker, self._workers[place] = self._workers[place], None
        if worker is not None:
            worker.kill()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _outcome(answer: tuple, seconds: float) -> Outcome:
    """What an answer says; a function that writes to the pipe itself may have sent anything."""
    try:
        if answer[0] == "scored":
            _, values, extras, metrics = answer
            logged = [(str(column), list(logs)) for column, logs in extras]
            figures = [(str(name), float(value)) for name, value in metrics]
            return Outcome("scored", list(values), logged, figures, seconds=seconds)
        if answer[0] in ("failed", "misshapen"):
            return Outcome(answer[0], reason=str(answer[1]), seconds=seconds)
    except (IndexError, OverflowError, TypeError, ValueError):
        pass
    return Outcome("died", reason=f"it sent what is not an answer: {str(answer)[:80]}", seconds=seconds)


def _events(workers: Collection[Worker], deadline: float) -> list[tuple[Worker, int]]:
    """Pipes that have an answer or take more of a request; waits for one until the deadline."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.answers, selectors.EVENT_READ, worker)
            if worker.unsent:
                selector.register(worker.requests, selectors.EVENT_WRITE, worker)
        return [(key.data, key.fd) for key, _ in selector.select(max(0.0, deadline - time.monotonic()))]


def cause_of_death(code: int) -> str:
    """What an exit code says."""
    if code < 0:
        known = {number.value: number.name for number in signal.Signals}
        return f"it was killed by {known.get(-code, f'signal {-code}')}"
    return f"it ended its process with exit code {code}"
