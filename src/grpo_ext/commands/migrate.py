"""`grpo-ext migrate`: another project's configuration as a recipe, with every key accounted for."""

import argparse
import io
import sys
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from grpo_ext.config.launch import planned_processes
from grpo_ext.errors import ConfigError, Problem
from grpo_ext.recipe.files import read_yaml
from grpo_ext.recipe.foreign import projects
from grpo_ext.recipe.foreign.draft import Draft
from grpo_ext.recipe.foreign.python import SUFFIXES, exchange
from grpo_ext.recipe.foreign.words import read_words
from grpo_ext.recipe.foreign.writing import written
from grpo_ext.recipe.launching import launch_of
from grpo_ext.recipe.parsing import all_keys, load_recipe

DECISIONS = 1
"""Exit code of a recipe that a person must complete before `check` lets it pass."""
_SHELL = (".sh", ".bash", ".slurm", ".txt", ".args")


def run(options: argparse.Namespace) -> int:
    """Write the recipe; return 0 where it passes, 1 where a person must complete it, 2 where there is none."""
    output = options.output
    if output and Path(output).exists():
        raise ConfigError([Problem("--output", output, "it exists", "Name another file, or remove it.")])
    if options.file.suffix in SUFFIXES:
        print(exchange(options.file), file=sys.stderr)
        return 2
    kind, draft = migrated(options.file, options.version)
    text = written(draft, str(options.file), projects.PROJECTS[kind].title, output or "RECIPE.yaml")
    if output:
        Path(output).write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    problems = refusals(text)
    print(summary(draft, problems, output or "the recipe above"), file=sys.stderr)
    return DECISIONS if problems else 0


def migrated(path: Path, version: str = "") -> tuple[str, Draft]:
    """Return whose configuration a file is, and the recipe that it becomes.

    Raises:
        ConfigError: it cannot be read, or is not a configuration of a run by rewards with groups of completions.
    """
    known = frozenset(all_keys())
    given, asked = _read(path)
    kind = projects.kind_of(given, known)
    if kind in projects.NO_RECIPES:
        raise ConfigError([projects.is_no_recipe(str(kind), str(path))])
    if kind is None and not given.keys() & known:
        projects_known = ", ".join(project.title for project in projects.PROJECTS.values())
        raise ConfigError([f"{path}: not a configuration that is known here. Known: {projects_known}."])
    kind = kind or "trl"
    try:
        return kind, projects.draft_of(kind, {str(key): value for key, value in given.items()}, version, asked)
    except (TypeError, AttributeError, ValueError, ArithmeticError) as error:
        if isinstance(error, ConfigError):
            raise
        title = projects.PROJECTS[kind].title
        raise ConfigError([f"{path} has a value that {title} does not take: {error}."]) from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    if not path.is_file():
        raise ConfigError([f"{path}: no such file. Correct the path."])
    try:
        return read_words(path) if path.suffix in _SHELL else (read_yaml(path), {})
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path} cannot be read: {error}."]) from error


def refusals(text: str) -> list[str]:
    """Return what `check` says about a recipe before it loads anything."""
    with tempfile.TemporaryDirectory(prefix="grpo_ext_migrate_") as folder, redirect_stderr(io.StringIO()):
        path = Path(folder) / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        argv = ["--config", str(path)]
        try:
            with planned_processes(launch_of(argv).planned):
                load_recipe(argv)
        except ConfigError as error:
            return error.problems
    return []


def summary(draft: Draft, problems: list[str], name: str) -> str:
    """Say what became of the keys, what is to be decided, and whether the recipe passes."""
    converted, left = len(draft.converted), len(draft.left)
    asked = len(draft.given) - converted - left
    counts = f"{converted} converted, {left} left out, each with its reason in {name}"
    lines = [f"{len(draft.given)} keys: {counts}{f', {asked} in the decisions' if asked else ''}."]
    lines.append(f"What the file leaves unset has the defaults of {draft.title} {draft.version}.")
    if draft.decisions:
        lines += [f"To decide ({len(draft.decisions)}):", *(f"  - {sentence}" for sentence in draft.decisions)]
    if problems:
        lines += [f"check refuses it ({len(problems)}):", *(f"  - {problem}" for problem in problems)]
    else:
        lines.append("check lets it pass." + (" Decide the rest before you train." if draft.decisions else ""))
    return "\n".join(lines)
