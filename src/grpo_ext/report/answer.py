"""The answer to "did it learn?": held-out figures before and after, the reward, time and tokens."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grpo_ext.report.reading import RunFolder


class _Value(NamedTuple):
    """A figure at a step, with its interval if it is known."""

    step: float
    mean: float
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        """Return '0.25 (0.15 to 0.35) at step 0'."""
        known = math.isfinite(self.low) and math.isfinite(self.high)
        return f"{self.mean:.4g}{f' ({self.low:.3g} to {self.high:.3g})' if known else ''} at step {self.step:g}"


class _Change(NamedTuple):
    """A figure before and after training."""

    name: str
    before: _Value
    after: _Value

    @property
    def verdict(self) -> str:
        """'Yes', 'No, it got worse', or 'Not shown' if the intervals overlap."""
        if self.after.low > self.before.high:
            return "Yes"
        return "No, it got worse" if self.after.high < self.before.low else "Not shown"

    def __str__(self) -> str:
        """Return one sentence without its end."""
        rise = self.after.mean - self.before.mean
        verb = "rose" if rise > 0 else "fell" if rise < 0 else "stayed"
        return f"{self.name} {verb} from {self.before} to {self.after}"


def held_out(run: RunFolder) -> list[_Change]:
    """Return the first and the last result of each evaluation set, else of `eval_reward`."""
    by_set: dict[str, list[dict[str, Any]]] = {}
    for found in run.evaluations:
        if isinstance(found.get("step"), int | float):
            by_set.setdefault(found["set"], []).append(found)
    changes = []
    for name, results in by_set.items():
        results.sort(key=lambda found: found["step"])
        figure = next((f for f in results[0]["figures"] if f.startswith("avg@")), next(iter(results[0]["figures"])))
        ends = [_value(found["step"], found["figures"][figure]) for found in results if figure in found["figures"]]
        changes += [_Change(f"{name} {figure}", ends[0], ends[-1])] if len(ends) > 1 else []
    known = _known(run, "eval_reward")
    if not changes and len(known) > 1:
        return [_Change("eval_reward", _Value(*known[0]), _Value(*known[-1]))]
    return changes


def _value(step: float, figure: Mapping[str, float]) -> _Value:
    ends = (figure.get(side) for side in ("low", "high"))
    return _Value(step, figure["mean"], *(end if isinstance(end, int | float) else math.nan for end in ends))


def _known(run: RunFolder, name: str) -> list[tuple[float, float]]:
    """Return steps and values of a logged metric, without NaN."""
    return [(s, v) for s, v in zip(*run.series().get(name, ([], [])), strict=True) if not math.isnan(v)]


def in_training(run: RunFolder) -> _Change | None:
    """Return the mean reward of the first and the last tenth of the logs, each with two standard errors."""
    known = _known(run, "reward")
    if len(known) < 2:
        return None
    count = max(1, len(known) // 10)
    return _Change("reward in training", _mean(known[0][0], known[:count]), _mean(known[-1][0], known[-count:]))


def _mean(step: float, rows: Sequence[tuple[float, float]]) -> _Value:
    values = [value for _, value in rows]
    mean = statistics.fmean(values)
    if len(values) < 3:
        return _Value(step, mean)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return _Value(step, mean, mean - 2 * error, mean + 2 * error)


def sentence(run: RunFolder) -> str:
    """Return the answer in one or two sentences."""
    if changes := held_out(run):
        unsure = "" if math.isfinite(changes[0].after.low) else " One figure without an interval is weak evidence."
        return f"{changes[0].verdict}: {changes[0]}.{unsure}"
    reward = in_training(run)
    if reward is None:
        return "Unknown: no held-out evaluation, and fewer than two logs of the reward."
    return f"Unknown on held-out prompts: none were evaluated (eval_sets, eval_strategy). The {reward}."


def spent(run: RunFolder) -> dict[str, str]:
    """Return the time and the tokens of a run, if they were logged."""
    found = {}
    if seconds := _known(run, "train_runtime"):
        last = seconds[-1][1]
        found["time"] = f"{last / 3600:.2f} hours" if last >= 3600 else f"{last:.0f} s"
    if tokens := _known(run, "num_tokens"):
        found["tokens"] = f"{tokens[-1][1]:,.0f}"
    return found
