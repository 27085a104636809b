"""Signals that end a run, and the loss of its launcher or of another process.

While a run trains, a signal sets a flag that the next optimizer step reads on all processes; at any other time it ends
the process at once. SIGTERM, SIGHUP and SIGINT are read by a thread of their own, from the pipe that Python's C
handler writes to, so that a second signal ends a process whose main thread waits in a collective. A signal that is
ignored (nohup, a background job of a script) or has a handler of its own keeps it.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from grpo_ext.config.launch import ASKED, COMMAND, rank, write_exit_code
from grpo_ext.errors import ABSENT, NOT_FINISHED, ConfigError, Problem, RankLost, RunInterrupted
from grpo_ext.terminal import printable
from grpo_ext.waiting import Shutdown, ended_by

if TYPE_CHECKING:
    from transformers import TrainerState  # not at run time: `grpo_ext.train` listens before it imports torch

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name))
REPEATED_WITHIN = 3.0
"""Seconds in which a launcher and a terminal may both send what is one signal."""
LAUNCHER_LOST = 64
"""Pseudo signal number that means "the launcher is gone"; no real signal has it."""
LAST_SECONDS = 30.0
"""Seconds that a run without its launcher has to save a checkpoint; torchrun allows as many."""
_POLL_SECONDS = 1.0

Phase = Literal["loading", "training", "ending"]


class Signals:
    """The signal that this process received, and what it does.

    Attributes:
        requested: number of the first signal, 0 for none.
        phase: a signal ends the process while it is 'loading'; while 'training' the next step reads it; while 'ending'
            (a model is being saved, or the process ends anyway) it is ignored. A second signal always ends the
            process.
        cleanups: called before the process ends at once.
        step_seconds: how long the last step took, 0 before the first has ended.
        shutdown: of the run in progress; set by a signal while it trains.
    """

    def __init__(self) -> None:
        self.requested = 0
        self.phase: Phase = "loading"
        self.cleanups: list[Callable[[], None]] = []
        self.step_seconds = 0.0
        self.shutdown = Shutdown()
        self._first = 0.0
        self._kept: dict[int, object] = {}
        self._pipe: tuple[int, int] | None = None
        self._earlier_pipe = -1

    def watch(self) -> bool:
        """Begin to listen; return False where it listens already, or outside the main thread."""
        if self._pipe is not None or threading.current_thread() is not threading.main_thread():
            return False
        for number in SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._kept[number] = signal.signal(number, _ignore)
        read, write = os.pipe()
        os.set_blocking(write, False)
        self._pipe = read, write
        self._earlier_pipe = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self._read, args=(read,), daemon=True, name="grpo_ext signals").start()
        return True

    def stop_watching(self) -> None:
        """Restore the handlers that `watch` replaced."""
        if self._pipe is not None:
            write = self._pipe[1]
            self._restore_handlers(self._earlier_pipe)
            os.close(write)  # which ends the thread

    def _restore_handlers(self, wakeup: int) -> None:
        if self._pipe is None:
            return
        signal.set_wakeup_fd(wakeup)
        for number, handler in self._kept.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._kept.clear()
        self._pipe = None

    @contextmanager
    def run(self) -> Iterator[None]:
        """Let a signal while `training` end all waits of the run."""
        self.shutdown = Shutdown()
        with ended_by(self.shutdown):
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Mark the phase in which optimizer steps read `requested`, and listen if this process does not yet."""
        self.requested = 0
        watching, self.phase = self.watch(), "training"
        try:
            yield
        finally:
            self.phase = "ending"  # 'loading' again would let a signal end a run before its model is saved
            if watching:
                self.stop_watching()

    def _read(self, pipe: int) -> None:
        while numbers := os.read(pipe, 16):
            for number in numbers:
                if number in self._kept:
                    self.arrived(number)
        os.close(pipe)

    def arrived(self, number: int) -> None:
        """Handle one signal, in any thread."""
        now = time.monotonic()
        if self.requested:
            if now - self._first > REPEATED_WITHIN:
                self.leave_now(128 + number, f"{signal_name(number)} a second time: ended at once, without saving.")
            return
        self.requested, self._first = number, now
        if self.phase == "loading":
            line = f"{signal_name(number)} before the first step, without a checkpoint. Start it again."
            self.leave_now(NOT_FINISHED, line)
        if self.phase == "training":
            self.shutdown.set()
        if self.phase == "training" and rank() == 0:
            took = f" (the last one took {self.step_seconds:.0f} s)" if self.step_seconds else ""
            line = f"{signal_name(number)}: a checkpoint is saved after this step{took}; a second signal ends the run"
            write_stderr(f"{line} at once.")

    def leave_now(self, code: int, line: str) -> None:
        """End this process, also if its main thread is blocked."""
        if rank() == 0:
            write_stderr(line)
        for cleanup in self.cleanups:
            cleanup()
        write_exit_code(code, first=self.phase == "ending")  # a launcher signals what ends later than others
        os._exit(code)


