"""`grpo-ext recipes`, `losses` and `rewards`: the names that a recipe may use."""

import argparse
import inspect
from collections.abc import Callable, Mapping
from typing import TypeVar

from grpo_ext.objective.losses import losses
from grpo_ext.recipe.files import find_recipe, packaged_recipes
from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.signatures import function_options, needs

T = TypeVar("T")


def run(options: argparse.Namespace) -> int:
    """Print a list, or one packaged recipe.

    Raises:
        ConfigError: no recipe has the name.
    """
    if options.command == "recipes" and options.name is not None:
        print(find_recipe(options.name).read_text(encoding="utf-8"), end="")
    else:
        {"recipes": _recipes, "losses": _losses, "rewards": _rewards}[options.command]()
    return 0


def by_entry(registry: Mapping[str, T]) -> list[tuple[list[str], T]]:
    """Return each entry of a registry once, with all of its names."""
    by_id: dict[int, tuple[list[str], T]] = {}
    for name, entry in registry.items():
        by_id.setdefault(id(entry), ([], entry))[0].append(name)
    return list(by_id.values())


def _recipes() -> None:
    recipes = packaged_recipes()
    width = max(map(len, recipes))
    for name, path in recipes.items():
        print(f"{name:{width}}  {path.read_text().splitlines()[0].removeprefix('#').strip()}")


def _losses() -> None:
    for names, row in by_entry(losses):
        print(f"{', '.join(names)}\n    {row.formula}\n    {row.paper}")


def _rewards() -> None:
    for names, function in sorted(by_entry(rewards), key=lambda entry: entry[0]):
        summary = (inspect.getdoc(function) or "").split("\n\n")[0]
        print(f"{', '.join(names)}\n    {' '.join(summary.split())}")
        for title, words in (("columns", needs(function)), ("options", _options(function))):
            if words:
                print(f"    {title}: {', '.join(words)}")


def _options(function: Callable[..., object]) -> list[str]:
    return [
        f"{name} (must be set)" if option.default is option.empty else f"{name}={option.default!r}"
        for name, option in (function_options(function) or {}).items()
    ]
