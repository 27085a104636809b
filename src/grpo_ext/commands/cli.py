"""The `grpo-ext` command: names and one line of help for each, and where each begins."""

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "train a recipe: --config RECIPE [--accelerate_config NAME] [--num_processes N] [--key value ...]",
    "check": "validate a recipe and print its plan: --config RECIPE [--num_processes N] [--key value ...]",
    "serve": "start the vLLM server of a recipe: --config RECIPE [--host H] [--port P] [--key value ...] [-- FLAGS]",
    "score": "score saved completions: --config RECIPE --file COMPLETIONS.jsonl [--explain N] [--key value ...]",
    "sample": "completions with rewards, and pass rates: --config RECIPE --output FILE [--num N] [--model RUN] "
    "[--pass_by REWARD] [--key value ...]",
    "try": "ask a trained model: RUN [--compare] [--prompt TEXT] [--greedy] [--max_new_tokens N] [--seed N]",
    "merge": "make an adapter and its base one model: RUN [--output DIR] [--dtype float32|bfloat16|float16]",
    "verify": "compare gradients of all splits: --config RECIPE [--accelerate_config NAME] [--num_processes N]",
    "recipes": "list the packaged recipes",
    "demo": "train a tiny model on this machine and report what it learned",
}
"""Each is a module of this folder with a `run(argv)` that returns an exit code."""
_MODULES = {"try": "chat"}
"""Where a module cannot have the command's name."""
_OWN_HELP = ("train", "demo", "sample", "try", "merge")
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
    sys.exit(importlib.import_module(f"grpo_ext.commands.{_MODULES.get(known.command, known.command)}").run(given[1:]))


if __name__ == "__main__":
    main()
