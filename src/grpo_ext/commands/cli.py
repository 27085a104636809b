"""The `grpo-ext` command: names and one line of help for each, and where each begins."""

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "train a recipe: --config RECIPE [--accelerate_config NAME] [--num_processes N] [--key value ...]",
    "check": "validate a recipe and print its plan: --config RECIPE [--num_processes N] [--key value ...]",
    "serve": "start the vLLM server of a recipe: --config RECIPE [--host H] [--port P] [--key value ...] [-- FLAGS]",
    "score": "score saved completions: --config RECIPE --file COMPLETIONS [--explain N] [--output FILE] [--key value]",
    "verify": "compare gradients of all splits: --config RECIPE [--accelerate_config NAME] [--num_processes N]",
    "recipes": "list the packaged recipes",
    "demo": "train a tiny model on this machine and report what it learned",
}
"""Each is a module of this folder with a `run(argv)` that returns an exit code."""
_OWN_HELP = ("train", "demo")
"""Commands that say more themselves when asked for help."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `grpo-ext` command."""
    parser = argparse.ArgumentParser(prog="grpo-ext", description="GRPO-style training from a recipe.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, line in COMMANDS.items():
        commands.add_parser(name, help=line, description=line, add_help=False)
    given = list(sys.argv[1:] if argv is None else argv)
    known, _ = parser.parse_known_args(given[:1])
    if {"-h", "--help"} & set(given[1:]):
        commands.choices[known.command].print_help()
        if known.command not in _OWN_HELP:
            sys.exit(0)
    sys.exit(importlib.import_module(f"grpo_ext.commands.{known.command}").run(given[1:]))


if __name__ == "__main__":
    main()