def _ignore(*_: object) -> None:
    """Handle a signal in the main thread; the thread that reads the pipe does the work."""


def write_stderr(line: str) -> None:
    """Write to stderr without Python's buffer, whose lock another thread may hold."""
    sys.stdout.flush() if threading.current_thread() is threading.main_thread() else None
    os.write(2, f"{printable(line)}\n".encode())


def signal_name(number: int) -> str:
    """Return the name of a signal for a message."""
    return "The launcher is gone" if number == LAUNCHER_LOST else signal.Signals(number).name


signals = Signals()
"""The signals of this process."""
if hasattr(os, "register_at_fork"):  # the signals of a forked child are not those of the run
    os.register_at_fork(after_in_child=lambda: signals._restore_handlers(-1))


# The end of a run before its last step.


def interrupted(number: int, state: "TrainerState", *, of_recipe: bool) -> RunInterrupted:
    """Return the exception that ends a run after a signal; its message is written to stderr."""
    again, step = "Run the same command" if of_recipe else "Call train(resume_from_checkpoint=True)", state.global_step
    saved = f"saved checkpoint-{step} of {state.max_steps} steps" if step else "no step had been made"
    line = f"{signal_name(number)}: {saved}. {again} to resume."
    if state.is_world_process_zero:
        write_stderr(line)
    return RunInterrupted(line)


_LOST = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe", "connection refused")


@contextmanager
def naming_lost_ranks(world_size: int, timeout: float) -> Iterator[None]:
    """Name the cause where a collective fails because another process has ended or hangs.

    Raises:
        RankLost: another process has ended or hangs.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if world_size == 1 or not _of_a_collective(error) or not any(words in text.lower() for words in _LOST):
            raise
        raise RankLost(
            f"Rank {rank()} has lost another process: one was killed or stopped, hangs, or its machine is gone, and "
            f"ddp_timeout={timeout} s have passed or its connection closed ({text.splitlines()[0][:200]}). Run the "
            "same command to resume from the last checkpoint. Raise ddp_timeout if a step may take that long."
        ) from error


def _of_a_collective(error: RuntimeError) -> bool:
    from torch.distributed import DistBackendError, DistError

    return "gloo" in str(error).lower() or isinstance(error, DistError | DistBackendError)


@contextmanager
def naming_checkpoint(checkpoint: str | Path | None) -> Iterator[None]:
    """Name a checkpoint in an error of its files, which may hold anything.

    Raises:
        ConfigError: it cannot be loaded.
    """
    try:
        yield
    except Exception as error:
        of_a_collective = isinstance(error, RuntimeError) and _of_a_collective(error)
        if checkpoint is None or isinstance(error, ConfigError) or of_a_collective:
            raise
        reason = f"it cannot be loaded ({type(error).__name__}: {error!s:.300})".replace("\n", " ")
        cure = "Name another one by resume_from_checkpoint, or start from the beginning by 'never'."
        raise ConfigError([Problem(str(checkpoint), ABSENT, reason, cure)]) from error


# The launcher. Processes that no launcher started are not watched, so that nohup works.

LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION", ASKED)
"""Variables that torchrun, accelerate and `grpo-ext train` set for the processes that they start."""


def watch_parent() -> None:
    """Watch the launcher, if one started this process, and the command that started the launcher."""
    if not any(variable in os.environ for variable in LAUNCHERS):
        return
    watched = (os.getppid(), ancestor(os.environ.get(COMMAND)))
    threading.Thread(target=_watch, args=watched, daemon=True, name="grpo_ext parent").start()


def _watch(parent: int, command: psutil.Process | None) -> None:
    while os.getppid() == parent and (command is None or is_alive(command)):
        time.sleep(_POLL_SECONDS)
    signals.arrived(LAUNCHER_LOST)
    time.sleep(LAST_SECONDS)
    signals.leave_now(NOT_FINISHED, f"The launcher is gone, and the step did not end within {LAST_SECONDS:g} s.")


def ancestor(pid: str | None) -> psutil.Process | None:
    """Return the ancestor of this process with a pid.

    None for any other process: a launcher may pass the variable to other machines, or store it for a later run.
    """
    try:
        return next((process for process in psutil.Process().parents() if str(process.pid) == pid), None)
    except psutil.Error:
        return None


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs, also after a change of the system clock."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
