"""A pool of persistent worker processes: what hangs, crashes or eats memory there costs one answer, not the run."""

import atexit
import contextlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .worker import LENGTH

WORKER = "from grpo_ext.rewards.worker import main; main()"
LOADING_SECONDS = 120.0
"""How long a function's module may take to import, on top of its own timeout."""


@dataclass
class Job:
    """One call of one function."""

    path: str
    options: dict[str, Any]
    columns: dict[str, Any]
    timeout: float


@dataclass
class Outcome:
    """What became of a job."""

    status: Literal["scored", "failed", "timeout", "died"]
    values: list[Any] = field(default_factory=list)
    extras: list[tuple[str, list]] = field(default_factory=list)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    reason: str = ""
    seconds: float = 0.0


class Worker:
    """One worker process and its two pipes."""

    def __init__(self, memory_gib: float) -> None:
        """Start it; a few hundred milliseconds pass before it answers."""
        requests, self._to = os.pipe()
        self._from, answers = os.pipe()
        command = [sys.executable, "-c", WORKER, str(requests), str(answers)]
        self.process = subprocess.Popen(
            [*command, str(memory_gib), str(os.getpid())],
            pass_fds=(requests, answers),
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # it imports what we can import
            start_new_session=True,  # so that it can be killed with whatever it started
        )
        os.close(requests)
        os.close(answers)
        self._open = [self._to, self._from]
        self._received = bytearray()
        self.job: Job | None = None
        self.started = self.deadline = 0.0

    def fileno(self) -> int:
        """The pipe to wait on."""
        return self._from

    def give(self, job: Job) -> bool:
        """Send a job; False when the worker is dead."""
        payload = pickle.dumps((job.path, job.options, job.columns), protocol=pickle.HIGHEST_PROTOCOL)
        self.job, self.started = job, time.monotonic()
        self.deadline = self.started + job.timeout + LOADING_SECONDS
        try:
            view = memoryview(LENGTH.pack(len(payload)) + payload)
            while view:
                view = view[os.write(self._to, view) :]
        except BrokenPipeError:
            return False
        return True

    def read(self) -> tuple | None:
        """The next complete answer, if there is one.

        Raises:
            EOFError: the worker is gone.
        """
        chunk = os.read(self._from, 1 << 20)
        if not chunk:
            raise EOFError
        self._received += chunk
        return self.next_answer()

    def next_answer(self) -> tuple | None:
        """A complete answer among the bytes already read."""
        if len(self._received) < LENGTH.size:
            return None
        size = LENGTH.unpack_from(self._received)[0]
        if len(self._received) < LENGTH.size + size:
            return None
        answer = pickle.loads(bytes(self._received[LENGTH.size : LENGTH.size + size]))
        del self._received[: LENGTH.size + size]
        return answer

    def kill(self) -> int:
        """End it with all it started; returns the exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        while self._open:
            os.close(self._open.pop())
        return code


class Pool:
    """Workers that score jobs in parallel; a context manager, and closed at exit."""

    def __init__(self, workers: int, *, memory_gib: float = 8.0) -> None:
        """Nothing is started before the first job."""
        self.size = workers
        self.memory_gib = memory_gib
        self._idle: list[Worker] = []
        self._owner = os.getpid()
        atexit.register(self.close)

    def run(self, jobs: Sequence[Job], *, deadline: float | None = None) -> list[Outcome]:
        """Outcome of each job, in order; jobs not begun by `deadline` (monotonic seconds) count as timed out."""
        outcomes: dict[int, Outcome] = {}
        waiting = deque(range(len(jobs)))
        busy: dict[Worker, int] = {}
        try:
            with selectors.DefaultSelector() as selector:
                while waiting or busy:
                    if deadline is not None and time.monotonic() > deadline:
                        for i in waiting:
                            outcomes[i] = Outcome("timeout", reason="no time was left to score it")
                        waiting.clear()
                    while waiting and len(busy) < self.size:
                        i = waiting.popleft()
                        worker = self._idle.pop() if self._idle else Worker(self.memory_gib)
                        if worker.give(jobs[i]):
                            busy[worker] = i
                            selector.register(worker, selectors.EVENT_READ)
                        else:  # it died idle: another one takes the job
                            worker.kill()
                            waiting.appendleft(i)
                    for worker, outcome in self._wait(selector, busy):
                        selector.unregister(worker)
                        outcomes[busy.pop(worker)] = outcome
                        if outcome.status in ("scored", "failed"):
                            self._idle.append(worker)
                        else:
                            worker.kill()
        finally:
            for worker in busy:  # interrupted: whoever is still at work belongs to nobody
                worker.kill()
        return [outcomes[i] for i in range(len(jobs))]

    def _wait(self, selector: selectors.BaseSelector, busy: dict[Worker, int]) -> list[tuple[Worker, Outcome]]:
        """Workers that are done, one way or the other; waits until there may be one."""
        if not busy:
            return []
        first = min(worker.deadline for worker in busy)
        ready = selector.select(max(0.0, first - time.monotonic()))
        done = [(key.fileobj, self._collect(key.fileobj)) for key, _ in ready]  # type: ignore[arg-type]
        finished = [(worker, outcome) for worker, outcome in done if outcome is not None]
        settled = {worker for worker, _ in finished}
        now = time.monotonic()
        for worker in busy:
            if worker not in settled and now >= worker.deadline:
                assert worker.job is not None
                reason = f"it did not answer within {worker.job.timeout:g} s"
                finished.append((worker, Outcome("timeout", reason=reason, seconds=now - worker.started)))
        return finished  # type: ignore[return-value]

    def _collect(self, worker: Worker) -> Outcome | None:
        """Read what a worker has sent; None while its job is not done."""
        assert worker.job is not None
        try:
            answer = worker.read()
            while answer is not None and answer[0] == "loaded":
                worker.started = time.monotonic()
                worker.deadline = worker.started + worker.job.timeout
                answer = worker.next_answer()
        except EOFError:
            return Outcome("died", reason=_cause_of_death(worker.kill()), seconds=time.monotonic() - worker.started)
        if answer is None:
            return None
        seconds = time.monotonic() - worker.started
        if answer[0] == "scored":
            _, values, extras, metrics = answer
            return Outcome("scored", values, extras, metrics, seconds=seconds)
        return Outcome("failed", reason=answer[1], seconds=seconds)

    def close(self) -> None:
        """End all workers."""
        if os.getpid() != self._owner:  # a forked child must not touch its parent's workers
            return
        while self._idle:
            self._idle.pop().kill()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cause_of_death(code: int) -> str:
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}"
    return f"it ended its process with exit code {code}"
