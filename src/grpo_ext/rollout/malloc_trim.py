"""Memory that the C library keeps of a generation, given back to the system before the training step allocates.

On a CPU tensors lie in glibc's heap. A rollout leaves gaps in it, gigabytes with a real model, that the tensors of
training do not fit into and that glibc does not give back by itself.
"""

import ctypes
import sys

import psutil

LARGE = 2**32
"""Resident bytes from which on it is done: a smaller process has little to give back, and short generations."""


def give_back() -> None:
    """Give what is free in the heap of a large process back to the system, with glibc."""
    if sys.platform == "linux" and psutil.Process().memory_info().rss > LARGE:
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):
            library.malloc_trim(0)
