"""Pictures of logged metrics: a small SVG per metric with a line per run, drawn by matplotlib."""

import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from grpo_ext.report.reading import RunFolder, Series
from grpo_ext.trainer.diagnosis.recording import FIGURES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

COLOURS = [
    "#3b82f6",
    "#f97316",
    "#22a06b",
    "#a855f7",
    "#ef4444",
    "#0ea5a4",
    "#d4a017",
    "#ec4899",
    "#84745c",
    "#7c8799",
]
DASHES = ("solid", "dashed", "dotted")
"""Line styles, named as in matplotlib and CSS."""

SECTIONS: dict[str, tuple[str, ...]] = {
    "Rewards": ("reward", "rewards/.*/mean", "reward_std", "eval_reward", "eval_rewards/.*/mean"),
    "Groups": ("groups/.*", "frac_reward_zero_std", "advantages/zero_variance_groups"),
    "Policy": ("kl", "entropy", "loss", "clip_ratio/region_mean", "clip_ratio/(low|high)_mean", "clip_ratio"),
    "Sampler": ("sampling/mismatch(_.*)?", "sampling/(ess|bias)"),
    "Lengths": (
        "completions/mean_length",
        "completions/length_.*",
        "completions/(min|max)_length",
        "completions/clipped_ratio",
    ),
    "Optimizer": ("grad_norm", "grad_norm/.*", "weights/change", "learning_rate"),
    "Time": ("tokens_per_second", "time/.*", "step_time", "profiling/.*", "rewards/.*/seconds"),
    "Evaluation": ("eval_.*@.*(?<!_low)(?<!_high)",),
}
"""Patterns of names, in the order of the page; metrics that match none come last, folded."""
STACKS = {
    "kinds of groups": ("groups/mixed", "groups/all_wrong", "groups/all_right"),
    "seconds of a step": ("time/training", "time/rollout", "time/.*"),
}
"""Stacked pictures of a single run: name, and patterns of the parts from the bottom."""
OTHERS = "Other figures"
MAX_OTHERS = 40
ONCE = re.compile(r"train_(runtime|loss|samples_per_second|steps_per_second)|total_flos|epoch")

EXPLAINED = FIGURES | {
    "reward": "weighted sum of the rewards, mean over completions",
    "reward_std": "standard deviation of that sum",
    "groups/all_right": "share of groups all of whose completions are right: too easy",
    "groups/all_wrong": "share of groups all of whose completions are wrong: too hard",
    "groups/mixed": "share of groups with right and wrong completions",
    "frac_reward_zero_std": "share of groups whose completions have equal rewards: their advantages are zero",
    "advantages/zero_variance_groups": "share of groups whose advantages are zero",
    "kl": "divergence from the reference policy",
    "entropy": "entropy of the next token, mean over tokens",
    "clip_ratio/region_mean": "share clipped on either side",
    "clip_ratio/low_mean": "share clipped below",
    "clip_ratio/high_mean": "share clipped above",
    "completions/mean_length": "tokens",
    "completions/clipped_ratio": "share of completions cut off at the length limit",
    "grad_norm": "before clipping",
    "kinds of groups": "shares; only mixed groups have non-zero advantages",
    "seconds of a step": "of the main process; training: the remaining time",
    "tokens_per_second": "sampled, prompts and completions, by all processes",
    "step_time": "seconds a step, without the optimizer",
}

POINTS = 30_000
"""Largest number of points of all lines together, which limits the size of the page."""


@dataclass(frozen=True)
class Curve:
    """One logged metric, with a line for each run that has it.

    Args:
        section: heading on the page.
        name: the metric.
        lines: series by the index of the run.
        parts: names of the lines of a stack, which are metrics of one run.
    """

    section: str
    name: str
    lines: dict[int, Series]
    parts: tuple[str, ...] = ()

    @property
    def missing(self) -> int:
        """Number of values that were NaN or infinite."""
        return sum(math.isnan(value) for _, values in self.lines.values() for value in values)

    @property
    def flat(self) -> bool:
        """True if the values are constant."""
        return len({value for _, values in self.lines.values() for value in values}) == 1


def curves(runs: Sequence[RunFolder]) -> tuple[list[Curve], list[str]]:
    """Return the curves in the order of the page, and the names of those that are not drawn.

    Of the metrics outside of `SECTIONS`, constant ones are left out, and those above `MAX_OTHERS`.
    """
    by_run = [run.series() for run in runs]
    names = [name for name in dict.fromkeys(n for series in by_run for n in series) if not ONCE.fullmatch(name)]
    found = [
        Curve(section, name, {i: series[name] for i, series in enumerate(by_run) if name in series})
        for section, name in _in_order(names)
    ]
    found = _stacked(found) if len(runs) == 1 else found
    main = [curve for curve in found if curve.section != OTHERS]
    others = [curve for curve in found if curve.section == OTHERS and not curve.flat]
    room = MAX_OTHERS + max(0, MAX_OTHERS - len(main))
    shown = [*main[: 2 * MAX_OTHERS], *others[:room]]
    return shown, [curve.name for curve in found if curve not in shown]


