"""What the calls of a reward came to: numbers, scaled and clipped, in the batch's order, and what went wrong."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.failures import from_outside
from grpo_ext.rewards.turns import split
from grpo_ext.rewards.workers.pool import Outcome, Status
from grpo_ext.rewards.workers.worker import safe_repr


@dataclass
class Part:
    """One call: the rows of the batch that it was to score, and its outcome."""

    rows: list[int]
    outcome: Outcome
    after: str = ""
    """Why an earlier call on more rows failed, which this one replaces; "" for none."""


_CURE = "Return a finite number, or None where it cannot be scored"


@dataclass
class Scores:
    """One reward's values for a batch, before its weight, and what happened on the way."""

    values: list[float | None]
    turns: list[list[float] | None]
    """What each turn earned, where the function says so."""
    failed: list[tuple[int, str]] = field(default_factory=list)
    misshapen: bool = False
    """Whether a call returned something else than one value per completion."""
    as_a_whole: bool = False
    """Whether a call on several completions failed, and cost all of them."""
    rescored: int = 0
    """Completions that were scored one by one."""
    cause: str = ""
    """Why they were."""
    nans: int = 0
    timeouts: int = 0
    clipped: int = 0
    seconds: float = 0.0
    extras: dict[str, list] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    error: str = ""
    """Why the run must stop, or an empty string."""


def merged(spec: RewardSpec, turns: Sequence[int | None], parts: Sequence[Part]) -> Scores:
    """Values of all rows, whose `turns` are counted where they have some.

    What failed is the reward's `on_error` value, which nothing scales or clips.
    """
    total = len(turns)
    scores = Scores([None] * total, [None] * total)
    for part in parts:
        rows, outcome = part.rows, part.outcome
        if part.after:
            scores.rescored, scores.cause = scores.rescored + len(rows), part.after
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
            number, earned, problem = _numbers(value, turns[row])
            scores.failed += [(row, problem)] if problem else []
            if number is not None and math.isnan(number):
                scores.nans += 1
            elif number is not None:
                scores.values[row] = final = _scaled(spec, number)
                scores.turns[row] = None if earned is None else [reward * spec.scale for reward in earned]
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
    """Why a call gives no values, or nothing if it does."""
    if outcome.status != Status.SCORED:
        return outcome.reason
    if len(outcome.values) != rows:
        return f"it returned {len(outcome.values)} values for {rows} completions. Return one number or None for each"
    return ""


def _numbers(value: Any, turns: int | None) -> tuple[float | None, list[float] | None, str]:
    try:
        value, earned = split(value, turns)
    except ValueError as error:
        return None, None, str(error)
    number, problem = to_number(value)
    return number, earned, problem


def to_number(value: Any) -> tuple[float | None, str]:
    """A reward as a float, finite or NaN (None stays None), or None and what is wrong with it."""
    number, problem = to_float(value)
    if number is None or not math.isinf(number):
        return number, problem
    return None, f"it returned {number}. {_CURE}"


def to_float(value: Any) -> tuple[float | None, str]:
    """The same, which may be inf."""
    if value is None:
        return None, ""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return None, f"it returned {safe_repr(value)}, which is not a number. {_CURE}"
    try:
        return float(value), ""
    except BaseException as error:  # an integer beyond every float, a tensor of several elements, a `__float__`
        if from_outside(error):
            raise
        return (
            None,
            f"it returned {safe_repr(value)}, which is not a number ({type(error).__name__}: {error}). {_CURE}",
        )


def _scaled(spec: RewardSpec, number: float) -> float:
    low, high = spec.clip or (-math.inf, math.inf)
    return min(max(number * spec.scale, low), high)
