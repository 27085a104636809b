"""`grpo-ext migrate`: another project's configuration as a recipe, with every key accounted for."""

import io
import re
import sys
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from grpo_ext.commands.console import take_option
from grpo_ext.config.launch import planned_processes
from grpo_ext.errors import ConfigError
from grpo_ext.recipe.files import read_yaml
from grpo_ext.recipe.foreign import projects
from grpo_ext.recipe.foreign.draft import Draft
from grpo_ext.recipe.foreign.script import read_script
from grpo_ext.recipe.foreign.words import read_words
from grpo_ext.recipe.foreign.writing import written
from grpo_ext.recipe.launching import launch_of
from grpo_ext.recipe.parsing import all_keys, load_recipe

_UNSLOTH = re.compile(r"(from|import) unsloth")
DECISIONS = 1
"""Exit code of a recipe that a person must complete before `check` lets it pass."""


def run(argv: list[str]) -> int:
    """Write the recipe; 0 where it passes, 1 where a person must complete it, 2 where the file cannot be read."""
    try:
        output = take_option(argv, "--output")
        if len(argv) != 1:
            raise ConfigError([f"{' '.join(argv) or 'no file'}: one file is expected. Write grpo-ext migrate FILE."])
        if output and Path(output).exists():
            raise ConfigError([f"--output {output}: it exists. Name another file, or remove it."])
        kind, draft = migrated(Path(argv[0]))
        text = written(draft, argv[0], projects.PROJECTS[kind].title, output or "RECIPE.yaml")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if output:
        Path(output).write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    problems = refusals(text)
    print(summary(draft, problems, output or "the recipe above"), file=sys.stderr)
    return DECISIONS if problems else 0


def migrated(path: Path) -> tuple[str, Draft]:
    """Whose configuration a file is, and the recipe that it becomes.

    Raises:
        ConfigError: it cannot be read, or is no configuration of a run by rewards.
    """
    kind, given, unread = _read(path)
    draft = projects.draft_of(kind, given)
    draft.decisions[:0] = unread
    return kind, draft


def _read(path: Path) -> tuple[str, dict[str, Any], list[str]]:
    known = frozenset(all_keys())
    if not path.is_file():
        raise ConfigError([f"{path}: no such file. Correct the path."])
    try:
        if path.suffix in (".py", ".ipynb"):
            given, unread = read_script(path)
            return ("unsloth" if _UNSLOTH.search(path.read_text(encoding="utf-8")) else "script"), given, unread
        given = read_words(path) if path.suffix in (".sh", ".bash", ".slurm", ".txt", ".args") else read_yaml(path)
    except (SyntaxError, UnicodeDecodeError, ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError([f"{path} cannot be read: {error}."]) from error
    kind = projects.kind_of(given, known)
    if kind in projects.NO_RECIPES:
        raise ConfigError([projects.is_no_recipe(str(kind), str(path))])
    if kind is None and not given.keys() & known:
        projects_known = ", ".join(dict.fromkeys(project.title for project in projects.PROJECTS.values()))
        raise ConfigError([f"{path}: no configuration that is known here. Known: {projects_known}."])
    return kind or "trl", {str(key): value for key, value in given.items()}, []


def refusals(text: str) -> list[str]:
    """What `check` says of a recipe before it loads anything."""
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
    """What became of the keys, what is to be decided, and whether the recipe passes."""
    taken = len(draft.given) - len(draft.left)
    lines = [f"{len(draft.given)} keys: {taken} taken over, {len(draft.left)} not, each with its reason in {name}."]
    if draft.decisions:
        lines += [f"To decide ({len(draft.decisions)}):", *(f"  - {sentence}" for sentence in draft.decisions)]
    if problems:
        lines += [f"check refuses it ({len(problems)}):", *(f"  - {problem}" for problem in problems)]
    else:
        lines.append("check lets it pass." + (" Decide the rest before you train." if draft.decisions else ""))
    return "\n".join(lines)
