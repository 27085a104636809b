"""A reward that makes a step last, and says on disk that it has begun."""

import os
import time
from pathlib import Path


def slow(completions, trainer_state, **_):
    Path(os.environ["SLOW_SIGN"]).write_text(str(trainer_state.global_step))
    time.sleep(float(os.environ.get("SLOW_SECONDS", "0.5")))
    return [float(len(completion) % 3) for completion in completions]
