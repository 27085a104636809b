"""`grpo-ext rewards`: the values of `reward_funcs`."""

import argparse
import inspect
from collections.abc import Callable

from grpo_ext.commands.console import by_entry
from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.signatures import needs, options


def run(_: argparse.Namespace) -> int:
    """Print names, summary, required columns and options with their defaults of each reward."""
    for names, function in sorted(by_entry(rewards), key=lambda entry: entry[0]):
        summary = (inspect.getdoc(function) or "").split("\n\n")[0]
        print(f"{', '.join(names)}\n    {' '.join(summary.split())}")
        for title, words in (("columns", needs(function)), ("options", _options(function))):
            if words:
                print(f"    {title}: {', '.join(words)}")
    return 0


def _options(function: Callable[..., object]) -> list[str]:
    return [
        f"{name} (must be set)" if option.default is option.empty else f"{name}={option.default!r}"
        for name, option in (options(function) or {}).items()
    ]
