"""Tables on the terminal: what stands in them is plain printable text."""

from typing import Any

from rich import table
from rich.console import Console

from grpo_ext.terminal import clipped

CELL = 3_000
"""Most characters of a cell."""


class Table(table.Table):
    """rich's table, of plain printable text."""

    def add_column(self, header: Any = "", *args: Any, **kwargs: Any) -> None:
        """Add a column."""
        super().add_column(clipped(str(header), CELL), *args, **kwargs)

    def add_row(self, *cells: Any, **kwargs: Any) -> None:
        """Add a row."""
        super().add_row(*(clipped(str(cell), CELL) for cell in cells), **kwargs)


def show(*parts: Any) -> None:
    """Print tables and plain text."""
    Console().print(*parts, markup=False, highlight=False)
