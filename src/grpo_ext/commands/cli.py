"""The `grpo-ext` command: names and one line of help for each, and where each begins."""

import importlib
import os
import sys
from collections.abc import Sequence

from grpo_ext import __version__
from grpo_ext.registry import did_you_mean

START, TRAIN, AFTER, LOOK_UP = "to start", "to train", "after training", "to look up"
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": (
        START,
        "train a tiny model on this machine and report what it learned: [--output_dir DIR] [--seed N] "
        "[--recipe RECIPE] [--key value ...]",
    ),
    "new": (START, "lay out a project with a recipe, data, a reward and its test: DIR"),
    "migrate": (START, "turn a configuration of TRL, verl, ... into a recipe: FILE [--output FILE] [--version N]"),
    "check": (
        TRAIN,
        "all mistakes of a recipe, or its plan: --config RECIPE [--accelerate_config NAME] [--num_processes N] "
        "[--key value ...]",
    ),
    "train": (
        TRAIN,
        "train a recipe: --config RECIPE [--accelerate_config NAME] [--num_processes N] [--key value ...]",
    ),
    "serve": (
        TRAIN,
        "start the vLLM server of a recipe: --config RECIPE [--host H] [--port P] [--key value ...] [-- FLAGS]",
    ),
    "verify": (
        TRAIN,
        "compare gradients of all splits: --config RECIPE [--accelerate_config NAME] [--num_processes N] "
        "[--precision bfloat16]",
    ),
    "score": (
        AFTER,
        "score saved completions: --config RECIPE --file COMPLETIONS [--explain N] [--output FILE] [--key value ...]",
    ),
    "eval": (
        AFTER,
        "avg@k, pass@k, maj@k with intervals: --config RECIPE [--model RUN ...] [--output DIR] [--samples N] "
        "[--limit N] [--temperature T] [--accelerate_config NAME] [--num_processes N] [--key value ...]",
    ),
    "try": (
        AFTER,
        "ask a trained model: RUN [--compare] [--prompt TEXT] [--greedy] [--max_new_tokens N] [--seed N]",
    ),
    "sample": (
        AFTER,
        "completions with rewards, and pass rates: --config RECIPE --output FILE [--num N] [--model RUN] "
        "[--pass_by REWARD] [--key value ...]",
    ),
    "merge": (AFTER, "make an adapter and its base one model: RUN [--output DIR] [--dtype float32|bfloat16|float16]"),
    "report": (
        AFTER,
        "one HTML file of a run, or of several beside each other: RUN [RUN ...] [--output FILE.html] [--watch]",
    ),
    "replay": (
        AFTER,
        "a recorded step computed again, under any loss: DUMP [--model RUN] [--output FILE] [--loss_type L] "
        "[--key value ...]",
    ),
    "diagnose": (AFTER, "name the likely faults of a run, with evidence and cure: RUN [--json]"),
    "recipes": (LOOK_UP, "the packaged recipes"),
    "losses": (LOOK_UP, "what `loss_type` may name: formula and paper"),
    "rewards": (LOOK_UP, "what `reward_funcs` may name: what it gives, its options"),
    "env": (LOOK_UP, "versions and hardware, for a report of a bug"),
    "completion": (LOOK_UP, "a script that completes these words by the tab key: bash|zsh|fish"),
}
"""Each is a module of this folder with a `run(argv)` that returns an exit code; its group, and `line: how to ask`."""
MODULES = {"try": "chat"}
"""Where a module cannot have the command's name."""
NO_BARS = ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS")
"""Set where there is no terminal: in a file each move of a bar is another line."""
HELP = ("-h", "--help")
KEYS = """
RECIPE is a YAML file, or the name of a packaged recipe (`grpo-ext recipes`). What stands on the command line wins over
it: any key may follow, such as --learning_rate 1e-6. All keys, by subject: grpo-ext train --help-all"""
WAYS = """
  grpo-ext train --config quickstart/grpo                                   a packaged recipe, in this process
  grpo-ext train --config recipe.yaml --learning_rate 3e-6                  one of yours, one key changed
  grpo-ext train --config recipe.yaml --accelerate_config zero2 --num_processes 8
  grpo-ext train --config recipe.yaml --resume_from_checkpoint never        afresh; else it goes on where it was
"""
FURTHER = dict.fromkeys(("demo", "check", "serve", "verify", "score", "sample", "eval"), KEYS) | {"train": WAYS + KEYS}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `grpo-ext` command."""
    if argv is None and not sys.stderr.isatty():
        os.environ.update({name: os.environ.get(name, "1") for name in NO_BARS})
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        code = 128 + 13  # what a shell says of SIGPIPE
    sys.exit(code)


def _run(given: list[str]) -> int:
    if not given or given[0] in (*HELP, "help"):
        print(overview())
        return 0 if given else 2
    name, *rest = given
    if name in ("--version", "-V"):
        print(f"grpo-ext {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"grpo-ext: no command {name!r}. {did_you_mean(name, COMMANDS)}", file=sys.stderr)
        return 2
    if set(HELP) & set(rest):
        print(help_of(name))
        return 0
    return int(importlib.import_module(f"grpo_ext.commands.{MODULES.get(name, name)}").run(rest))


def overview() -> str:
    """All commands, by what one wants to do."""
    lines = ["usage: grpo-ext COMMAND ...      (grpo-ext COMMAND --help, grpo-ext --version)"]
    for title in dict.fromkeys(group for group, _ in COMMANDS.values()):
        lines += ["", f"{title}:"]
        mine = {name: line for name, (group, line) in COMMANDS.items() if group == title}
        lines += [f"  {name:12}{line.partition(': ')[0]}" for name, line in mine.items()]
    return "\n".join(lines)


def help_of(name: str) -> str:
    """How to ask for one command."""
    what, _, how = COMMANDS[name][1].partition(": ")
    return f"usage: grpo-ext {name} {how}".rstrip() + f"\n\n{what[0].upper()}{what[1:]}.\n" + FURTHER.get(name, "")


def _nobody_reads() -> bool:
    """Whether what we print to is closed, as by `| head`; then nothing more is written there."""
    try:
        print(flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return True
    return False


if __name__ == "__main__":
    main()
