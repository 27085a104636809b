"""A process that is told to end: while it trains, a flag that the next optimizer step reads; else it leaves at once.

SIGTERM, SIGHUP and SIGINT are read by a thread of their own, from the pipe that Python's C handler writes to, so that
a second one ends a process whose main thread waits in a collective. What ignored a signal (nohup, a script's
background job) or has a handler of its own keeps it.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from grpo_ext.config.launch import write_exit_code
from grpo_ext.errors import NOT_FINISHED

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name))
REPEATED_WITHIN = 3.0
"""Seconds in which a launcher and a terminal may both send what is one signal."""
LAUNCHER_LOST = 64
"""What stands for a launcher that is gone where the number of a signal stands: no signal to end by has it."""
LAST_SECONDS = 30.0
"""How long a run without its launcher may take to save; as long as torchrun gives."""

Phase = Literal["loading", "training", "ending"]


class Signals:
    """What this process was told, and what it is at.

    Attributes:
        requested: number of the first signal that came, 0 for none.
        phase: while 'loading' a signal ends the process, while 'training' the next step reads it, while 'ending' (a
            model is being saved, or the process leaves anyway) it is let pass; a second one always ends the process.
    """

    def __init__(self) -> None:
        """Nothing is watched yet."""
        self.requested = 0
        self.phase: Phase = "loading"
        self.cleanups: list[Callable[[], None]] = []
        """Called before the process ends at once."""
        self._first = 0.0
        self._kept: dict[int, object] = {}
        self._pipe: tuple[int, int] | None = None
        self._earlier_pipe = -1

    def watch(self) -> bool:
        """Begin to listen, in the main thread; False where that was done before, or cannot be."""
        if self._pipe is not None or threading.current_thread() is not threading.main_thread():
            return False
        for number in SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._kept[number] = signal.signal(number, _noted)
        read, write = os.pipe()
        os.set_blocking(write, False)
        self._pipe = read, write
        self._earlier_pipe = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self._read, args=(read,), daemon=True, name="grpo_ext signals").start()
        return True

    def rest(self) -> None:
        """Give back what `watch` took."""
        if self._pipe is None:
            return
        signal.set_wakeup_fd(self._earlier_pipe)
        for number, handler in self._kept.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._kept.clear()
        os.close(self._pipe[1])  # which ends the thread
        self._pipe = None

    @contextmanager
    def training(self) -> Iterator[None]:
        """The phase in which an optimizer step will ask; listens for as long, where nobody does yet."""
        self.requested = 0
        watching, self.phase = self.watch(), "training"
        try:
            yield
        finally:
            self.phase = "ending"  # 'loading' again would let a signal end a run before its model is saved
            if watching:
                self.rest()

    def _read(self, pipe: int) -> None:
        while numbers := os.read(pipe, 16):
            for number in numbers:
                if number in self._kept:
                    self.arrived(number)
        os.close(pipe)

    def arrived(self, number: int) -> None:
        """One signal, from whatever thread."""
        now = time.monotonic()
        if self.requested:
            if now - self._first > REPEATED_WITHIN:
                self.leave_now(128 + number, f"{name(number)}, the second: left at once, with nothing more saved.")
            return
        self.requested, self._first = number, now
        if self.phase == "loading":
            self.leave_now(NOT_FINISHED, f"{name(number)} before the first step: nothing to save. Start it again.")
        if self.phase == "training" and _main_process():
            say(f"{name(number)}: a checkpoint is saved after this step; a second signal leaves at once.")

    def leave_now(self, code: int, line: str) -> None:
        """End this process, whatever its main thread is at."""
        if _main_process():
            say(line)
        for cleanup in self.cleanups:
            cleanup()
        write_exit_code(code)
        os._exit(code)

    def _forked(self) -> None:
        """A forked child is no part of the run: its signals are not the run's."""
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            for number, handler in self._kept.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            self._pipe = None
            self._kept.clear()


def _noted(*_: object) -> None:
    """The handler of the main thread; the thread that reads the pipe does the work."""


def _main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def say(line: str) -> None:
    """A line on stderr, whoever holds Python's own buffer."""
    sys.stdout.flush() if threading.current_thread() is threading.main_thread() else None
    os.write(2, f"{line}\n".encode())


def name(number: int) -> str:
    """Of a signal, or of what stands for one."""
    return "The launcher is gone" if number == LAUNCHER_LOST else signal.Signals(number).name


signals = Signals()
"""Of this process."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=signals._forked)
