"""`grpo-ext new DIR`: a project to begin with."""

import shutil
import sys
from pathlib import Path


def run(argv: list[str]) -> int:
    """Copy the project of `examples/project` into a folder that is empty or not there yet."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: grpo-ext new DIR", file=sys.stderr)
        return 2
    target = Path(argv[0]).expanduser()
    if problem := _in_the_way(target):
        print(f"grpo-ext new {argv[0]}: {problem}", file=sys.stderr)
        return 2
    shutil.copytree(project(), target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    print("\n".join([f"{target}:", *(f"  {path.relative_to(target)}" for path in sorted(target.rglob("*.*")))]))
    print(f"\nNow:\n  cd {target}\n  grpo-ext check --config recipe.yaml\n  grpo-ext train --config recipe.yaml")
    print("  grpo-ext report outputs/first")
    return 0


def project() -> Path:
    """Where the project lies: inside the wheel, or in a checkout's examples."""
    inside = Path(__file__).parent / "project"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "examples" / "project"


def _in_the_way(target: Path) -> str | None:
    if target.is_dir():
        first = next(iter(sorted(target.iterdir())), None)
        return None if first is None else f"the folder is not empty: it holds {first.name!r}. Name another."
    return f"{target} is a file. Name another." if target.exists() else None
