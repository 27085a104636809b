"""One argparse tree of all commands, their options and their help. It imports no heavy library."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START, TRAIN, AFTER, REFERENCE = "Getting started", "Training", "After training", "Reference"
_KEYS = """
A key of the recipe may follow, such as --learning_rate 1e-6: it overrides the recipe. A list of all keys:
grpo-ext train --help-all"""
EXAMPLES = """
  grpo-ext train --config quickstart/grpo                                   a packaged recipe, in this process
  grpo-ext train --config recipe.yaml --learning_rate 3e-6                  your recipe, with one key changed
  grpo-ext train --config recipe.yaml --accelerate_config zero2 --num_processes 8
  grpo-ext train --config recipe.yaml --resume_from_checkpoint never        from the start, not from a checkpoint
"""


class Option:
    """Arguments of one `add_argument` call."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names, self.settings = names, settings


def processes(text: str) -> int:
    """Return a number of processes; null is 0, which unsets the recipe's.

    Raises:
        argparse.ArgumentTypeError: the text is not an integer of 1 or more.
    """
    if text == "null" or (text.isdecimal() and int(text)):
        return 0 if text == "null" else int(text)
    raise argparse.ArgumentTypeError(f"{text} is not a number of processes. Give 1 or more.")


CONFIG = Option("--config", metavar="RECIPE", help="YAML file or name of a packaged recipe (`grpo-ext recipes`)")
LAUNCH = (
    CONFIG,
    Option("--accelerate_config", metavar="NAME", help="launch configuration: a file, or a name such as zero2"),
    Option("--num_processes", metavar="N", type=processes, help="processes to start"),
)
CONSENT = Option("--trust_remote_code", action="store_true", help="run code that RUN brings, which you have read")
RUN = Option("run", metavar="RUN", help="output_dir of a run, a checkpoint, a folder of a model or adapter, a hub id")


@dataclass(frozen=True)
class Command:
    """A command: heading, line of help; whether keys may follow; end of its help; name of its module."""

    group: str
    summary: str
    keys: bool = False
    further: str = ""
    module: str = ""


COMMANDS = {
    "demo": Command(START, "train a tiny model on this machine and report what it learned", keys=True),
    "new": Command(START, "create a project with a recipe, data, a reward and its test"),
    "check": Command(TRAIN, "list all mistakes in a recipe, or its plan", keys=True),
    "train": Command(TRAIN, "train a recipe", keys=True, further=EXAMPLES),
    "serve": Command(
        TRAIN, "start the vLLM server of a recipe", keys=True, further="\nArguments after -- are passed to vLLM."
    ),
    "score": Command(AFTER, "score saved completions with the rewards of a recipe", keys=True),
    "eval": Command(AFTER, "measure avg@k, pass@k and maj@k with confidence intervals", keys=True),
    "try": Command(AFTER, "chat with a trained model", module="chat"),
    "sample": Command(AFTER, "write completions with rewards, and pass rates of the prompts", keys=True),
    "merge": Command(AFTER, "merge an adapter into its base model"),
    "report": Command(AFTER, "write one HTML file about a run, or about several side by side"),
    "diagnose": Command(AFTER, "list the likely problems of a run, with evidence and cure", module="report"),
    "recipes": Command(REFERENCE, "list the packaged recipes, or print one to copy", module="lists"),
    "losses": Command(REFERENCE, "list the values of `loss_type`, with formula and paper", module="lists"),
    "rewards": Command(REFERENCE, "list the values of `reward_funcs`, with their options", module="lists"),
    "env": Command(REFERENCE, "show versions and hardware, for a bug report"),
}

