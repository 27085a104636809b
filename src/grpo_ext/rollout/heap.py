"""Memory that the C library keeps of a generation, given back to the system before the training step allocates.

On a CPU tensors lie in glibc's heap. A rollout leaves gaps in it, gigabytes with a real model, that the tensors of
training do not fit into and that glibc does not give back by itself.
"""

import ctypes
import sys
from functools import cache
from typing import Any

MUCH = 2**28
"""Free bytes from which on they are given back: it takes a second for some gigabytes."""


class _Statistics(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@cache
def _glibc() -> Any:
    """Return glibc from 2.33 on, else None."""
    library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(library, "mallinfo2"):
        return None
    library.mallinfo2.restype = _Statistics
    return library


def free_bytes() -> int:
    """Return the free bytes that the heap keeps; 0 where that is not known."""
    return int(_glibc().mallinfo2().fordblks) if _glibc() else 0


def give_back() -> None:
    """Give the free memory of the heap back to the system, if it is `MUCH`."""
    if free_bytes() > MUCH:
        _glibc().malloc_trim(0)
