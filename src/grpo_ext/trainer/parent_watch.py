"""End a process whose launcher is gone; only where a launcher started it, so that nohup means what it says."""

import os
import socket
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
    thread = threading.Thread(target=_watch, args=(os.getppid(),), daemon=True, name="grpo_ext parent")
    thread.start()
    return True


def _watch(parent: int) -> None:
    while os.getppid() == parent and command_runs(os.environ.get(COMMAND)):
        time.sleep(POLL_SECONDS)
    signals.arrived(LAUNCHER_LOST)
    time.sleep(LAST_SECONDS)
    signals.leave_now(NOT_FINISHED, f"The launcher is gone, and the step did not end within {LAST_SECONDS:g} s.")


def command_identity() -> str:
    """Return machine, pid and start time of this process, for `COMMAND`: a pid alone may be reused."""
    process = psutil.Process()
    return f"{process.pid} {process.create_time()} {socket.gethostname()}"


def command_runs(identity: str | None) -> bool:
    """True while the process with this identity runs, or where it cannot be watched from here."""
    pid, created, host = (identity or "0 0 -").split(maxsplit=2)
    if host != socket.gethostname():
        return True
    try:
        process = psutil.Process(int(pid))
        return abs(process.create_time() - float(created)) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
