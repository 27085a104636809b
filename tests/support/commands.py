"""The `grpo-ext` command, run in this process."""

import logging

import pytest

from grpo_ext.commands.cli import main


def command(*argv: object) -> int:
    """Run `grpo-ext ARGV` and return its exit code."""
    logger = logging.getLogger("grpo_ext")
    level = logger.level
    try:
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in argv])
    finally:
        logger.setLevel(level)  # `verify` sets it, for a process of its own
    return end.value.code
