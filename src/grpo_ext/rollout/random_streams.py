"""Random states of Python, numpy and torch, which what is not part of the training must not change."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_streams_kept() -> Iterator[None]:
    """Restore the random states at the end of a `with` block."""
    restore = random_state()
    try:
        yield
    finally:
        restore()


def random_state() -> Callable[[], None]:
    """Return a function that restores the present random states, on the CPU and on this process's device."""
    python, numeric, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = None if accelerator is None else torch.get_device_module(accelerator)
    of_device = None if device is None else device.get_rng_state()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numeric)
        torch.set_rng_state(cpu)
        if device is not None:
            device.set_rng_state(of_device)

    return restore
