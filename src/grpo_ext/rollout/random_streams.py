"""Keep an evaluation from changing the random numbers of the training that follows."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def random_streams_kept() -> Iterator[None]:
    """Restore the random states of Python, numpy and torch, on the CPU and on this process's device."""
    python, numeric = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(**_device()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numeric)


def _device() -> dict[str, Any]:
    """Return arguments of `fork_rng`, which by default opens every device of the machine."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return {"devices": []}
    return {"devices": [torch.accelerator.current_device_index()], "device_type": found.type}
