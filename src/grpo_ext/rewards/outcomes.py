"""Merges the outcomes of a reward's calls: scaled and clipped numbers in the batch's order, and failures."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_ext.objective.trajectory import COLUMN
from grpo_ext.rewards.columns import Columns, row_count
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.failures import from_outside
from grpo_ext.rewards.workers.pool import Outcome, Status
from grpo_ext.rewards.workers.worker import safe_repr

_CURE = "Return a finite number, or None where it cannot be scored"


@dataclass
class Scores:
    """The result of a reward for a batch, before its weight."""

    values: list[float | None]
    turns: list[list[float] | None]
    """Rewards of each turn, where the function returned them."""
    failed: list[tuple[int, str]] = field(default_factory=list)
    """Rows without a value because of a failure, and why."""
    extras: list[tuple[str, list]] = field(default_factory=list)
    """Columns that it logged by `log_extra`."""
    metrics: list[tuple[str, float]] = field(default_factory=list)
    """Figures that it, or its scorer, logged by `log_metric`."""
    nans: int = 0
    error: str = ""
    """Why the run must stop, or an empty string."""


def merged(spec: RewardSpec, turns: Sequence[int | None], outcomes: Sequence[Outcome]) -> Scores:
    """Merge the values of all rows; `turns` holds the number of turns of each, or None.

    Failed rows get the value of `on_error`, which is not scaled or clipped.
    """
    total, clipped = len(turns), 0
    scores = Scores([None] * total, [None] * total)
    extras: dict[str, list] = {}
    for outcome in outcomes:
        if outcome.failure:
            scores.failed += [(row, outcome.failure) for row in outcome.rows]
            continue
        for row, value in zip(outcome.rows, outcome.values, strict=True):
            number, by_turn, problem = read_value(value, turns[row])
            if number is not None and math.isinf(number):
                number, problem = None, f"it returned {number}. {_CURE}"
            scores.failed += [(row, problem)] if problem else []
            if number is not None and math.isnan(number):
                scores.nans += 1
            elif number is not None:
                scores.values[row] = final = _scaled(spec, number)
                scores.turns[row] = None if by_turn is None else [reward * spec.scale for reward in by_turn]
                clipped += final != number * spec.scale
        for column, values in outcome.extras:
            for row, value in zip(outcome.rows, values, strict=False):
                extras.setdefault(column, [None] * total)[row] = value
    scores.failed.sort()
    if spec.on_error == "zero":
        for row, _ in scores.failed:
            scores.values[row] = 0.0
    scores.extras = list(extras.items())
    scores.metrics = [
        *_figures(spec.name, scores, outcomes, clipped),
        *(metric for outcome in outcomes for metric in outcome.metrics),
    ]
    return scores


def _figures(name: str, scores: Scores, outcomes: Sequence[Outcome], clipped: int) -> Iterator[tuple[str, float]]:
    """Yield the figures of a reward's calls."""
    n = max(1, len(scores.values))
    figures = {
        "none_frac": sum(value is None for value in scores.values) / n,
        "nan_frac": scores.nans / n,
        "clipped_frac": clipped / n,
        "errors": len(scores.failed),
        "timeouts": sum(len(outcome.rows) for outcome in outcomes if outcome.status == Status.TIMEOUT),
        "rescored": rescored(outcomes),
        "seconds": sum(outcome.seconds for outcome in outcomes),
    }
    yield from ((f"rewards/{name}/{figure}", float(value)) for figure, value in figures.items())


def rescored(outcomes: Sequence[Outcome]) -> int:
    """Return the number of completions that were scored one by one."""
    return sum(len(outcome.rows) for outcome in outcomes if outcome.after)


def turn_counts(columns: Columns) -> list[int | None]:
    """Return the number of turns of each row's trajectory; None where completions are not trajectories."""
    trajectories = columns.get(COLUMN)
    return [None] * row_count(columns) if trajectories is None else [len(t.turns) for t in trajectories]


def read_value(value: Any, turns: int | None) -> tuple[float | None, list[float] | None, str]:
    """Return a reward as a float or None, its parts by turn if it is a list of them, and the problem if it is neither.

    The float may be NaN or inf. The reward of a list is its sum; None counts as 0 in it, unless all are None.
    """
    if turns is None or not isinstance(value, list | tuple):
        number, problem = _to_float(value)
        return number, None, problem
    if len(value) != turns:
        reason = f"it returned {len(value)} rewards for a trajectory of {turns} turns"
        return None, None, f"{reason}. Return one number for each turn, in a list, or one for the whole trajectory."
    try:
        rewards = [0.0 if reward is None else float(reward) for reward in value]
    except BaseException as error:
        if from_outside(error):
            raise
        return None, None, f"it returned {safe_repr(value)}. Return a number for each turn, or None."
    return (None if all(reward is None for reward in value) else sum(rewards)), rewards, ""


def _to_float(value: object) -> tuple[float | None, str]:
    if value is None:
        return None, ""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return None, f"it returned {safe_repr(value)}, which is not a number. {_CURE}"
    try:
        return float(value), ""
    except BaseException as error:  # an integer beyond every float, a tensor of several elements, a `__float__`
        if from_outside(error):
            raise
        reason = f"which is not a number ({type(error).__name__}: {error})"
        return None, f"it returned {safe_repr(value)}, {reason}. {_CURE}"


def _scaled(spec: RewardSpec, number: float) -> float:
    low, high = spec.clip or (-math.inf, math.inf)
    return min(max(number * spec.scale, low), high)
