"""The answer to "did it learn?": held-out figures before and after, the reward, time and tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_ext.report.reading import RunFolder

_SHARE = 10
"""Without held-out results, the first and the last tenth of the logs are compared."""


@dataclass(frozen=True)
class Value:
    """A figure at a step, with its interval if it is known."""

    step: float
    mean: float
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        """Return '0.25 (0.15 to 0.35) at step 0'."""
        known = math.isfinite(self.low) and math.isfinite(self.high)
        return f"{self.mean:.4g}{f' ({self.low:.3g} to {self.high:.3g})' if known else ''} at step {self.step:g}"


@dataclass(frozen=True)
class Change:
    """A figure before and after training."""

    name: str
    before: Value
    after: Value

    @property
    def verdict(self) -> str:
        """'Yes', 'No' or 'Not shown': overlapping intervals are no evidence."""
        if self.after.low > self.before.high:
            return "Yes"
        return "No, it got worse" if self.after.high < self.before.low else "Not shown"

    def __str__(self) -> str:
        """Return one sentence without its end."""
        rise = self.after.mean - self.before.mean
        verb = "rose" if rise > 0 else "fell" if rise < 0 else "stayed"
        return f"{self.name} {verb} from {self.before} to {self.after}"


def held_out(run: RunFolder) -> list[Change]:
    """Return the first and the last result of each evaluation set, else of `eval_reward`."""
    results = [found for found in run.evaluations if isinstance(found.get("step"), int | float)]
    changes = []
    for name in dict.fromkeys(found["set"] for found in results):
        mine = sorted((found for found in results if found["set"] == name), key=lambda found: found["step"])
        figure = next((f for f in mine[0]["figures"] if f.startswith("avg@")), next(iter(mine[0]["figures"])))
        ends = [(found["step"], found["figures"][figure]) for found in mine if figure in found["figures"]]
        if len(ends) > 1:
            before, after = (Value(step, *_interval(found)) for step, found in (ends[0], ends[-1]))
            changes.append(Change(f"{name} {figure}", before, after))
    steps, values = run.series().get("eval_reward", ([], []))
    known = [(s, v) for s, v in zip(steps, values, strict=True) if not math.isnan(v)]
    if not changes and len(known) > 1:
        changes.append(Change("eval_reward", Value(*known[0]), Value(*known[-1])))
    return changes


def _interval(figure: dict[str, float]) -> tuple[float, float, float]:
    low, high = (end if isinstance(end := figure.get(side), int | float) else math.nan for side in ("low", "high"))
    return float(figure["mean"]), float(low), float(high)


def in_training(run: RunFolder) -> Change | None:
    """Return the mean reward of the first and of the last tenth of the logs, each with two standard errors."""
    steps, values = run.series().get("reward", ([], []))
    known = [(s, v) for s, v in zip(steps, values, strict=True) if not math.isnan(v)]
    if len(known) < 2:
        return None
    count = max(1, len(known) // _SHARE)
    return Change("reward in training", _mean(known[:count], 0), _mean(known[-count:], -1))


def _mean(rows: Sequence[tuple[float, float]], end: int) -> Value:
    values = [value for _, value in rows]
    mean = math.fsum(values) / len(values)
    if len(values) < 3:
        return Value(rows[end][0], mean)
    error = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
    return Value(rows[end][0], mean, mean - 2 * error, mean + 2 * error)


def sentence(run: RunFolder) -> str:
    """Return the answer in one or two sentences."""
    changes = held_out(run)
    if changes:
        first = changes[0]
        unsure = "" if math.isfinite(first.after.low) else " One figure without an interval is weak evidence."
        return f"{first.verdict}: {first}.{unsure}"
    reward = in_training(run)
    if reward is None:
        return "Unknown: no held-out evaluation, and fewer than two logs of the reward."
    return f"Unknown on held-out prompts: none were evaluated (eval_sets, eval_strategy). The {reward}."


def spent(run: RunFolder) -> dict[str, str]:
    """Return the time and the tokens of a run, as far as they were logged."""
    series = run.series()
    found = {}
    if seconds := _last(series.get("train_runtime")):
        found["time"] = f"{seconds / 3600:.2f} hours" if seconds >= 3600 else f"{seconds:.0f} s"
    if tokens := _last(series.get("num_tokens")):
        found["tokens"] = f"{tokens:,.0f}"
    return found


def _last(series: tuple[list[float], list[float]] | None) -> float:
    return next((value for value in reversed(series[1]) if not math.isnan(value)), 0.0) if series else 0.0
