"""`grpo-ext recipes`: the packaged recipes."""

import argparse

from grpo_ext.recipe.files import packaged_recipes


def run(_: argparse.Namespace) -> int:
    """Print name and first comment line of each packaged recipe."""
    found = packaged_recipes()
    width = max(map(len, found))
    for name, path in found.items():
        first = path.read_text().splitlines()[0].removeprefix("#").strip()
        print(f"{name:{width}}  {first}")
    return 0
