"""Releases of transformers: which ones the package is tested with, and a warning of a newer one."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Final

from grpo_ext.errors import Problem

TESTED: Final = (5, 24)
"""The newest release of transformers that the tests pass with."""


def release(package: str) -> tuple[int, int]:
    """Return the first two numbers of the version of an installed package."""
    major, minor = version(package).split(".")[:2]
    return int(major), int(minor)


def untested() -> Iterator[Problem]:
    """Yield a warning if the installed transformers is newer than tested."""
    if release("transformers") > TESTED:
        major, minor = TESTED
        reason = f"it is newer than tested with this version of grpo-ext (up to {major}.{minor})"
        cure = f"If something fails: pip install 'transformers<{major}.{minor + 1}'."
        yield Problem("transformers", version("transformers"), reason, cure)


@contextmanager
def naming_untested() -> Iterator[None]:
    """Add that warning to an error of the kinds that a change of transformers causes."""
    try:
        yield
    except (AttributeError, ImportError, TypeError) as error:
        for problem in untested():
            error.add_note(str(problem))
        raise
