"""Rewards that make a step last: one says on disk that it has begun, the other ends the run meanwhile."""

import os
import signal
import time
from pathlib import Path

import psutil


def slow(completions, trainer_state, **_):
    Path(os.environ["SLOW_SIGN"]).write_text(str(trainer_state.global_step))
    time.sleep(float(os.environ.get("SLOW_SECONDS", "0.5")))
    return [float(len(completion) % 3) for completion in completions]


def hangs_once(completions, trainer_state, **_):
    """Ends the run and hangs in the step that HANGS_IN_STEP names, the first time."""
    sign = Path(os.environ["GAMES_BEGUN"])
    if str(trainer_state.global_step + 1) == os.environ.get("HANGS_IN_STEP") and not sign.exists():
        sign.touch()
        os.kill(int(os.environ["TRAINER"]), signal.SIGTERM)
        time.sleep(120)
    return [sum(map(ord, str(completion))) % 97 / 97 for completion in completions]


def hangs_on_the_first_rank(completions, trainer_state, **_):
    """Ends its own process of two and hangs in the third step, the first time."""
    sign = Path(f"{os.environ['SLOW_SIGN']}.hung")
    if os.environ["RANK"] == "0" and trainer_state.global_step == 2 and not sign.exists():
        sign.touch()
        _warden, trainer, *_ = psutil.Process().parents()
        trainer.terminate()
        time.sleep(120)
    return [sum(map(ord, str(completion))) % 97 / 97 for completion in completions]