def _in_order(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    taken = set()
    for section, patterns in SECTIONS.items():
        for pattern in patterns:
            for name in names:
                if name not in taken and re.fullmatch(pattern, name):
                    taken.add(name)
                    yield section, name
    yield from ((OTHERS, name) for name in names if name not in taken)


def _stacked(found: Sequence[Curve]) -> list[Curve]:
    """Return the curves of one run, with stacks in place of their first part."""
    by_name = {curve.name: curve for curve in found}
    for name, patterns in STACKS.items():
        parts = tuple(dict.fromkeys(n for pattern in patterns for n in by_name if re.fullmatch(pattern, n)))
        columns = [dict(zip(*by_name[part].lines[0], strict=True)) for part in parts]
        steps = [s for s in columns[0] if all(not math.isnan(c.get(s, math.nan)) for c in columns)] if columns else []
        if len(parts) > 1 and len(steps) > 1:
            lines = {i: (steps, [column[step] for step in steps]) for i, column in enumerate(columns)}
            stack = Curve(by_name[parts[0]].section, name, lines, parts)
            first = min(parts, key=list(by_name).index)
            by_name = {n: stack if n == first else c for n, c in by_name.items() if n == first or n not in parts}
    return list(by_name.values())


@dataclass(frozen=True)
class Band:
    """Means over intervals of steps, with the 10 % and 90 % quantiles of each interval."""

    steps: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]

    @property
    def wide(self) -> bool:
        """True if an interval holds more than one step."""
        return self.low != self.mean or self.high != self.mean


def banded(series: Series, points: int) -> Band:
    """Average a series over at most `points` intervals; an interval without a finite value is NaN."""
    steps, values = series
    if len(steps) <= points:
        return Band(steps, values, values, values)
    cuts = [i * len(steps) // points for i in range(points + 1)]
    parts = [sorted(v for v in values[a:b] if not math.isnan(v)) or [math.nan] for a, b in pairwise(cuts)]
    return Band(
        [steps[a] for a in cuts[:-1]],
        [math.fsum(part) / len(part) for part in parts],
        [part[(len(part) - 1) // 10] for part in parts],
        [part[len(part) - 1 - (len(part) - 1) // 10] for part in parts],
    )


@dataclass(frozen=True)
class Picture:
    """A drawn curve: its SVG, and its values in JSON's types for hovering and zooming."""

    svg: str
    data: dict[str, Any]


def pictures(drawn: Iterable[Curve], names: Sequence[str]) -> dict[str, Picture]:
    """Draw each curve and return the pictures by name; `names` are those of the runs.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib import rc_context

    drawn = list(drawn)
    points = max(20, min(300, POINTS // max(1, sum(len(curve.lines) for curve in drawn))))
    with rc_context(_STYLE):
        return {c.name: _stack(c, points) if c.parts else _lines(c, points, names) for c in drawn}


_INK, _GRID = "#010203", "#040506"
"""Placeholders for the colours of the page, light or dark."""
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "grpo-ext",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.size": 9,
    "lines.linewidth": 1.6,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _GRID,
    "grid.linewidth": 0.5,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}


def _lines(curve: Curve, points: int, names: Sequence[str]) -> Picture:
    axes, lines = _axes(), []
    for place, series in curve.lines.items():
        band = banded(series, points)
        style: dict[str, str] = {"color": COLOURS[place % len(COLOURS)], "linestyle": DASHES[place % len(DASHES)]}
        axes.plot(band.steps, band.mean, marker="." if len(band.steps) <= 30 else "", markersize=4, **style)
        if band.wide:
            axes.fill_between(band.steps, band.low, band.high, color=style["color"], alpha=0.18, linewidth=0)
        lines.append((names[place], style, band))
    return _picture(axes, lines)


def _stack(curve: Curve, points: int) -> Picture:
    axes = _axes()
    means = [banded(line, points) for line in curve.lines.values()]
    bands = [Band(band.steps, band.mean, band.mean, band.mean) for band in means]
    axes.stackplot(bands[0].steps, *(band.mean for band in bands), colors=COLOURS, alpha=0.85)
    axes.set_xmargin(0)
    styles = [{"color": colour, "linestyle": "solid"} for colour in COLOURS]
    return _picture(axes, list(zip(curve.parts, styles, bands, strict=False)))


def _picture(axes: "Axes", lines: Sequence[tuple[str, Mapping[str, str], Band]]) -> Picture:
    """Join the steps of the lines; a line without a value at a step has None there."""
    steps = sorted({step for _, _, band in lines for step in band.steps})
    described = []
    for name, style, band in lines:
        parts = {"mean": band.mean} | ({"low": band.low, "high": band.high} if band.wide else {})
        columns = {key: _at(steps, dict(zip(band.steps, values, strict=True))) for key, values in parts.items()}
        described.append({"name": name, "colour": style["color"], "dash": style["linestyle"], **columns})
    return Picture(_svg(axes.figure), {"x": list(axes.get_xlim()), "steps": steps, "lines": described})


def _at(steps: Sequence[float], values: Mapping[float, float]) -> list[float | None]:
    known = (values.get(step, math.nan) for step in steps)
    return [None if math.isnan(value) else float(f"{value:.5g}") for value in known]


def _axes() -> "Axes":
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes = Figure(figsize=(4.4, 2.3)).add_axes((0.15, 0.11, 0.81, 0.85))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))  # 0.000001 would be cut off
    return axes


def _svg(figure: "FigureBase") -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    file = io.StringIO()
    FigureCanvasSVG(figure).print_svg(file, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _inlined(file.getvalue())


def _inlined(svg: str) -> str:
    """Return an SVG for a page with others: without declaration and ids, in the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)
    svg = re.sub(r"<[^>]+>", _rounded, svg)
    svg = re.sub(r"font: [^;\"]*", "font: 9px system-ui, sans-serif", svg)
    svg = svg.replace(_INK, "currentColor").replace(_GRID, "var(--grid)")
    return re.sub(r"\s*\n\s*", "\n", svg)


def _rounded(tag: re.Match[str]) -> str:
    """Round the coordinates in a tag to a tenth of a pixel; labels between tags are kept."""
    return re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", tag[0])
