"""Runs that differ only in their seed, as one: means over the runs with Student's interval at 95 %."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from grpo_ext.config.setting import Change
from grpo_ext.config.settings import settings_changed_by
from grpo_ext.evaluation.estimators import Mean, mean_of
from grpo_ext.report import answer
from grpo_ext.report.facts import without_paths
from grpo_ext.report.reading import RunFolder

_SEEDS = ("seed", "data_seed")
_NAMING = 2
"""Most settings that name a group; if more differ, its first run does."""


class Band(NamedTuple):
    """Values by step, each with the ends of an interval; NaN where there is none."""

    steps: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]

    @property
    def wide(self) -> bool:
        """True if an interval is more than its value."""
        return self.low != self.mean or self.high != self.mean


@dataclass(frozen=True)
class Group:
    """Runs with the same settings and different seeds; often only one run."""

    name: str
    runs: Sequence[RunFolder]

    def series(self) -> dict[str, Band]:
        """Return the logged metrics by name; of several runs those that all have, at the steps that all have."""
        first, *others = (run.series() for run in self.runs)
        if not others:
            return {name: Band(steps, values, values, values) for name, (steps, values) in first.items()}
        bands = {}
        for name in (name for name in first if all(name in other for other in others)):
            by_step = [dict(zip(*series[name], strict=True)) for series in (first, *others)]
            steps = [step for step in by_step[0] if all(step in values for values in by_step)]
            means = [_mean([values[step] for values in by_step]) for step in steps]
            if not all(math.isnan(mean.mean) for mean in means):
                bands[name] = Band(steps, *([mean[i] for mean in means] for i in range(3)))
        return bands

    def changes(self) -> Iterator[list[str]]:
        """Yield name, runs, figure, its means before and after training, and their difference, paired by run."""
        by_run = [
            {change.name: change for change in [*answer.held_out(run), *filter(None, [answer.in_training(run)])]}
            for run in self.runs
        ]
        for name in (name for name in by_run[0] if all(name in changes for changes in by_run)):
            before, after = ([getattr(of_run[name], end).mean for of_run in by_run] for end in ("before", "after"))
            rise = [b - a for a, b in zip(before, after, strict=True)]
            cells = [_shown(_mean(before), ""), _shown(_mean(after), ""), _shown(_mean(rise), "+")]
            yield [self.name, str(len(self.runs)), name, *cells]


def _mean(values: Sequence[float]) -> Mean:
    return Mean(math.nan, math.nan, math.nan, 0) if any(map(math.isnan, values)) else mean_of(values)


def _shown(mean: Mean, sign: str) -> str:
    interval = f" ({mean.low:{sign}.3g} to {mean.high:{sign}.3g})" if math.isfinite(mean.low) else ""
    return f"{mean.mean:{sign}.4g}{interval}"


def grouped(runs: Sequence[RunFolder]) -> list[Group]:
    """Put runs together whose settings on record differ only in the seed, which must differ.

    A run without a record stays by itself. A group is named by the settings in which the groups differ.
    """
    keys = {key for run in runs for key in run.record} - settings_changed_by(Change.NOTHING) - {*_SEEDS}
    differing = [key for key in sorted(keys) if len({_value(run, key) for run in runs}) > 1]
    by_settings: dict[tuple[str, ...], list[RunFolder]] = {}
    for run in runs:
        key = tuple(_value(run, key) for key in differing) if run.record else (str(run.folder),)
        by_settings.setdefault(key, []).append(run)
    parts = [
        part
        for members in by_settings.values()
        for part in ([members] if _seeded(members) else [[run] for run in members])
    ]
    naming = [key for key in differing if "." not in key and key != "model"]
    by_name = len(parts) < len(runs) and 0 < len(naming) <= _NAMING
    if by_name:
        return [Group(_name(part, naming), part) for part in parts]
    return [Group(part[0].name + (f" and {len(part) - 1} more" if len(part) > 1 else ""), part) for part in parts]


def _seeded(members: Sequence[RunFolder]) -> bool:
    """Return whether no two runs have the same seeds: equal runs are not two samples."""
    return len({tuple(_value(run, key) for key in _SEEDS) for run in members}) == len(members)


def _value(run: RunFolder, key: str) -> str:
    return repr(run.record.get(key))


def _name(members: Sequence[RunFolder], naming: Sequence[str]) -> str:
    """Return 'dapo' where only the loss differs, else 'loss_type dapo, learning_rate 1e-06'."""
    values = {key: without_paths(str(members[0].record.get(key))) for key in naming}
    return ", ".join(values[key] if naming == ["loss_type"] else f"{key} {values[key]}" for key in naming)
