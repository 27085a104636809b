"""What was logged of a run's training, as rules look at it: the last rows, and those before them."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

FEW = 5
"""Rows without which nothing is known of what was before."""
MANY = 20
"""Rows before that are looked at."""


class History:
    """Rows of a log that have figures of training, in order."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """Evaluations and summaries are left out."""
        self.rows: list[Mapping[str, Any]] = []
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> bool:
        """Take in a row; whether it is one of training."""
        training = "reward" in row and "step" in row
        if training:
            self.rows.append(row)
        return training

    @property
    def step(self) -> int:
        """Of the last row."""
        return int(self.rows[-1]["step"])

    @property
    def rewards(self) -> list[str]:
        """Names, as the last row has them."""
        ends = [name for name in self.rows[-1] if name.startswith("rewards/") and name.endswith("/mean")]
        return [name[len("rewards/") : -len("/mean")] for name in ends]

    def last(self, name: str, rows: int) -> list[float]:
        """The last values, or none where one of them is missing."""
        values = [number(row.get(name)) for row in self.rows[-rows:]]
        found = [value for value in values if value is not None]
        return found if len(found) == rows else []

    def known(self, name: str, rows: int) -> list[float]:
        """As many of the last values that are there, from at most twice as many rows."""
        values = [number(row.get(name)) for row in self.rows[-2 * rows :]]
        found = [value for value in values if value is not None][-rows:]
        return found if len(found) == rows else []

    def before(self, name: str, rows: int) -> list[float]:
        """Values from before the last `rows`, or none where too few are known."""
        values = [number(row.get(name)) for row in self.rows[-rows - MANY : -rows]]
        found = [value for value in values if value is not None]
        return found if len(found) >= FEW else []

    def first(self, name: str) -> float | None:
        """The median of the first rows' values."""
        found = [value for row in self.rows[:FEW] if (value := number(row.get(name))) is not None]
        return median(found) if len(found) == FEW else None


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
