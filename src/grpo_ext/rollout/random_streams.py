"""Random streams that go on after an evaluation as if there had been none."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def random_streams_kept() -> Iterator[None]:
    """Give the random streams of python, numpy and torch, on the CPU and this process's device, back as they were."""
    python, numeric = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(**_device()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numeric)


def _device() -> dict[str, Any]:
    """Of `fork_rng`, which would else open every device of the machine."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return {"devices": []}
    return {"devices": [torch.accelerator.current_device_index()], "device_type": found.type}
