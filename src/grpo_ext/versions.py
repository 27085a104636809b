"""Version of transformers that the package is tested with, and a notice of one that is newer."""

from importlib.metadata import version
from typing import Final

TESTED: Final = (5, 24)
"""The newest transformers that the tests pass with: its first two numbers."""


def release(package: str) -> tuple[int, int]:
    """Return the first two numbers of the version of an installed package."""
    major, minor = version(package).split(".")[:2]
    return int(major), int(minor)


def newer_than_tested() -> str | None:
    """Return the notice that the installed transformers is newer than tested; None if it is not."""
    if release("transformers") <= TESTED:
        return None
    newest = ".".join(map(str, TESTED))
    return (
        f"transformers {version('transformers')} is newer than tested with this version of grpo-ext (up to {newest}). "
        f"If something fails: pip install 'transformers<{TESTED[0]}.{TESTED[1] + 1}'."
    )
