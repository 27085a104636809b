"""The `grpo-ext` command, run in this process."""

import pytest

from grpo_ext.commands.cli import main


def command(*argv: object) -> int:
    """Run `grpo-ext ARGV` and return its exit code."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in argv])
    return end.value.code
