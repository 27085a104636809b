"""Pictures of logged metrics: a small SVG per metric, with a line per run, or per group of runs with several seeds."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from grpo_ext.report.seeds import Band, Group
from grpo_ext.trainer.diagnosis.recording import FIGURES

COLOURS = [
    *("#3b82f6", "#f97316", "#22a06b", "#a855f7", "#ef4444"),
    *("#0ea5a4", "#d4a017", "#ec4899", "#84745c", "#7c8799"),
]
DASHES = {"solid": "", "dashed": "6 3", "dotted": "2 3"}
"""Line styles: CSS's names, and the lengths of strokes and gaps."""

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
_MARKED = 30
"""Most points of a line that are marked."""


@dataclass(frozen=True)
class Curve:
    """One logged metric under a heading of the page, with a line for each group that has it, by the group's index."""

    section: str
    name: str
    lines: dict[int, Band]

    @property
    def missing(self) -> int:
        """Number of values that were NaN or infinite."""
        return sum(math.isnan(value) for band in self.lines.values() for value in band.mean)

    @property
    def constant(self) -> float | None:
        """The one value of all lines, as a picture can show it; None if there are several."""
        values = {_rounded(value) for band in self.lines.values() for value in band.mean}
        return next(iter(values)) if len(values) == 1 else None


def curves(groups: Sequence[Group]) -> tuple[list[Curve], dict[str, str]]:
    """Return the curves in the order of the page, and of those that are not drawn the names and the reasons.

    Constant metrics, those equal to another and those above `MAX_OTHERS` are left out; the reward is always drawn.
    """
    by_group = [group.series() for group in groups]
    names = [name for name in dict.fromkeys(n for series in by_group for n in series) if not ONCE.fullmatch(name)]
    shown, left_out, others = list[Curve](), dict[str, str](), 0
    for name, section in _sections(names).items():
        curve = Curve(section, name, {i: series[name] for i, series in enumerate(by_group) if name in series})
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
    sections: dict[str, str] = {}
    for section, pattern in patterns:
        sections |= {name: section for name in names if name not in sections and re.fullmatch(pattern, name)}
    return sections | {name: OTHERS for name in names if name not in sections}


