"""A claim of a paper: what the paper states, what we run, what would count as failure, and the verdict."""

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Exact = dict[str, Any]
"""Figures that need no seed, as JSON."""
Run = dict[str, Any]
"""A trained run, as JSON: its key under "key", its seconds under "seconds", and what `Claim.train` returned."""
HOLDS, FAILS, ONLY_IF = "shown", "not shown", "shown in some cases"


@dataclass(frozen=True)
class Verdict:
    """The answer to a claim: `HOLDS`, `FAILS` or `ONLY_IF`, and one or two sentences with the figures behind it."""

    word: str
    why: str

    @property
    def finding(self) -> str:
        """The first sentence of `why`."""
        return re.split(r"(?<=\.)\s", self.why, maxsplit=1)[0]


@dataclass(frozen=True)
class Claim:
    """A claim and its experiment; `__main__` runs it, keeps its figures and writes its part of the page.

    Args:
        name: of `--only`, of the plot and of the link.
        title: the claim in a few words.
        paper: its name and its arXiv number.
        statement: what the paper states, in our words.
        experiment: what is computed or trained, and with which settings.
        failure: what would count as failure, written before the first run.
        judge: the verdict, from figures only.
        table: Markdown of the figures.
        draw: fills a figure of matplotlib.
        exact: figures that need no seed.
        keys: of the trained runs; the last item is the seed.
        train: makes one run, in a process of its own.
    """

    name: str
    title: str
    paper: str
    statement: str
    experiment: str
    failure: str
    judge: Callable[[Exact, list[Run]], Verdict]
    table: Callable[[Exact, list[Run]], str]
    draw: Callable[[Any, Exact, list[Run]], None]
    exact: Callable[[], Exact] | None = None
    keys: Sequence[tuple[Any, ...]] = ()
    train: Callable[..., Run] | None = None


T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t for a two-sided interval of 95 %, by number of seeds."""


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return mean, lower and upper end of the 95 % interval of the mean over seeds, by Student's t."""
    mean = statistics.mean(values)
    half = T95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def shown(values: Sequence[float], digits: int = 3) -> str:
    """Return "mean [low, high]"."""
    mean, low, high = interval(values)
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def of(runs: Sequence[Run], *start: Any) -> list[Run]:
    """Return the runs whose key begins with `start`, by seed."""
    return sorted((run for run in runs if tuple(run["key"][: len(start)]) == start), key=lambda run: run["key"][-1])


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
