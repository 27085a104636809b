"""Entry point of the `grpo-ext` command."""

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from grpo_ext import __version__
from grpo_ext.caches import use_writable_caches
from grpo_ext.commands.arguments import COMMANDS, REMOVED, overview, parse_command_line
from grpo_ext.errors import FAILURES, LOST, NOT_FINISHED
from grpo_ext.registry import did_you_mean
from grpo_ext.terminal import safe_output, without_notices
from grpo_ext.versions import naming_untested

NO_BARS = ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS")
"""Set without a terminal: in a log file every update of a bar is one more line."""


@safe_output()
def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    if argv is None and not sys.stderr.isatty():
        os.environ.update({name: os.environ.get(name, "1") for name in NO_BARS})
    use_writable_caches()
    try:
        code = run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        code = 128 + 13  # a shell's exit code for SIGPIPE
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Run a command; return its exit code, which is 2 after an error of the user's."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if argv else 2
    name = argv[0]
    if name in ("--version", "-V"):
        print(f"grpo-ext {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"grpo-ext: no command {name!r}. {REMOVED.get(name) or did_you_mean(name, COMMANDS)}", file=sys.stderr)
        return 2
    options = parse_command_line(argv)
    try:
        with naming_untested(), without_notices():
            return int(importlib.import_module(f"grpo_ext.commands.{COMMANDS[name].module or name}").run(options))
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        print(f"\ngrpo-ext {name}: interrupted.", file=sys.stderr)
        return 128 + signal.SIGINT
    except LOST as error:
        print(error, file=sys.stderr)
        return NOT_FINISHED
    except (*FAILURES, OSError) as error:
        if name == "train" and isinstance(error, OSError):  # a run that fails keeps its traceback
            raise
        print(error, file=sys.stderr)
        return 2


def _stdout_is_closed() -> bool:
    """Return whether stdout has no reader any more (`| head`); if so, redirect it to the null device."""
    try:
        print(flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it exits
        return True
    return False


if __name__ == "__main__":
    main()
