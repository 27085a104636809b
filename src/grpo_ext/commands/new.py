"""`grpo-ext new DIR`: create a first project."""

import argparse
import shutil
from pathlib import Path

from grpo_ext.errors import ConfigError, Problem

NEXT_STEPS = """
Now:
  cd {}
  grpo-ext check --config recipe.yaml
  grpo-ext train --config recipe.yaml
  grpo-ext report outputs/first"""


def run(options: argparse.Namespace) -> int:
    """Copy `examples/project` into a folder that is new or empty.

    Raises:
        ConfigError: the folder is a file, or not empty.
    """
    target = options.folder.expanduser()
    if target.exists() and not target.is_dir():
        raise ConfigError([Problem("DIR", str(target), "it is a file", "Name another folder.")])
    if target.is_dir() and (held := sorted(path.name for path in target.iterdir())):
        reason = f"the folder is not empty: it holds {held[0]!r}"
        raise ConfigError([Problem("DIR", str(target), reason, "Name another folder.")])
    shutil.copytree(project(), target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    print("\n".join([f"{target}:", *(f"  {path.relative_to(target)}" for path in sorted(target.rglob("*.*")))]))
    print(NEXT_STEPS.format(target))
    return 0


def project() -> Path:
    """Return the folder of the project: in the wheel, or in a checkout's examples."""
    inside = Path(__file__).parent / "project"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "examples" / "project"
