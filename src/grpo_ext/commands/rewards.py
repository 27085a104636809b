"""`grpo-ext rewards`: what `reward_funcs` may name."""

import inspect
from typing import Any

from grpo_ext.commands.console import by_entry
from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.signatures import needs, options


def run(argv: list[str]) -> int:
    """Names, what it gives, the columns that it needs, and its options with their defaults."""
    for names, function in sorted(by_entry(rewards), key=lambda entry: entry[0]):
        print(f"{', '.join(names)}\n    {' '.join(_summary(function).split())}")
        for title, words in (("columns", needs(function)), ("options", _options(function))):
            if words:
                print(f"    {title}: {', '.join(words)}")
    return 0


def _summary(function: Any) -> str:
    return (inspect.getdoc(function) or "").split("\n\n")[0]


def _options(function: Any) -> list[str]:
    return [
        f"{name} (must be set)" if option.default is option.empty else f"{name}={option.default!r}"
        for name, option in (options(function) or {}).items()
    ]
