"""What was logged as pictures: a small SVG for each figure, all runs in it, by matplotlib."""

import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_ext.report.reading import RunFolder, Series

COLOURS = (
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
)
DASHES = ("solid", "dashed", "dotted")
"""As matplotlib and CSS both call them; with the colours, each run has a line of its own."""

SECTIONS: dict[str, tuple[str, ...]] = {
    "Rewards": ("reward", "rewards/.*/mean", "reward_std", "eval_reward", "eval_rewards/.*/mean"),
    "Groups": ("groups/.*", "frac_reward_zero_std", "advantages/zero_variance_groups"),
    "Policy": ("kl", "entropy", "loss", "clip_ratio/region_mean", "clip_ratio/(low|high)_mean", "clip_ratio"),
    "Lengths": ("completions/mean_length", "completions/(min|max)_length", "completions/clipped_ratio"),
    "Optimizer": ("grad_norm", "learning_rate"),
    "Time": ("step_time", "time/.*", "profiling/.*", "rewards/.*/seconds"),
    "Evaluation": ("eval_.*@.*(?<!_low)(?<!_high)",),
}
"""Patterns of names, in the order of the page; what none of them knows comes last, folded."""
OTHERS = "Other figures"
MAX_OTHERS = 40
ONCE = re.compile(r"train_(runtime|loss|samples_per_second|steps_per_second)|total_flos|epoch")

EXPLAINED = {
    "reward": "weighted sum of the rewards, mean over completions",
    "reward_std": "standard deviation of that sum",
    "groups/all_right": "share of groups all of whose completions are right: too easy",
    "groups/all_wrong": "share of groups whose completions are all as wrong: too hard",
    "groups/mixed": "share of groups that tell right from wrong",
    "frac_reward_zero_std": "share of groups whose completions all have one reward: nothing to learn from",
    "advantages/zero_variance_groups": "share of groups without any advantage",
    "kl": "divergence from the reference policy",
    "entropy": "of the next token, mean over tokens",
    "clip_ratio/region_mean": "share clipped on either side",
    "clip_ratio/low_mean": "share clipped below",
    "clip_ratio/high_mean": "share clipped above",
    "completions/mean_length": "tokens",
    "completions/clipped_ratio": "share of completions cut off at the length limit",
    "grad_norm": "before clipping",
    "step_time": "seconds a step",
}

POINTS = 60_000
"""Of all lines together, so that the page stays small."""


@dataclass(frozen=True)
class Curve:
    """One figure of the log, with a line for each run that has it."""

    section: str
    name: str
    lines: dict[int, Series]
    """By the run's place among the runs."""

    @property
    def missing(self) -> int:
        """Values that were NaN or infinite."""
        return sum(math.isnan(value) for _, values in self.lines.values() for value in values)

    @property
    def flat(self) -> bool:
        """Whether it never moved."""
        return len({value for _, values in self.lines.values() for value in values}) == 1


def curves(runs: Sequence[RunFolder]) -> tuple[list[Curve], list[str]]:
    """Curves in the order of the page, and the names of those that are not drawn.

    Figures that the page knows of come first; of the others those that never moved are left out, and what is too many.
    """
    by_run = [run.series() for run in runs]
    names = [name for name in dict.fromkeys(n for series in by_run for n in series) if not ONCE.fullmatch(name)]
    found = [
        Curve(section, name, {i: series[name] for i, series in enumerate(by_run) if name in series})
        for section, name in _in_order(names)
    ]
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


def thinned(series: Series, points: int) -> Series:
    """About `points` of a series at most: the least and greatest value of each stretch, so that no spike is lost."""
    steps, values = series
    if len(steps) <= points:
        return series
    stretches = max(1, points // 2)
    kept: set[int] = {0, len(steps) - 1}
    for part in range(stretches):
        inside = range(part * len(steps) // stretches, (part + 1) * len(steps) // stretches)
        known = [i for i in inside if not math.isnan(values[i])]
        chosen = {min(known, key=values.__getitem__), max(known, key=values.__getitem__)} if known else {inside[0]}
        kept |= chosen
    chosen_in_order = sorted(kept)
    return [steps[i] for i in chosen_in_order], [values[i] for i in chosen_in_order]


def pictures(drawn: Iterable[Curve]) -> dict[str, str]:
    """SVG of each curve, by its name.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib import rc_context

    drawn = list(drawn)
    points = max(20, min(400, POINTS // max(1, sum(len(curve.lines) for curve in drawn))))
    with rc_context(_STYLE):
        return {c.name: _svg({i: thinned(line, points) for i, line in c.lines.items()}) for c in drawn}


_INK, _GRID = "#010203", "#040506"
"""Colours that stand for the page's own, light or dark."""
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
    "axes.formatter.useoffset": False,
    "grid.color": _GRID,
    "grid.linewidth": 0.5,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}


def _svg(lines: Mapping[int, Series]) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.4, 2.3))
    canvas = FigureCanvasSVG(figure)
    axes = figure.add_axes((0.15, 0.11, 0.83, 0.85))
    for place, (steps, values) in lines.items():
        style: Any = {"color": COLOURS[place % len(COLOURS)], "linestyle": DASHES[place % len(DASHES)]}
        axes.plot(steps, values, marker="." if len(steps) <= 30 else "", markersize=4, **style)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    file = io.StringIO()
    canvas.print_svg(file, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _inlined(file.getvalue())


def _inlined(svg: str) -> str:
    """A picture to be put into a page among others: no declaration, no names of its own, the page's ink."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)
    svg = re.sub(r"<[^>]+>", _rounded, svg)
    svg = re.sub(r"font: [^;\"]*", "font: 9px system-ui, sans-serif", svg)
    svg = svg.replace(_INK, "currentColor").replace(_GRID, "var(--grid)")
    return re.sub(r"\s*\n\s*", "\n", svg)


def _rounded(tag: re.Match[str]) -> str:
    """A tag with its coordinates to a tenth of a pixel; what stands between tags is written on the axes."""
    return re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", tag[0])