REMOVED = {"migrate": "It is gone: docs/migrating.md has our key for each key of another project."}
"""Commands of earlier versions of grpo-ext, with what replaces them."""
OPTIONS: dict[str, tuple[Option, ...]] = {
    "demo": (
        Option("--output_dir", metavar="DIR", type=Path, default=Path("outputs/demo"), help="folder of the run"),
        Option("--seed", metavar="N", type=int, default=0, help="seed of the model and of GRPO"),
        Option("--recipe", default="quickstart/grpo", help="recipe name or path (default: %(default)s)"),
    ),
    "recipes": (
        Option("name", nargs="?", metavar="NAME", help="print this recipe: grpo-ext recipes NAME > mine.yaml"),
    ),
    "new": (Option("folder", metavar="DIR", type=Path, help="a folder that is new or empty"),),
    "check": LAUNCH,
    "train": (*LAUNCH, Option("--help-all", action="store_true", help="list all keys of a recipe, by subject")),
    "serve": (
        CONFIG,
        Option("--host", metavar="H", default="127.0.0.1", help="address to listen on (default: %(default)s)"),
        Option("--port", metavar="P", type=int, help="port to listen on (default: the recipe's)"),
    ),
    "score": (
        CONFIG,
        Option("--file", metavar="COMPLETIONS", help="jsonl or parquet file of completions, or a run's folder"),
        Option("--explain", metavar="N", type=int, help="show every step of the computation for row N"),
        Option("--output", metavar="FILE", help="write all rows with their scores to this .jsonl or .parquet"),
    ),
    "eval": (
        *LAUNCH,
        Option("--model", metavar="RUN", action="append", help="a run or model; repeat it to compare several"),
        Option("--output", metavar="DIR", type=Path, help="folder of the results (default: in output_dir)"),
        Option("--samples", metavar="N", type=int, help="completions per prompt"),
        Option("--limit", metavar="N", type=int, help="number of prompts"),
        Option("--temperature", metavar="T", type=float, help="sampling temperature"),
        Option("--one_of_several", action="store_true", help=argparse.SUPPRESS),  # which the first process prints
    ),
    "try": (
        RUN,
        CONSENT,
        Option("--compare", action="store_true", help="show the answer of the model before training beside it"),
        Option("--prompt", metavar="TEXT", help="answer this question only; or pipe in one question per line"),
        Option("--greedy", action="store_true", help="decode greedily instead of sampling as in training"),
        Option("--max_new_tokens", type=int, metavar="N", help="longest answer (default: the recipe's limit)"),
        Option("--seed", type=int, metavar="N", help="seed of the sampling, for reproducible answers"),
    ),
    "sample": (
        CONFIG,
        Option("--output", metavar="FILE", required=True, help=".jsonl or .parquet; prompts go to FILE_prompts"),
        Option("--num", type=int, default=8, metavar="N", help="completions per prompt (default: %(default)s)"),
        Option("--model", metavar="RUN", help="run, checkpoint, model or adapter to use instead of the recipe's"),
        Option("--pass_by", metavar="REWARD", help="reward that the pass rate is the mean of (default: accuracy)"),
    ),
    "merge": (
        RUN,
        CONSENT,
        Option("--output", metavar="DIR", type=Path, help="folder of the model (default: RUN-merged)"),
        Option(
            "--dtype",
            choices=("float32", "bfloat16", "float16"),
            default="float32",
            help="dtype of the weights (default: %(default)s)",
        ),
    ),
    "report": (
        Option("runs", nargs="+", type=Path, metavar="RUN", help="output_dir of a run"),
        Option("--output", metavar="FILE", type=Path, help="default: report.html in RUN, or here for several"),
    ),
    "diagnose": (
        Option("run", type=Path, metavar="RUN", help="output_dir of a run, finished or not"),
        Option("--json", action="store_true", help="print one JSON object"),
    ),
}


def tree() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of `grpo-ext`, and those of its commands by name."""
    parser = argparse.ArgumentParser(prog="grpo-ext", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog=command.further + (_KEYS if command.keys else ""),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for option in OPTIONS.get(name, ()):
            action = sub.add_argument(*option.names, **option.settings)
            hyphened = (name.replace("_", "-") for name in option.names if name.startswith("-"))
            sub._option_string_actions |= dict.fromkeys(hyphened, action)  # as TRL takes keys; not in the help
        if command.keys:
            sub.usage = sub.format_usage().removeprefix("usage: ").rstrip() + " [--key value ...]"
    return parser, commands.choices


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line; `keys` holds the recipe and keys after it, `extra` what follows --.

    Wrong options end the process with exit code 2.
    """
    split = argv.index("--") if "--" in argv else len(argv)
    parser, commands = tree()
    options, keys = parser.parse_known_args(argv[:split])
    config, options.extra = getattr(options, "config", None), list(argv[split + 1 :])
    unknown = [] if COMMANDS[options.command].keys else keys
    if unknown := [*unknown, *(options.extra if options.command != "serve" else [])]:
        commands[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    options.keys = [*(["--config", config] if config is not None else []), *keys]
    return options


def overview() -> str:
    """Return the help of `grpo-ext`: all commands, by group."""
    lines = ["usage: grpo-ext COMMAND ...      (grpo-ext COMMAND --help, grpo-ext --version)"]
    for title in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines += ["", f"{title}:"]
        lines += [f"  {name:12}{c.summary}" for name, c in COMMANDS.items() if c.group == title]
    return "\n".join(lines)
