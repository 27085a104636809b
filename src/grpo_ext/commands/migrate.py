"""`grpo-ext migrate`: convert another project's configuration to a recipe, with every key accounted for."""

import argparse
import io
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from grpo_ext.bounded import read_text
from grpo_ext.config.launch import planned_processes
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.recipe.files import read_yaml
from grpo_ext.recipe.foreign import recognise
from grpo_ext.recipe.foreign.engine import Draft
from grpo_ext.recipe.foreign.recognise import PYTHON_SUFFIXES, exchange
from grpo_ext.recipe.foreign.shell import read_script
from grpo_ext.recipe.foreign.writing import recipe_text
from grpo_ext.recipe.launching import launch_of
from grpo_ext.recipe.parsing import all_keys, load_recipe

DECISIONS = 1
"""Exit code of a recipe that a person must complete before `check` accepts it."""
_SHELL = (".sh", ".bash", ".slurm", ".txt", ".args")
_LISTED = 12
"""Keys that the summary names; the recipe has all of them."""


def run(options: argparse.Namespace) -> int:
    """Write the recipe; return 0 if `check` accepts it, 1 if a person must complete it, 2 if there is none."""
    output = options.output
    if output and Path(output).exists():
        raise ConfigError([Problem("--output", output, "it exists", "Name another file, or remove it.")])
    if options.file.suffix in PYTHON_SUFFIXES:
        print(exchange(options.file), file=sys.stderr)
        return 2
    draft = migrated(options.file, options.version)[1]
    text = recipe_text(draft, str(options.file), output or "RECIPE.yaml")
    if output:
        Path(output).write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    problems = refusals(text)
    print(_summary(draft, problems, output or "the recipe above"), file=sys.stderr)
    return DECISIONS if problems else 0


def migrated(path: Path, version: str = "") -> tuple[str, Draft]:
    """Return whose configuration a file is, and the recipe made of it.

    Raises:
        ConfigError: it cannot be read, or is not a configuration of a run by rewards with groups of completions.
    """
    given, unsure = _read(path)
    kind = recognise.kind_of(given)
    if kind in recognise.NO_RECIPES:
        raise ConfigError([recognise.not_a_recipe(str(kind), str(path))])
    if kind is None and not given.keys() & {*all_keys()}:
        projects = ", ".join(project.title for project in recognise.PROJECTS.values())
        raise ConfigError(
            [Problem(str(path), ABSENT, "not a configuration of a known project", f"Known: {projects}.")]
        )
    project = recognise.PROJECTS[kind or "trl"]
    try:
        return kind or "trl", project.convert({str(key): value for key, value in given.items()}, version, unsure)
    except (TypeError, AttributeError, ValueError, ArithmeticError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = f"a value that {project.title} does not take ({error})"
        raise ConfigError([Problem(str(path), ABSENT, reason, "Correct it.")]) from error


def _read(path: Path) -> tuple[dict[str, Any], list[str]]:
    if not path.is_file():
        raise ConfigError([Problem(str(path), ABSENT, "no such file", "Correct the path.")])
    try:
        return read_script(read_text(path)) if path.suffix in _SHELL else (read_yaml(path), [])
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), ABSENT, f"cannot be read ({error})", "Save it as UTF-8.")]) from error


def refusals(text: str) -> Sequence[object]:
    """Return the problems that `check` finds in a recipe before it loads a model or data."""
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


def _summary(draft: Draft, problems: Sequence[object], name: str) -> str:
    """Return what became of the keys, what a person must decide, and whether `check` accepts the recipe."""
    rest, total = sorted(draft.given.keys() - draft.converted), len(draft.given)
    if rest:
        more = f" and {len(rest) - _LISTED} more" if len(rest) > _LISTED else ""
        shown = f"{', '.join(rest[:_LISTED])}{more}"
        lines = [f"{total - len(rest)} of {total} keys were converted; not converted: {shown}. See {name}."]
    else:
        lines = [f"All {total} keys were converted."]
    lines.append(f"Where the file sets no value, the recipe has the default of {draft.title} {draft.version}.")
    if draft.decisions:
        lines += [f"To decide ({len(draft.decisions)}):", *(f"  - {sentence}" for sentence in draft.decisions)]
    if problems:
        lines += [f"`grpo-ext check` refuses it ({len(problems)}):", *(f"  - {problem}" for problem in problems)]
    else:
        lines.append(
            "`grpo-ext check` accepts it." + (" Decide the rest before you train." if draft.decisions else "")
        )
    return "\n".join(lines)
