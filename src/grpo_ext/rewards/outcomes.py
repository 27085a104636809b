"""Merges the outcomes of a reward's calls: scaled and clipped numbers in the batch's order, and failures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_ext.objective.trajectory import COLUMN
from grpo_ext.rewards.columns import Columns, row_count
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.failures import from_outside
from grpo_ext.rewards.workers.pool import Outcome, Status
from grpo_ext.rewards.workers.worker import safe_repr


@dataclass
class ScoredCall:
    """One call: the rows of the batch that it scored, and its outcome."""

    rows: list[int]
    outcome: Outcome
    after: str = ""
    """Why the call on more rows failed that this one replaces; "" for none."""


_CURE = "Return a finite number, or None where it cannot be scored"


@dataclass
class Scores:
    """One reward's values for a batch, before its weight, and its failures and metrics."""

    values: list[float | None]
    turns: list[list[float] | None]
    """Rewards of each turn, where the function returned them."""
    failed: list[tuple[int, str]] = field(default_factory=list)
    misshapen: bool = False
    """Whether a call did not return one value per completion."""
    as_a_whole: bool = False
    """Whether a call on several completions failed, so that all are without a score."""
    rescored: int = 0
    """Completions that were scored one by one."""
    cause: str = ""
    """Why they were scored one by one."""
    nans: int = 0
    timeouts: int = 0
    clipped: int = 0
    seconds: float = 0.0
    extras: dict[str, list] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    error: str = ""
    """Why the run must stop, or an empty string."""


def merged(spec: RewardSpec, turns: Sequence[int | None], calls: Sequence[ScoredCall]) -> Scores:
    """Merge the values of all rows; `turns` holds the number of turns of each, or None.

    Failed rows get the value of `on_error`, which is not scaled or clipped.
    """
    total = len(turns)
    scores = Scores([None] * total, [None] * total)
    for call in calls:
        rows, outcome = call.rows, call.outcome
        if call.after:
            scores.rescored, scores.cause = scores.rescored + len(rows), call.after
        scores.seconds += outcome.seconds
        scores.timeouts += len(rows) * (outcome.status == Status.TIMEOUT)
        scores.metrics += outcome.metrics
        reason = failure(outcome, len(rows))
        if reason:
            scores.failed += [(row, reason) for row in rows]
            scores.misshapen |= outcome.misshapen(len(rows))
            scores.as_a_whole |= len(rows) > 1
            continue
        for row, value in zip(rows, outcome.values, strict=True):
            number, by_turn, problem = read_value(value, turns[row])
            if number is not None and math.isinf(number):
                number, problem = None, f"it returned {number}. {_CURE}"
            scores.failed += [(row, problem)] if problem else []
            if number is not None and math.isnan(number):
                scores.nans += 1
            elif number is not None:
                scores.values[row] = final = _scaled(spec, number)
                scores.turns[row] = None if by_turn is None else [reward * spec.scale for reward in by_turn]
                scores.clipped += final != number * spec.scale
        for column, values in outcome.extras:
            for row, value in zip(rows, values, strict=False):
                scores.extras.setdefault(column, [None] * total)[row] = value
    scores.failed.sort()
    if spec.on_error == "zero":
        for row, _ in scores.failed:
            scores.values[row] = 0.0
    return scores


def failure(outcome: Outcome, rows: int) -> str:
    """Return why a call gives no values, or "" if it does."""
    if outcome.status != Status.SCORED:
        return outcome.reason
    return "" if len(outcome.values) == rows else wrong_length(len(outcome.values), rows)


def wrong_length(values: int, rows: int) -> str:
    """Return the reason of a failure: a reward did not return one value for each completion."""
    return f"it returned {values} values for {rows} completions. Return one number or None for each"


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
    except (TypeError, ValueError):
        return None, None, f"it returned {value!r:.200}. Return a number for each turn, or None."
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
