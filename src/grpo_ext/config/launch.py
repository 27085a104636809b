"""Processes of this launch, or of one that is only planned."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_PLANNED: ContextVar[int | None] = ContextVar("planned processes", default=None)  # None: this launch is no plan


@contextmanager
def planned_processes(count: int | None) -> Iterator[None]:
    """Check and plan for a launch of `count` processes (None: of this one's) elsewhere, whose GPUs are not here."""
    token = _PLANNED.set(count or world_size())
    try:
        yield
    finally:
        _PLANNED.reset(token)


def planning() -> bool:
    """Whether a launch is only being planned."""
    return _PLANNED.get() is not None


def world_size() -> int:
    """Processes of this launch, as torchrun and accelerate announce them, or of the one being planned."""
    return _PLANNED.get() or int(os.environ.get("WORLD_SIZE", "1"))
