"""Pictures of logged metrics: a small SVG per metric with a line per run, drawn by matplotlib."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_ext.report.reading import RunFolder, Series
from grpo_ext.trainer.diagnosis.recording import FIGURES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = [
    *("#3b82f6", "#f97316", "#22a06b", "#a855f7", "#ef4444"),
    *("#0ea5a4", "#d4a017", "#ec4899", "#84745c", "#7c8799"),
]
DASHES = ("solid", "dashed", "dotted")
"""Line styles, named as in matplotlib and CSS."""

SECTIONS: dict[str, tuple[str, ...]] = {
    "Rewards": ("reward", "rewards/.*/mean", "reward_std", "eval_reward", "eval_rewards/.*/mean"),
    "Groups": ("groups/.*", "frac_reward_zero_std", "advantages/zero_variance_groups"),
    "Policy": ("kl", "entropy", "loss", "clip_ratio/region_mean", "clip_ratio/(low|high)_mean", "clip_ratio"),
    "Sampler": ("sampling/mismatch(_.*)?", "sampling/(ess|bias)"),
    "Lengths": (
        *("completions/mean_length", "completions/length_.*"),
        *("completions/(min|max)_length", "completions/clipped_ratio"),
    ),
    "Optimizer": ("grad_norm", "grad_norm/.*", "weights/change", "learning_rate"),
    "Time": ("tokens_per_second", "time/.*", "step_time", "profiling/.*", "rewards/.*/seconds"),
    "Evaluation": ("eval_.*@.*(?<!_low)(?<!_high)",),
}
"""Patterns of names, in the order of the page; metrics that match none come last, folded."""
OTHERS = "Other figures"
REWARD = "reward"
"""The curve beside the answer to "Did it learn?"; it is not repeated among the others."""
MAX_OTHERS = 40
ONCE = re.compile(r"train_(runtime|loss|samples_per_second|steps_per_second)|total_flos|epoch")

EXPLAINED = FIGURES | {
    "reward": "weighted sum of the rewards, mean over completions",
    "reward_std": "standard deviation of that sum",
    "groups/all_right": "share of groups with only right completions: too easy",
    "groups/all_wrong": "share of groups with only wrong completions: too hard",
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
    "tokens_per_second": "sampled, prompts and completions, by all processes",
    "step_time": "seconds a step, without the optimizer",
}

POINTS = 30_000
"""Largest number of points of all lines together, which limits the size of the page."""


@dataclass(frozen=True)
class Curve:
    """One logged metric under a heading of the page, with a line for each run that has it, by the run's index."""

    section: str
    name: str
    lines: dict[int, Series]

    @property
    def missing(self) -> int:
        """Number of values that were NaN or infinite."""
        return sum(math.isnan(value) for _, values in self.lines.values() for value in values)

    @property
    def constant(self) -> float | None:
        """The one value of all lines, as a picture can show it; None if there are several."""
        found = {float(f"{value:.5g}") for _, values in self.lines.values() for value in values}
        return next(iter(found)) if len(found) == 1 else None


def curves(runs: Sequence[RunFolder]) -> tuple[list[Curve], dict[str, str]]:
    """Return the curves in the order of the page, and of those that are not drawn the names and the reasons.

    Constant metrics, those equal to another and those above `MAX_OTHERS` are left out; the reward is always drawn.
    """
    by_run = [run.series() for run in runs]
    names = [name for name in dict.fromkeys(n for series in by_run for n in series) if not ONCE.fullmatch(name)]
    shown, left_out, others = list[Curve](), dict[str, str](), 0
    for name, section in _sections(names).items():
        curve = Curve(section, name, {i: series[name] for i, series in enumerate(by_run) if name in series})
        value, twin = curve.constant, next((other.name for other in shown if other.lines == curve.lines), None)
        if value is not None and name != REWARD:
            left_out[name] = f"{value:g}"
        elif twin is not None:
            left_out[name] = f"as {twin}"
        elif others == MAX_OTHERS or len(shown) == 2 * MAX_OTHERS:
            left_out[name] = "one too many"
        else:
            shown.append(curve)
            others += section == OTHERS
    return shown, left_out


def _sections(names: Sequence[str]) -> dict[str, str]:
    """Return the section of each name, in the order of the page."""
    patterns = ((section, pattern) for section, some in SECTIONS.items() for pattern in some)
    found: dict[str, str] = {}
    for section, pattern in patterns:
        found |= {name: section for name in names if name not in found and re.fullmatch(pattern, name)}
    return found | {name: OTHERS for name in names if name not in found}


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


class Picture(NamedTuple):
    """A drawn curve: its SVG, and its values in JSON's types for hovering and zooming."""

    svg: str
    data: dict[str, Any]


def pictures(drawn: Sequence[Curve], names: Sequence[str]) -> dict[str, Picture]:
    """Draw each curve and return the pictures by name; `names` are those of the runs.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib import rc_context

    points = max(20, min(300, POINTS // max(1, sum(len(curve.lines) for curve in drawn))))
    with rc_context(_STYLE):
        return {curve.name: _picture(curve, points, names) for curve in drawn}


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


def _picture(curve: Curve, points: int, names: Sequence[str]) -> Picture:
    """Draw a curve; in its data, a line without a value at a step has None there."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(4.4, 2.3))
    axes = figure.add_axes((0.15, 0.11, 0.81, 0.85))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))  # 0.000001 would be cut off
    digits = {  # five, so that the labels of an axis, which have six, differ
        place: (steps, [float(f"{value:.5g}") for value in values]) for place, (steps, values) in curve.lines.items()
    }
    bands = {place: banded(series, points) for place, series in digits.items()}
    steps, lines = sorted({step for band in bands.values() for step in band.steps}), []
    for place, band in bands.items():
        colour, dash = COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)]
        marker = "." if len(band.steps) <= 30 else ""
        axes.plot(band.steps, band.mean, color=colour, linestyle=dash, marker=marker, markersize=4)
        if band.wide:
            axes.fill_between(band.steps, band.low, band.high, color=colour, alpha=0.18, linewidth=0)
        parts = {"mean": band.mean} | ({"low": band.low, "high": band.high} if band.wide else {})
        columns = {key: _at(steps, dict(zip(band.steps, values, strict=True))) for key, values in parts.items()}
        lines.append({"name": names[place], "colour": colour, "dash": dash, **columns})
    return Picture(_svg(figure), {"x": list(axes.get_xlim()), "steps": steps, "lines": lines})


def _at(steps: Sequence[float], values: Mapping[float, float]) -> list[float | None]:
    known = (values.get(step, math.nan) for step in steps)
    return [None if math.isnan(value) else float(f"{value:.5g}") for value in known]


def _svg(figure: "Figure") -> str:
    """Return an SVG for a page with others: without declaration and ids, in the page's colours."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    file = io.StringIO()
    FigureCanvasSVG(figure).print_svg(file, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)
    tenths = partial(re.sub, r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}")
    svg = re.sub(r"<[^>]+>", lambda tag: tenths(tag[0]), svg)  # coordinates; labels are between tags
    svg = re.sub(r"font: [^;\"]*", "font: 9px system-ui, sans-serif", svg)
    svg = svg.replace(_INK, "currentColor").replace(_GRID, "var(--grid)")
    return re.sub(r"\s*\n\s*", "\n", svg)
