"""Weights that change over training."""

import math
from collections.abc import Iterator, Mapping, Sequence

from grpo_ext.errors import Problem
from grpo_ext.registry import did_you_mean
from grpo_ext.safe_reading import finite

_KINDS = ("constant", "linear", "cosine")

Schedule = str | Mapping[str, object] | Sequence[Sequence[float]] | None
"""None or "constant"; {kind: linear or cosine, to: w}; or steps [[step, w], ...], each holding from its step on."""


def weight_at(weight: float, schedule: Schedule, step: int, steps: int) -> float:
    r"""Return the weight at an optimizer step of `steps`.

    linear: w + (to - w) x; cosine: to + (w - to) (1 + cos(pi x)) / 2; x = step / steps, at most 1.
    """
    if schedule is None or schedule == "constant":
        return weight
    if isinstance(schedule, Mapping):
        if schedule["kind"] == "constant":
            return weight
        x = min(1.0, step / max(1, steps))
        to = float(schedule["to"])  # type: ignore[arg-type]
        return weight + (to - weight) * (x if schedule["kind"] == "linear" else (1 - math.cos(math.pi * x)) / 2)
    assert not isinstance(schedule, str)
    reached = [float(w) for first, w in schedule if step >= first]
    return reached[-1] if reached else weight


def schedule_problems(schedule: object) -> Iterator[Problem]:
    """Yield the problems of a `weight_schedule`."""
    name = "weight_schedule"
    if schedule is None or schedule == "constant":
        return
    if isinstance(schedule, str):
        cure = f"Write {{kind: {schedule}, to: 0.0}}." if schedule in _KINDS else did_you_mean(schedule, _KINDS)
        yield Problem(name, schedule, "it does not give the weight at the end of training", cure)
    elif isinstance(schedule, Mapping):
        for key in schedule.keys() - {"kind", "to"}:
            yield Problem(f"{name}.{key}", schedule[key], "no such key", did_you_mean(str(key), ("kind", "to")))
        kind, to = schedule.get("kind"), schedule.get("to")
        if kind not in _KINDS:
            yield Problem(f"{name}.kind", kind, "no such kind", did_you_mean(str(kind), _KINDS))
        elif kind != "constant" and finite(to) is None:
            yield Problem(f"{name}.to", to, "not a finite number", "Give the weight at the end of training.")
    elif not isinstance(schedule, Sequence) or not all(map(_is_step, schedule)) or not schedule:
        yield Problem(name, schedule, "neither {kind, to} nor a list of [step, weight]", "Write one of them.")
    elif [pair[0] for pair in schedule] != sorted({pair[0] for pair in schedule}):
        yield Problem(name, schedule, "its steps do not rise", "Sort them, each once.")


def _is_step(pair: object) -> bool:
    if not isinstance(pair, Sequence) or len(pair) != 2:
        return False
    step, weight = pair
    return isinstance(step, int) and not isinstance(step, bool) and step >= 0 and finite(weight) is not None
