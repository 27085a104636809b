"""Random streams that go on after an evaluation as if there had been none."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_streams_kept() -> Iterator[None]:
    """Give the random streams of python, numpy and torch on all devices back as they were."""
    python, numeric = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(device_type=_device_type()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numeric)


def _device_type() -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cuda" if accelerator is None else accelerator.type  # of fork_rng, which has none for the CPU alone
