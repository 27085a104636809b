"""What commands share: options of their own in front of the recipe's keys, and tables on the terminal."""

import sys
from collections.abc import Mapping
from typing import TypeVar

from grpo_ext.errors import ConfigError

T = TypeVar("T")


def take_option(argv: list[str], option: str) -> str | None:
    """Remove `option VALUE` or `option=VALUE` from argv and return the value."""
    for i, arg in enumerate(argv):
        if arg.startswith(f"{option}="):
            return argv.pop(i).partition("=")[2]
    if option not in argv:
        return None
    i = argv.index(option)
    if i + 1 == len(argv):
        sys.exit(f"{option}: no value.")
    value = argv[i + 1]
    del argv[i : i + 2]
    return value


def take_processes(argv: list[str]) -> int | None:
    """Remove `--num_processes N` from argv and return N.

    Raises:
        ConfigError: it is no number of processes.
    """
    given = take_option(argv, "--num_processes")
    if given is None or (given.isdecimal() and int(given)):
        return None if given is None else int(given)
    raise ConfigError([f"--num_processes {given}: not a number of processes. Give 1 or more."])


def print_sections(sections: dict[str, list[tuple[str, str]]]) -> None:
    """A table of names and values for each section that has any."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for title, rows in sections.items():
        if not rows:
            continue
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for name, value in rows:
            table.add_row(name, value)
        console.print(table, "", markup=False)


def by_entry(registry: Mapping[str, T]) -> list[tuple[list[str], T]]:
    """Each entry once, with all of its names."""
    found: dict[int, tuple[list[str], T]] = {}
    for name, entry in registry.items():
        found.setdefault(id(entry), ([], entry))[0].append(name)
    return list(found.values())
