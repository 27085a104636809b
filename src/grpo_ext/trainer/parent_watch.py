"""End a process whose launcher is gone; only where a launcher started it, so that nohup means what it says."""

import os
import threading
import time

import psutil

from grpo_ext.config.launch import ASKED, COMMAND
from grpo_ext.errors import NOT_FINISHED
from grpo_ext.trainer.signals import LAST_SECONDS, LAUNCHER_LOST, signals

LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION", ASKED)
"""Variables that torchrun, accelerate and `grpo-ext train` give to what they start."""
POLL_SECONDS = 1.0


def watch_parent() -> bool:
    """Begin to watch the launcher, and the command that started it; False where no launcher started this process."""
    if not any(variable in os.environ for variable in LAUNCHERS):
        return False
    watched = (os.getppid(), started_by(os.environ.get(COMMAND)))
    threading.Thread(target=_watch, args=watched, daemon=True, name="grpo_ext parent").start()
    return True


def _watch(parent: int, command: psutil.Process | None) -> None:
    while os.getppid() == parent and (command is None or runs(command)):
        time.sleep(POLL_SECONDS)
    signals.arrived(LAUNCHER_LOST)
    time.sleep(LAST_SECONDS)
    signals.leave_now(NOT_FINISHED, f"The launcher is gone, and the step did not end within {LAST_SECONDS:g} s.")


def started_by(pid: str | None) -> psutil.Process | None:
    """The process of this pid among the ancestors of this one.

    None for any other: a launcher may hand the variable to other machines, or a file of it to a later run.
    """
    try:
        return next((process for process in psutil.Process().parents() if str(process.pid) == pid), None)
    except psutil.Error:
        return None


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended, whatever the system clock says of its start."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
