"""The answer to "did it learn?": held-out figures before and after, the reward, time and tokens."""

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_ext.evaluation.estimators import Mean
from grpo_ext.evaluation.results import gain
from grpo_ext.report.reading import RunFolder

_LEAST = 3
"""Logs at each end of a run that have a standard error."""


class _Value(NamedTuple):
    """A figure at a step, with its interval if it is known."""

    step: float
    mean: float
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        """Return '0.25 (0.15 to 0.35) at step 0'."""
        is_finite = math.isfinite(self.low) and math.isfinite(self.high)
        return f"{self.mean:.4g}{f' ({self.low:.3g} to {self.high:.3g})' if is_finite else ''} at step {self.step:g}"


class _Change(NamedTuple):
    """A figure before and after training; `paired` is the mean difference prompt by prompt, if it is known."""

    name: str
    before: _Value
    after: _Value
    paired: Mean | None = None

    @property
    def verdict(self) -> str:
        """'Yes', 'No, it got worse', or 'Not shown' if the interval of the difference, or both, leave it open."""
        least, most = self.after.low - self.before.high, self.after.high - self.before.low
        if self.paired is not None:
            least, most = self.paired.low, self.paired.high
        return "Yes" if least > 0 else "No, it got worse" if most < 0 else "Not shown"

    def __str__(self) -> str:
        """Return one sentence without its end."""
        rise = self.after.mean - self.before.mean
        verb = "rose" if rise > 0 else "fell" if rise < 0 else "stayed"
        change = f"{self.name} {verb} from {self.before} to {self.after}"
        if self.paired is None:
            return change
        mean, low, high, prompts = self.paired
        return f"{change}, by prompt {mean:+.3g} ({low:+.3g} to {high:+.3g}) over {prompts} prompts"


def held_out(run: RunFolder) -> list[_Change]:
    """Return the first and the last result of each evaluation set, else of `eval_reward`."""
    by_set: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for result in run.evaluations:
        if (step := _step(run, result)) is not None:
            by_set.setdefault(result["set"], []).append((step, result))
    changes = [change for name, results in by_set.items() for change in _changes(name, results)]
    points = _points(run, "eval_reward")
    if not changes and len(points) > 1:
        return [_Change("eval_reward", _Value(*points[0]), _Value(*points[-1]))]
    return changes


def _step(run: RunFolder, result: Mapping[str, Any]) -> float | None:
    """Return the step of a result; for one of `grpo-ext eval`, which has none, that of its model in this run."""
    if isinstance(result.get("step"), int | float):
        return float(result["step"])
    model = str(result.get("model"))
    if model == str(run.record.get("model_name_or_path")):
        return 0.0
    parts, folder = Path(model).parts, run.folder.resolve().name
    if folder not in parts[-2:]:
        return None
    checkpoint = re.fullmatch(r"checkpoint-(\d+)", parts[-1])
    return float(checkpoint[1]) if checkpoint else float(run.step) if parts[-1] == folder else None


def _changes(name: str, results: list[tuple[float, dict[str, Any]]]) -> Iterator[_Change]:
    """Yield how the share that each judge calls right changed between a set's first and its last result."""
    results.sort(key=lambda pair: pair[0])
    (_, first), (_, last) = results[0], results[-1]
    shares = [figure for figure in first["figures"] if figure.rpartition("/")[2].startswith("avg@")]
    for figure in shares or list(first["figures"])[:1]:
        ends = [_value(step, result["figures"][figure]) for step, result in results if figure in result["figures"]]
        if len(ends) > 1:
            same = first.get("settings") == last.get("settings") and figure in last["figures"]
            paired = gain(_right(first, figure), _right(last, figure)) if same else None
            yield _Change(f"{name} {figure}", ends[0], ends[-1], paired if paired and paired.prompts > 1 else None)


def _right(result: Mapping[str, Any], figure: str) -> Mapping[str, float]:
    """Return the share that the judge of a figure calls right, by prompt; the first judge's figures have no name."""
    by_judge = result.get("right") or {}
    shares = by_judge.get(figure.rpartition("/")[0] or next(iter(by_judge), ""))
    return shares if isinstance(shares, Mapping) else {}


def _value(step: float, figure: Mapping[str, float]) -> _Value:
    ends = (figure.get(side) for side in ("low", "high"))
    return _Value(step, figure["mean"], *(end if isinstance(end, int | float) else math.nan for end in ends))


def _points(run: RunFolder, name: str) -> list[tuple[float, float]]:
    """Return steps and values of a logged metric, without NaN."""
    return [(s, v) for s, v in zip(*run.series().get(name, ([], [])), strict=True) if not math.isnan(v)]


def in_training(run: RunFolder) -> _Change | None:
    """Return the mean reward of the first and the last tenth of the logs, at least three, with two standard errors."""
    points = _points(run, "reward")
    if len(points) < 2 * _LEAST:
        return None
    count = max(_LEAST, len(points) // 10)
    return _Change("reward in training", _mean(points[0][0], points[:count]), _mean(points[-1][0], points[-count:]))


def _mean(step: float, rows: Sequence[tuple[float, float]]) -> _Value:
    values = [value for _, value in rows]
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    return _Value(step, mean, mean - 2 * error, mean + 2 * error)


def sentence(run: RunFolder) -> str:
    """Return the answer in one or two sentences."""
    if changes := held_out(run):
        unsure = "" if math.isfinite(changes[0].after.low) else " One figure without an interval is weak evidence."
        return f"{changes[0].verdict}: {changes[0]}.{unsure}{_only_in_training(run, changes)}"
    reward = in_training(run)
    if reward is None:
        return f"Unknown: no held-out evaluation, and fewer than {2 * _LEAST} logs of the reward."
    noise = "" if reward.verdict != "Not shown" else ", which may be noise"
    once = run.evaluations or _points(run, "eval_reward")
    why = "they were evaluated only once" if once else "none were evaluated (eval_sets, eval_strategy)"
    return f"Unknown on held-out prompts: {why}. The {reward}{noise}."


def _only_in_training(run: RunFolder, changes: Sequence[_Change]) -> str:
    """Return the sentence about a reward that rose while no held-out figure did."""
    reward = in_training(run)
    if reward is None or reward.verdict != "Yes" or any(change.verdict == "Yes" for change in changes):
        return ""
    return f" Yet the {reward}: it may be paid for something else."


def spent(run: RunFolder) -> dict[str, str]:
    """Return the time of all steps and the tokens of a run, if they were logged."""
    figures = {}
    if steps := _points(run, "step_time"):  # train_runtime begins anew where a run is resumed
        before = [0.0, *(step for step, _ in steps)]
        taken = sum(mean * (step - last) for (step, mean), last in zip(steps, before, strict=False))
        figures["time"] = f"{taken / 3600:.2f} hours" if taken >= 3600 else f"{taken:.0f} s"
    if tokens := _points(run, "num_tokens"):
        figures["tokens"] = f"{tokens[-1][1]:,.0f}"
    return figures
