"""A pool of persistent worker processes: a hang, a crash or exhausted memory there costs one answer, not the run."""

import atexit
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from grpo_ext import child_processes
from grpo_ext.child_processes import Child, describe_exit, free_descriptors, remove_stale_folders
from grpo_ext.frames import FrameError, parsed_json, wait
from grpo_ext.rewards.workers.worker import packed_call
from grpo_ext.waiting import GRACE_SECONDS, Interrupted, Wait, WaitedInVain

PROGRAM = "from grpo_ext.rewards.workers.worker import main; main()"
NO_TIME_LEFT = "no time was left to score it"
_OF_A_WORKER = 4
"""Descriptors, those among them that it takes to start it."""


class Status(StrEnum):
    """How a job ended."""

    SCORED = "scored"
    FAILED = "failed"
    """The function raised, or its arguments could not be sent."""
    MISSHAPEN = "misshapen"
    """The function returned something that is not a list."""
    TIMEOUT = "timeout"
    DIED = "died"
    """The worker process ended, or wrote something that is not an answer."""


@dataclass
class Job:
    """One call of one function."""

    path: str
    arguments: Mapping[str, object]
    timeout: float
    seed: int = 0
    """Seed of `random`, and of NumPy's and torch's global generators."""
    place: int | None = None
    """Index of the worker that makes the call, modulo their number; None: any."""


@dataclass(frozen=True)
class Outcome:
    """How a call of a reward ended and what it returned."""

    status: Status
    values: list[Any] = field(default_factory=list)
    extras: list[tuple[str, list]] = field(default_factory=list)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    reason: str = ""
    seconds: float = 0.0
    rows: list[int] = field(default_factory=list)
    """Rows of the batch that it scored."""
    after: str = ""
    """Why the call on more rows failed that this one replaces; "" for none."""

    @property
    def failure(self) -> str:
        """Why it gives no values, or "" if it does."""
        if self.status != Status.SCORED:
            return self.reason
        values, rows = len(self.values), len(self.rows)
        cure = "Return one number or None for each"
        return "" if values == rows else f"it returned {values} values for {rows} completions. {cure}"

    @property
    def misshapen(self) -> bool:
        """Whether the function did not return one value per row: a mistake in it, on any completions."""
        return self.status == Status.MISSHAPEN or (self.status == Status.SCORED and len(self.values) != len(self.rows))


class Worker(Child):
    """A child process that scores one job at a time."""

    def __init__(self, memory_gib: float) -> None:
        super().__init__(PROGRAM, memory_gib)
        self.job: Job | None = None
        self.started = self.deadline = 0.0

    def give(self, job: Job, request: bytes) -> bool:
        """Begin to send a job. Return False if the worker is dead."""
        self.job, self.started = job, time.monotonic()
        self.deadline = self.started + job.timeout + child_processes.LOADING_SECONDS
        return self.stream.send(request)

    def collect(self) -> Outcome | None:
        """Read what it has sent. Return None while its job is not done."""
        assert self.job is not None
        try:
            body = self.stream.receive()
            while body is not None and (answer := parsed_json(body)) == ["loaded"]:
                self.started = time.monotonic()
                self.deadline = self.started + self.job.timeout
                body = self.stream.next()
        except FrameError as error:
            return Outcome(Status.DIED, reason=str(error), seconds=time.monotonic() - self.started)
        except EOFError:
            seconds = time.monotonic() - self.started
            reason = describe_exit(self.kill(child_processes.EXIT_SECONDS))
            return Outcome(Status.DIED, reason=reason, seconds=seconds)
        return None if body is None else _outcome(answer, body, time.monotonic() - self.started)


