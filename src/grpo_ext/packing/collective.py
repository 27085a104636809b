"""Checks that all processes make together: what one of them cannot do is raised on all, so that none waits for it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from accelerate.utils import gather_object

from grpo_ext.errors import ConfigError, Problem


def largest(number: float) -> float:
    """Return the largest number of all processes."""
    return max(gather_object([number]))


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an allocator raised it, of a GPU, of the CPU or of Python."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator:" in str(error)


@contextmanager
def failing_alike() -> Iterator[None]:
    """Raise on all processes what one of them has raised inside; collective.

    Raises:
        ConfigError: one process raised it.
        torch.OutOfMemoryError: one process had too little memory.
    """
    cause: ConfigError | None = None
    failed: list[Problem] | str | None = None
    try:
        yield
    except ConfigError as error:
        cause, failed = error, error.problems
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failed = str(error)
    failures = [one for one in gather_object([failed]) if one is not None]
    if problems := next((one for one in failures if isinstance(one, list)), None):
        raise ConfigError(problems) from cause
    if failures:
        raise torch.OutOfMemoryError(failures[0])


@contextmanager
def entered_alike(*contexts: AbstractContextManager[None]) -> Iterator[None]:
    """Enter contexts on all processes, or on none."""
    with ExitStack() as entered:
        with failing_alike():
            for context in contexts:
                entered.enter_context(context)
        yield
