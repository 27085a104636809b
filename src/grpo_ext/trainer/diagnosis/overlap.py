"""Forecast the gain of sampling and scoring while the policy trains, from the times that a run logs."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

WORTH = 1.1
"""Gain, in times, below which overlap is not recommended."""
WAITED, BESIDE = "overlap/waited", "overlap/rollout_seconds"
_UNNOTICED = 0.05
"""Share of a window's rollouts below which waiting for them is noise."""

_Settings = Mapping[str, Any]
_Log = Sequence[Mapping[str, Any]]


class StepSeconds(NamedTuple):
    """Mean seconds of an optimizer step.

    Attributes:
        rollout: sampling, which needs the sampler's device.
        scoring: rewards and environments, which need neither device.
        training: forward and backward passes, optimizer.
        push: copying weights to the sampler, which nothing overlaps.
    """

    rollout: float
    scoring: float
    training: float
    push: float = 0.0

    def overlapped(self, *, shared: bool) -> float:
        """Return the least time of a step with `rollout_ahead: 1`.

        A window must be sampled, then scored: r + w seconds beside b of training. If sampler and policy share a device
        (`shared`), their work adds up there, and only the scoring overlaps with training.
        """
        if shared:
            return self.push + self.rollout + max(self.scoring, self.training)
        return self.push + max(self.rollout + self.scoring, self.training)

    def gain(self, *, shared: bool) -> float:
        """Return how many times faster than in sequence that is."""
        return sum(self) / max(self.overlapped(shared=shared), 1e-9)


def step_seconds(log: _Log) -> StepSeconds | None:
    """Return the mean times of the later half of a log, behind the warm-up; None if it has no times."""
    rows = [row for row in log if isinstance(row.get("time/training"), int | float)]
    if not rows:
        return None
    late = rows[len(rows) // 2 :]

    def mean(*parts: str) -> float:
        return sum(fmean(row.get(f"time/{part}") or 0.0 for row in late) for part in parts)

    return StepSeconds(mean("rollout"), mean("rewards", "environments"), mean("training"), mean("weight_push"))


def advice(log: _Log, settings: _Settings) -> str | None:
    """Return what overlap brings or would bring to a run, in one paragraph; None if its log has no times.

    Args:
        log: rows of metrics.
        settings: the run's settings by name, which determine what the sampler runs on.
    """
    with_overlap = [row for row in log if isinstance(row.get(WAITED), int | float) and row.get(BESIDE)]
    if with_overlap:
        late = with_overlap[len(with_overlap) // 2 :]
        return _bottleneck(fmean(row[WAITED] for row in late), fmean(row[BESIDE] for row in late))
    seconds = step_seconds(log)
    return None if seconds is None else _forecast(seconds, settings)


def _bottleneck(waited: float, rollout: float) -> str:
    """Name the slower side of a run with overlap."""
    measured = f"rollouts and rewards of a generation take {_s(rollout)}, and training waited {_s(waited)} for them"
    if waited <= _UNNOTICED * rollout:
        return f"On: {measured}. Training is the bottleneck: a faster sampler gains nothing."
    return (
        f"On: {measured}. The sampler or the rewards are the bottleneck: more devices or cores for them, or shorter "
        f"completions, make a step up to {_s(waited)} faster."
    )


def _forecast(seconds: StepSeconds, settings: _Settings) -> str:
    """Compare the steps of a run without overlap with steps that overlap."""
    shared, now = _shares_device(settings), sum(seconds)
    rollout = seconds.rollout + seconds.scoring
    measured = f"rollouts and rewards take {_s(rollout)} and training {_s(seconds.training)} of a step"
    apart = f"about {_s(seconds.overlapped(shared=False))}, {seconds.gain(shared=False):.1f} times faster"
    if not shared and seconds.gain(shared=False) >= WORTH:
        where = ", if the sampler has free cores" if settings.get("use_cpu") else ""
        return f"{_first(measured)}: with `rollout_ahead: 1` a step would take {apart}{where}."
    if not shared:
        return f"{_first(measured)}: overlap would bring little, {_s(now)} would become {apart}."
    if seconds.gain(shared=True) < WORTH:
        return (
            f"{_first(measured)}, on the same device: overlap would not pay there. With devices of its own for the "
            f"sampler (a vLLM server, `rollout_device`) and `rollout_ahead: 1` a step would take {apart}."
        )
    hidden = f"about {_s(seconds.overlapped(shared=True))}, {seconds.gain(shared=True):.1f} times faster"
    return (
        f"{_first(measured)}, on the same device. `rollout_engine: process` with `rollout_ahead: 1` would hide "
        f"{_s(seconds.scoring)} of rewards and environments: {hidden}; with a device for the sampler {apart}."
    )


def _shares_device(settings: _Settings) -> bool:
    """Return whether sampler and policy compute on one device; processes on a CPU can have cores of their own."""
    if settings.get("use_vllm"):
        return settings.get("vllm_mode") != "server"
    return not settings.get("use_cpu") and settings.get("rollout_device") is None


def _first(text: str) -> str:
    return text[0].upper() + text[1:]


def _s(seconds: float) -> str:
    return f"{round(seconds, 3):.2g} s" if seconds < 10 else f"{seconds:.0f} s"