def banded(band: Band, points: int) -> Band:
    """Average a line over at most `points` stretches; one without a finite value is NaN.

    The ends are the 10 % and 90 % quantiles of a stretch, or the means of the ends that a line over seeds has already.
    """
    if len(band.steps) <= points:
        return band
    cuts = [i * len(band.steps) // points for i in range(points + 1)]
    mean, low, high = (
        [sorted(v for v in values[a:b] if not math.isnan(v)) or [math.nan] for a, b in pairwise(cuts)]
        for values in band[1:]
    )
    ends = [_average(low), _average(high)]
    if not band.wide:
        ends = [[part[(len(part) - 1) // 10] for part in mean], [part[-1 - (len(part) - 1) // 10] for part in mean]]
    return Band([band.steps[a] for a in cuts[:-1]], _average(mean), *ends)


def _average(parts: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(part) / len(part) for part in parts]


class Picture(NamedTuple):
    """A drawn curve: its SVG, and its values in JSON's types for hovering and zooming."""

    svg: str
    data: dict[str, Any]


def style(place: int) -> tuple[str, str]:
    """Return colour and dash of a line."""
    return COLOURS[place % len(COLOURS)], list(DASHES)[place % len(DASHES)]


def pictures(drawn: Sequence[Curve], names: Sequence[str]) -> dict[str, Picture]:
    """Draw each curve and return the pictures by name; `names` are those of the groups."""
    points = max(20, min(300, POINTS // max(1, sum(len(curve.lines) for curve in drawn))))
    return {curve.name: _picture(curve, points, names) for curve in drawn}


def _picture(curve: Curve, points: int, names: Sequence[str]) -> Picture:
    """Draw a curve; in its data, a line without a value at a step has None there."""
    bands = {place: banded(_of_five_digits(band), points) for place, band in curve.lines.items()}
    steps, lines = sorted({step for band in bands.values() for step in band.steps}), []
    for place, band in bands.items():
        colour, dash = style(place)
        parts = {"mean": band.mean} | ({"low": band.low, "high": band.high} if band.wide else {})
        columns = {key: _at(steps, dict(zip(band.steps, values, strict=True))) for key, values in parts.items()}
        lines.append({"name": names[place], "colour": colour, "dash": dash, **columns})
    return Picture(_svg(bands), {"x": list(_span(steps)), "steps": steps, "lines": lines})


def _of_five_digits(band: Band) -> Band:
    """Round values, so that the labels of an axis, which have six digits, differ."""
    return Band(band.steps, *([_rounded(value) for value in values] for values in band[1:]))


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _at(steps: Sequence[float], values: Mapping[float, float]) -> list[float | None]:
    at_steps = (values.get(step, math.nan) for step in steps)
    return [_rounded(value) if math.isfinite(value) else None for value in at_steps]


# One picture, in the colours of the page; `curves.js` has the same sizes and draws what is zoomed into.

_WIDTH, _HEIGHT, _LEFT, _TOP, _INNER, _TALL = 316.8, 165.6, 47.5, 6.6, 256.6, 140.8
_LEAST = 1e-290
"""Least difference that can be divided."""
_Place = Callable[[float], str]


def _svg(bands: Mapping[int, Band]) -> str:
    """Draw lines with their bands over a grid."""
    across = _span([step for band in bands.values() for step in band.steps])
    up = _span([v for band in bands.values() for part in band[1:] for v in part if math.isfinite(v)])
    x = partial(_scaled, across, _LEFT, _INNER)
    y = partial(_scaled, up, _TOP + _TALL, -_TALL)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" aria-hidden="true" font-size="9" fill="currentColor">']
    for at in ticks(*across, most=5, least=1.0):
        parts.append(f'<path d="M{x(at)} {_TOP}v{_TALL}" stroke="var(--grid)" stroke-width=".5"/>')
        parts.append(f'<text x="{x(at)}" y="{_HEIGHT - 4:.1f}" text-anchor="middle">{at:g}</text>')
    for at in ticks(*up, most=8):
        parts.append(f'<path d="M{_LEFT} {y(at)}h{_INNER}" stroke="var(--grid)" stroke-width=".5"/>')
        parts.append(f'<text x="{_LEFT - 4}" y="{y(at)}" dy="3" text-anchor="end">{at:g}</text>')
    parts += (shape for place, band in bands.items() for shape in _line(band, x, y, *style(place)))
    return "\n".join([*parts, "</svg>"])


def _line(band: Band, x: _Place, y: _Place, colour: str, dash: str) -> Iterator[str]:
    """Yield the shapes of a line, whose gaps are where it is NaN."""
    for finite, points in groupby(zip(*band, strict=True), lambda point: math.isfinite(point[1])):
        if not finite:
            continue
        part = list(points)
        if band.wide:
            ends = [(s, high) for s, _, _, high in part] + [(s, low) for s, _, low, _ in reversed(part)]
            edge = " ".join(f"{x(step)},{y(value)}" for step, value in ends)
            yield f'<polygon points="{edge}" fill="{colour}" opacity=".18"/>'
        path = " ".join(f"{x(step)},{y(value)}" for step, value, _, _ in part)
        stroke = f'stroke="{colour}" stroke-width="1.6" stroke-dasharray="{DASHES[dash]}"'
        yield f'<polyline points="{path}" fill="none" {stroke}/>'
        if len(band.steps) <= _MARKED:
            yield from (f'<circle cx="{x(s)}" cy="{y(v)}" r="2" fill="{colour}"/>' for s, v, _, _ in part)


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Return the least and the largest value, apart from each other."""
    low, high = min(values), max(values)
    if high - low > _LEAST:
        return low, high
    apart = abs(low) if abs(low) > _LEAST else 1.0
    return low - apart, high + apart


def _scaled(span: tuple[float, float], begin: float, length: float, value: float) -> str:
    return f"{begin + (value - span[0]) / (span[1] - span[0]) * length:.1f}"


def ticks(low: float, high: float, *, most: int, least: float = 0.0) -> list[float]:
    """Return at most `most` + 1 round numbers at equal distances, which are 1, 2 or 5 times a power of 10."""
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = max(least, next((part * size for part in (1, 2, 5) if part * size >= rough), 10 * size))
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
