"""Weights that change over training."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_ext.registry import did_you_mean

KINDS = ("constant", "linear", "cosine")

Schedule = str | Mapping[str, Any] | Sequence[Sequence[float]] | None
"""None or "constant"; {kind: linear or cosine, to: w}; or steps [[step, w], ...], each holding from its step on."""


def weight_at(weight: float, schedule: Schedule, step: int, steps: int) -> float:
    r"""The weight at an optimizer step of `steps`.

    linear: w + (to - w) x; cosine: to + (w - to) (1 + cos(pi x)) / 2; x = step / steps, at most 1.
    """
    if schedule is None or schedule == "constant":
        return weight
    if isinstance(schedule, Mapping):
        if schedule["kind"] == "constant":
            return weight
        x = min(1.0, step / max(1, steps))
        to = float(schedule["to"])
        return weight + (to - weight) * (x if schedule["kind"] == "linear" else (1 - math.cos(math.pi * x)) / 2)
    assert not isinstance(schedule, str)
    reached = [float(w) for first, w in schedule if step >= first]
    return reached[-1] if reached else weight


def schedule_problems(schedule: Any) -> Iterator[str]:
    """What is wrong with a schedule: value, reason, cure."""
    if schedule is None or schedule == "constant":
        return
    if isinstance(schedule, str):
        cure = f"Write {{kind: {schedule}, to: 0.0}}." if schedule in KINDS else did_you_mean(schedule, KINDS)
        yield f"weight_schedule={schedule!r} does not say where it goes. {cure}"
    elif isinstance(schedule, Mapping):
        yield from _mapping_problems(schedule)
    elif not isinstance(schedule, Sequence) or not all(_is_step(pair) for pair in schedule) or not schedule:
        yield f"weight_schedule={schedule!r}: neither {{kind, to}} nor a list of [step, weight]. Write one of them."
    elif [pair[0] for pair in schedule] != sorted({pair[0] for pair in schedule}):
        yield f"weight_schedule={schedule!r}: its steps do not rise. Sort them, each once."


def _mapping_problems(schedule: Mapping[str, Any]) -> Iterator[str]:
    for key in schedule:
        if key not in ("kind", "to"):
            yield f"weight_schedule has {key!r}. {did_you_mean(str(key), ('kind', 'to'))}"
    kind = schedule.get("kind")
    if kind not in KINDS:
        yield f"weight_schedule.kind={kind!r}. {did_you_mean(str(kind), KINDS)}"
    elif kind != "constant" and not _is_number(schedule.get("to")):
        yield f"weight_schedule.to={schedule.get('to')!r} is no finite number. Give the weight at the end of training."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_step(pair: Any) -> bool:
    return (
        isinstance(pair, Sequence)
        and len(pair) == 2
        and isinstance(pair[0], int)
        and not isinstance(pair[0], bool)
        and pair[0] >= 0
        and _is_number(pair[1])
    )
