"""Helpers of several commands: tables on the terminal."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def print_sections(sections: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Print a table of names and values for each section that is not empty."""
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
    """Return each entry of a registry once, with all of its names."""
    found: dict[int, tuple[list[str], T]] = {}
    for name, entry in registry.items():
        found.setdefault(id(entry), ([], entry))[0].append(name)
    return list(found.values())
