"""The training metrics of a run as rules read them: the last rows, and those before them."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

FEW = 5
"""Earlier rows that a comparison needs."""
MANY = 20
"""Earlier rows that a comparison reads at most."""


class History:
    """Figures of those rows of a log that are of training, in order.

    Attributes:
        columns: by name the value of each row, None where it has none.
        rewards: names, as the last row has them.
    """

    def __init__(self) -> None:
        """Start without rows."""
        self.rows = 0
        self.columns: dict[str, list[float | None]] = {}
        self.rewards: list[str] = []

    def add(self, row: Mapping[str, Any]) -> bool:
        """Take in a row; whether it is one of training, and not an evaluation or a summary."""
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
        """The last values, or none where one of them is missing."""
        found = _known(self.columns.get(name, [])[-rows:])
        return found if len(found) == rows else []

    def known(self, name: str, rows: int) -> list[float]:
        """As many of the last values that are there, from at most twice as many rows."""
        found = _known(self.columns.get(name, [])[-2 * rows :])[-rows:]
        return found if len(found) == rows else []

    def before(self, name: str, rows: int) -> list[float]:
        """Values from before the last `rows`, or none where too few are known."""
        found = _known(self.columns.get(name, [])[-rows - MANY : -rows])
        return found if len(found) >= FEW else []

    def first(self, name: str) -> float | None:
        """The median of the first rows' values."""
        found = _known(self.columns.get(name, [])[:FEW])
        return median(found) if len(found) == FEW else None


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e100:
        return None
    return float(value)


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of some values; by floats, where `statistics` takes a hundred times as long."""
    middle = sum(values) / len(values)
    return (sum((value - middle) ** 2 for value in values) / len(values)) ** 0.5


def span(values: Sequence[float]) -> str:
    """From the least to the most of some values, in words."""
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"