class Pool:
    """Workers that score jobs in parallel, no more than descriptors allow, closed at exit; jobs start them."""

    def __init__(self, workers: int, *, memory_gib: float = 8.0) -> None:
        self.size = max(1, min(workers, free_descriptors() // _OF_A_WORKER))
        self.memory_gib = memory_gib
        self._workers: list[Worker | None] = [None] * self.size
        """The worker of each place."""
        self._owner = os.getpid()
        self._interrupted = False
        remove_stale_folders()
        atexit.register(self.close)

    def run(self, jobs: Sequence[Job], *, deadline: float | None = None) -> list[Outcome]:
        """Return the outcome of each job, in order; jobs not begun by `deadline` (monotonic seconds) time out.

        Raises:
            Interrupted: another thread interrupts the pool, or a signal ends the run and a job does not end.
        """
        longest = max((job.timeout for job in jobs), default=0.0) + child_processes.LOADING_SECONDS
        named = f"reward {', '.join(sorted({job.path for job in jobs}))}"
        waited = Wait(named, longest, "timeout and loading", GRACE_SECONDS)
        outcomes: dict[int, Outcome] = {}
        waiting = list(range(len(jobs)))
        busy: dict[Worker, tuple[int, int]] = {}  # place, job
        try:
            while waiting or busy:
                if deadline is not None and time.monotonic() > deadline:
                    outcomes |= {i: Outcome(Status.TIMEOUT, reason=NO_TIME_LEFT) for i in waiting}
                    waiting.clear()
                for place, i in self._due(jobs, waiting, {taken for taken, _ in busy.values()}):
                    try:
                        request = packed_call(jobs[i].path, jobs[i].arguments, jobs[i].seed)
                    except ValueError as error:
                        outcomes[i] = Outcome(Status.FAILED, reason=str(error))
                    else:
                        busy[self._give(place, jobs[i], request)] = place, i
                self._check()
                for worker, outcome in _finished(busy, _patience(waited)) if busy else ():
                    waited.progressed()
                    place, i = busy.pop(worker)
                    outcomes[i] = outcome
                    if outcome.status in (Status.TIMEOUT, Status.DIED):
                        self._end(place)
                self._check()
        finally:
            for place, _ in busy.values():  # interrupted: their answers will not be read
                self._end(place)
        return [outcomes[i] for i in range(len(jobs))]

    def _due(self, jobs: Sequence[Job], waiting: list[int], taken: set[int]) -> Iterator[tuple[int, int]]:
        """Take a job from `waiting` for each free place; first places with a worker, and jobs bound to a place."""
        free = [place for place in range(self.size) if place not in taken]
        bound = [None if job.place is None else job.place % self.size for job in jobs]
        for place in sorted(free, key=lambda place: self._workers[place] is None):
            own, unbound = ([i for i in waiting if bound[i] == wanted] for wanted in (place, None))
            for i in (own or unbound)[:1]:
                waiting.remove(i)
                yield place, i

    def _give(self, place: int, job: Job, request: bytes) -> Worker:
        """Give a job to the worker of a place; start a new one if there is none or it is dead."""
        worker = self._workers[place]
        if worker is not None and worker.give(job, request):
            return worker
        self._end(place)
        worker = self._workers[place] = Worker(self.memory_gib)
        worker.give(job, request)  # if it is dead already, reading its answer will show that
        return worker

    def interrupt(self) -> None:
        """Kill the workers, so that a `run` of another thread ends with `Interrupted`; until `close`.

        That thread discards them, as it may read from their pipes.
        """
        self._interrupted = True
        for worker in list(self._workers):
            if worker is not None:
                worker.interrupt()

    def _check(self) -> None:
        if self._interrupted:
            raise Interrupted

    def close(self) -> None:
        """End all workers."""
        self._interrupted = False
        if os.getpid() != self._owner:  # a forked child must not touch its parent's workers
            return
        for place in range(self.size):
            self._end(place)

    def _end(self, place: int) -> None:
        worker, self._workers[place] = self._workers[place], None
        if worker is not None:
            worker.kill()


def _patience(waited: Wait) -> float:
    """Return seconds for which to wait now."""
    try:
        return waited.look()
    except WaitedInVain as error:
        raise Interrupted(str(error)) from None


def _finished(busy: Collection[Worker], seconds: float) -> Iterator[tuple[Worker, Outcome]]:
    """Wait until a pipe is ready, a worker is overdue, or `seconds` have passed. Yield workers whose job ended."""
    until = min(time.monotonic() + seconds, *(worker.deadline for worker in busy))
    readable = wait([worker.stream for worker in busy], until)
    now = time.monotonic()  # before `collect`, which may wait for a dying worker: others may answer meanwhile
    for worker in list(busy):
        outcome = worker.collect() if worker.stream in readable else None
        if outcome is None and now >= worker.deadline:
            assert worker.job is not None
            reason = f"it did not answer within {worker.job.timeout:g} s"
            outcome = Outcome(Status.TIMEOUT, reason=reason, seconds=now - worker.started)
        if outcome is not None:
            yield worker, outcome


def _outcome(answer: Any, body: bytes, seconds: float) -> Outcome:
    """Read an answer; a function that writes to the pipe itself may have sent anything."""
    try:
        if answer[0] == Status.SCORED:
            _, values, extras, metrics = answer
            logged = [(str(column), list(logs)) for column, logs in extras]
            figures = [(str(name), float(value)) for name, value in metrics]
            return Outcome(Status.SCORED, list(values), logged, figures, seconds=seconds)
        if answer[0] in (Status.FAILED, Status.MISSHAPEN):
            return Outcome(Status(answer[0]), reason=str(answer[1]), seconds=seconds)
    except (KeyError, IndexError, OverflowError, TypeError, ValueError):
        pass
    return Outcome(Status.DIED, reason=f"it sent something that is not an answer: {body[:80]!r}", seconds=seconds)
