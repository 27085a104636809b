"""A process whose launcher is gone ends too; only where a launcher started it, so that nohup means what it says."""

import os
import threading
import time

from grpo_ext.config.launch import ASKED
from grpo_ext.errors import NOT_FINISHED
from grpo_ext.trainer.signals import LAST_SECONDS, LAUNCHER_LOST, signals

LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION", ASKED)
"""Variables that torchrun, accelerate and `grpo-ext train` give to what they start."""
POLL_SECONDS = 1.0


def watch_parent() -> bool:
    """Begin to watch; False where no launcher has started this process."""
    if not any(variable in os.environ for variable in LAUNCHERS):
        return False
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True, name="grpo_ext parent").start()
    return True


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    signals.arrived(LAUNCHER_LOST)
    time.sleep(LAST_SECONDS)
    signals.leave_now(NOT_FINISHED, f"The launcher is gone, and the step did not end within {LAST_SECONDS:g} s.")
