"""Memory that the C library keeps of a generation, given back to the system before the training step allocates.

On a CPU tensors lie in glibc's heap. A rollout leaves gaps in it, gigabytes with a real model, that the tensors of
training do not fit into and that glibc does not give back by itself.
"""

import ctypes
import os
import sys

LARGE = 2**32
"""Resident bytes from which on it is done: a smaller process has little to give back, and short generations."""


def resident() -> int:
    """Return the bytes of this process that are in memory; 0 on other systems than Linux."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def give_back() -> None:
    """Give what is free in the heap of a large process back to the system, with glibc."""
    if resident() > LARGE and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
