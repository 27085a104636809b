"""The training metrics of a run as rules read them: the last rows, and those before them."""

from collections.abc import Mapping, Sequence
from typing import Any

FEW = 5
"""Earlier rows that a comparison needs."""
MANY = 20
"""Earlier rows that a comparison reads at most."""


class History:
    """Metrics of the training rows of a log, in order.

    Attributes:
        columns: by name the value of each row, None where it is missing.
        rewards: names in the last row.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.columns: dict[str, list[float | None]] = {}
        self.rewards: list[str] = []

    def add(self, row: Mapping[str, Any]) -> bool:
        """Add a row; return False for an evaluation or a summary, which is left out."""
        if "reward" not in row or "step" not in row:
            return False
        for name in row.keys() - self.columns.keys():
            self.columns[name] = [None] * self.rows
        for name, column in self.columns.items():
            column.append(number(row.get(name)))
        self.rows += 1
        ends = (name for name in row if name.startswith("rewards/") and name.endswith("/mean"))
        self.rewards = [name[len("rewards/") : -len("/mean")] for name in ends]
        return True

    @property
    def several_turns(self) -> bool:
        """True where tools or environments take part, which may end a completion from outside."""
        return any(name.startswith(("tools/", "environments/")) for name in self.columns)

    def last(self, name: str, rows: int) -> list[float]:
        """Return the last values, or [] if one of them is missing."""
        found = _known(self.columns.get(name, [])[-rows:])
        return found if len(found) == rows else []

    def known(self, name: str, rows: int) -> list[float]:
        """Return the last known values, from at most twice as many rows, or []."""
        found = _known(self.columns.get(name, [])[-2 * rows :])[-rows:]
        return found if len(found) == rows else []

    def before(self, name: str, rows: int) -> list[float]:
        """Return the values before the last `rows`, or [] if too few are known."""
        found = _known(self.columns.get(name, [])[-rows - MANY : -rows])
        return found if len(found) >= FEW else []


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def number(value: Any) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e100:
        return None
    return float(value)


def span(values: Sequence[float]) -> str:
    """Format the range of some values."""
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"
