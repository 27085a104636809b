"""`grpo-ext recipes`: what is packaged."""

from grpo_ext.recipe.files import packaged_recipes


def run(argv: list[str]) -> int:
    """Name and first comment line of each packaged recipe."""
    for name, path in packaged_recipes().items():
        first = path.read_text().splitlines()[0].removeprefix("#").strip()
        print(f"{name:32} {first}")
    return 0
