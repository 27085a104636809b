"""Evidence of faults in the training metrics of a run: the last rows of its log, beside those before them.

Each function looks at the last rows and returns its evidence, or "". It names what cannot be in a sound run (a
misplaced mask, a reward that fails, a sampler that differs from the policy beyond rounding) or states a measured fact
(a reward that gives one value, completions that no longer end). A metric that is merely bad is not a fault.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean as mean
from statistics import median
from typing import Any

_ROWS = 3
"""Consecutive logged rows that a rule needs, where it names no other number."""
_TREND = 5
"""Rows that separate a trend from a level."""
_LEAP = 5.0
"""Factor over all earlier mismatches that counts as a leap."""
_ROUNDING = 2e-5
"""Nats per token below which a mismatch is rounding."""
_ALONE, _ONE_SIDED = 0.1, 1e-3
"""Nats per token above which a mismatch counts without earlier rows to compare with: rounding to bfloat16 stays below
the first, and is never one-sided."""
_KEPT = 0.75
"""Weight of long completions, as a share of that of short ones, below which the correction punishes length; and of
short ones, as a share of that of long ones."""
_NEARLY_NOTHING = 0.1
"""Weight of all completions below which hardly any of them trains."""
_FEW_CARRY, _OFTEN_CLIPPED = 0.3, 0.1
"""Effective share of completions below which, and clipped share above which, a batch is stale. The first does not show
it without the second: a low share is frequent in sound runs too."""
_CUT, _SILENT = "completions/clipped_ratio", "advantages/zero_variance_groups"
_ANOTHER_TEXT = 0.2
"""Nats per token that appear at once where two models read different prompts."""
_FEW = 5
"""Earlier rows that a comparison needs."""
_MANY = 20
"""Earlier rows that a comparison reads at most."""


OF_UPDATES = _SIZE, _CLIPPED = "ratio/ess_completions", "clip_ratio/region_mean"
"""Metrics that are read of all rows: further steps on a generation have no reward."""


class History:
    """Metrics of the training rows of a log, in order.

    Attributes:
        columns: by name the value of each row with a reward, None where it is missing.
        updates: the same of `OF_UPDATES`, of all rows.
        rewards: names in the last row.
        complete: whether the log has no further row; a rule may then speak of fewer rows.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.columns: dict[str, list[float | None]] = {}
        self.updates: dict[str, list[float | None]] = {name: [] for name in OF_UPDATES}
        self.rewards: list[str] = []
        self.complete = False

    def add(self, row: Mapping[str, Any]) -> bool:
        """Add a row; return False for an evaluation or a summary, which is left out."""
        if "step" not in row or not ("reward" in row or "grad_norm" in row):
            return False
        for name, column in self.updates.items():
            column.append(_number(row.get(name)))
        if "reward" not in row:
            return True
        for name in row.keys() - self.columns.keys():
            self.columns[name] = [None] * self.rows
        for name, column in self.columns.items():
            column.append(_number(row.get(name)))
        self.rows += 1
        ends = (name for name in row if name.startswith("rewards/") and name.endswith("/mean"))
        self.rewards = [name[len("rewards/") : -len("/mean")] for name in ends]
        return True

    @property
    def several_turns(self) -> bool:
        """True where tools or environments take part, which may end a completion from outside."""
        return any(name.startswith(("tools/", "environments/")) for name in self.columns)

    @property
    def samples_ahead(self) -> bool:
        """True where completions are of older weights, from which the policy differs by more than rounding."""
        return any(self.columns.get("overlap/age", []))

    def last(self, name: str, rows: int) -> list[float]:
        """Return the last values, or [] if one of them is missing."""
        found = _known(self.columns.get(name, [])[-rows:])
        return found if len(found) == rows else []

    def known(self, name: str, rows: int) -> list[float]:
        """Return the last known values, from at most twice as many rows, or []."""
        found = _known(self.columns.get(name, [])[-2 * rows :])[-rows:]
        return found if len(found) == rows else []

    def before(self, name: str, rows: int) -> list[float]:
        """Return the values before the last `rows`, or [] if too few are known."""
        found = _known(self.columns.get(name, [])[-rows - _MANY : -rows])
        return found if len(found) >= _FEW else []


Evidence = Callable[[History], str]


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _number(value: Any) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e100:
        return None
    return float(value)


def span(values: Sequence[float]) -> str:
    """Format the range of some values."""
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


# The sampler differs from the policy.

_MISMATCH = "sampling/mismatch"


def _leap(history: History, rows: int, without_earlier: float = _ALONE) -> list[float]:
    """Return the last mismatches if all are far beyond the earlier ones, or beyond `without_earlier` without any.

    Where completions are of older weights, there is no limit without earlier ones.
    """
    values = history.last(_MISMATCH, rows)
    if not values or min(values) <= _ROUNDING:
        return []
    before = history.before(_MISMATCH, rows)
    if not before and history.samples_ahead:
        return []
    limit = _LEAP * max(before) if before else without_earlier
    return values if min(values) > limit else []


def _mismatch(history: History, values: list[float]) -> str:
    return _seen(history, _MISMATCH, values, " nats per token")


def _one_sided(history: History, values: list[float]) -> bool:
    bias = history.last("sampling/bias", len(values))
    return bool(bias) and all(b > 0.9 * value for b, value in zip(bias, values, strict=True))


def another_prompt(history: History) -> str:
    """Find a mismatch that leaps beyond what any rounding makes."""
    values = _leap(history, _ROWS)
    return _mismatch(history, values) if values and min(values) >= _ANOTHER_TEXT else ""


def truncated(history: History) -> str:
    """Find a mismatch that leaps and is one-sided."""
    values = _leap(history, _ROWS, _ONE_SIDED)
    if not values or min(values) > _ANOTHER_TEXT or not _one_sided(history, values):
        return ""
    return f"{_mismatch(history, values)}, all of it one-sided (sampling/bias): the sampler is surer of what it draws"


def _two_sided(history: History) -> list[float]:
    values = _leap(history, _TREND)
    return values if values and min(values) <= _ANOTHER_TEXT and not _one_sided(history, values) else []


def _grows(values: list[float]) -> bool:
    return mean(values[-2:]) > 1.5 * mean(values[:2])


def stale(history: History) -> str:
    """Find a two-sided mismatch that leaps and grows."""
    values = _two_sided(history)
    if not values or not _grows(values):
        return ""
    thirds = (history.last(f"{_MISMATCH}_{third}", _TREND) for third in ("first", "middle", "last"))
    placed = ", ".join(f"{median(third):.3g}" for third in thirds if third)
    return f"{_mismatch(history, values)}, growing; by thirds of a completion {placed}"


def precision(history: History) -> str:
    """Find a two-sided mismatch that leaps to a level."""
    values = _two_sided(history)
    if not values or _grows(values):
        return ""
    return f"{_mismatch(history, values)}, neither growing nor one-sided"


def loses(third: str, other: str) -> Evidence:
    """Evidence: a third of the completions, by length, has lost a quarter of its weight beside another, in each log.

    Lengths differ in noise too, so a smaller loss says nothing.
    """
    names = f"sampling/kept_{third}", f"sampling/kept_{other}"

    def evidence(history: History) -> str:
        lost, usual = (history.last(name, _ROWS) for name in names)
        if not (lost and usual) or any(kept >= _KEPT * full for kept, full in zip(lost, usual, strict=True)):
            return ""
        return f"{names[0]} {span(lost)} in {_ROWS} logs, {names[1]} {span(usual)}"

    return evidence


def few_carry(history: History) -> str:
    """Find batches in which few completions carry the update, and many tokens are clipped."""
    sizes, clipped = (_known(history.updates[name][-_ROWS:]) for name in (_SIZE, _CLIPPED))
    if len(sizes) < _ROWS or len(clipped) < _ROWS or max(sizes) >= _FEW_CARRY or min(clipped) <= _OFTEN_CLIPPED:
        return ""
    sampler = history.last("sampling/ess_completions", _ROWS)
    if sampler and max(sampler) < _FEW_CARRY:
        return ""  # where it is the old policy too (`old_logps: sampler`), the other rules name the difference
    return f"{_SIZE} {span(sizes)} and {_CLIPPED} {span(clipped)} in {_ROWS} logs"


def dropped(history: History) -> str:
    """The mean weight is 1 where a correction loses no gradient; noise does not make a tenth of it."""
    values = history.last("sampling/kept", _ROWS)
    if not values or max(values) >= _NEARLY_NOTHING:
        return ""
    mismatch = history.last(_MISMATCH, _ROWS)
    beside = f", with {_MISMATCH} {span(mismatch)} nats per token" if mismatch else ""
    return f"sampling/kept {span(values)} in {_ROWS} logs{beside}"


# Combinators.


def _seen(history: History, name: str, values: list[float], unit: str = "") -> str:
    before = history.before(name, len(values))
    return f"{name} {span(values)}{unit} in {len(values)} logs{f', {span(before)} before' if before else ''}"


def stays_above(name: str, limit: float, rows: int = _ROWS) -> Evidence:
    """Evidence: the last values are above a limit."""

    def evidence(history: History) -> str:
        values = history.last(name, rows)
        return f"{name} {span(values)} in {rows} logs" if values and min(values) > limit else ""

    return evidence


def any_reward(rule: Callable[[History, str], str]) -> Evidence:
    """Evidence of the first reward for which a rule finds some."""
    return lambda history: next((found for name in history.rewards if (found := rule(history, name))), "")


# Rows train with the advantages, rewards or masks of others.


def other_rows(history: History) -> str:
    """Find advantages that are not of their rows' rewards."""
    values = history.known("advantages/of_reward", _ROWS)
    if not values or max(values) > 0.3:
        return ""
    parts = [history.known(f"rewards/{name}/of_advantage", _ROWS) for name in history.rewards]
    if any(part and max(part) > 0.5 for part in parts):
        return ""
    return f"advantages/of_reward {span(values)} in {_ROWS} logs; 1 is expected"


def rewards_of_other_rows(history: History) -> str:
    """Find equal texts that begin to get different rewards."""
    name = "rewards/same_text_differs"
    values, before = history.known(name, _ROWS), history.before(name, _ROWS)
    return _seen(history, name, values) if values and before and min(values) >= 0.2 and max(before) <= 0.01 else ""


def end_lost(history: History) -> str:
    """Attempts of environments and tools may be ended from outside, at any length, so they are left out."""
    cut = history.last(_CUT, _ROWS)
    if not cut or min(cut) < 0.99 or history.several_turns:
        return ""
    least, most = (history.last(f"completions/{name}_length", _ROWS) for name in ("min", "max"))
    if not (least and most) or any(low > 0.9 * high for low, high in zip(least, most, strict=True)):
        return ""
    return (
        f"{_CUT} {span(cut)} in {_ROWS} logs, although lengths of {min(least):g} to {max(most):g} tokens show that no "
        "common limit cut them"
    )


def no_end(history: History) -> str:
    """Find completions that begin to run into the limit."""
    values, before = history.last(_CUT, _ROWS), history.before(_CUT, _ROWS)
    leaps = values and before and min(values) >= 0.8 and median(before) <= 0.3
    return _seen(history, _CUT, values) if leaps and not history.several_turns and not end_lost(history) else ""


def no_signal(history: History) -> str:
    """No group of the whole log has had an advantage; a share of one row is noise unless the log ends there."""
    values = _known(history.columns.get(_SILENT, []))
    if not values or min(values) < 1 or len(values) < (1 if history.complete else _TREND):
        return ""
    beside = ((name, _known(history.columns.get(name, []))) for name in ("reward", "groups/all_wrong", _CUT))
    seen = ", ".join(f"{name} {span(found)}" for name, found in beside if found)
    return f"{_SILENT} 1 in all {len(values)} logs; {seen}"


# Steps.


def steps_too_large(history: History) -> str:
    """Find steps that move the weights far and do harm."""
    name = "weights/change"
    values, before = history.last(name, _ROWS), history.before(name, _ROWS)
    beyond = bool(values) and (min(values) > 0.05 or (bool(before) and min(values) > 10 * max(before)))
    harm = _harm(history) if beyond else ""
    return f"{_seen(history, name, values)}; {harm}" if harm else ""


def _harm(history: History) -> str:
    """Return what the last steps have done to the reward or the entropy."""
    for name in ("reward", "entropy"):
        values = history.columns.get(name, [])
        after, earlier = history.last(name, 2), [v for v in values[:-_ROWS] or values[:1] if v is not None]
        if not after or not earlier:
            continue
        now, usual = median(after), median(earlier)
        worse = now < min(min(earlier), usual - 0.1 * abs(usual))
        if worse if name == "reward" else not usual / 3 <= now <= usual * 3:
            return f"{name} {now:.3g}, {usual:.3g} before"
    return ""


# Rewards and environments.


def fails(history: History, name: str) -> str:
    """Find a reward that raises, and scores few completions or all alike."""
    errors, unscored = (history.last(f"rewards/{name}/{figure}", 2) for figure in ("errors", "none_frac"))
    if not errors or not unscored or min(errors) < 1:
        return ""
    values = (history.columns.get(f"rewards/{name}/{figure}", [])[-2:] for figure in ("mean", "std"))
    if min(unscored) < 0.5 and any(map(any, values)):
        return ""
    return f"rewards/{name}/errors {span(errors)} completions a step, none_frac {span(unscored)}"


def environment_fails(history: History) -> str:
    """Find an environment in which most attempts fail."""
    names = [name for name in history.columns if name.startswith("environments/") and name.endswith("/failed")]
    return next((found for name in names if (found := stays_above(name, 0.5)(history))), "")


def sign(history: History, name: str) -> str:
    """A reward of 0 or 1 is now 0 or -1, which cannot be learned."""
    figure, spread = f"rewards/{name}/mean", f"rewards/{name}/std"
    values, before = history.last(figure, _ROWS), history.before(figure, _ROWS)
    if not values or not before or max(values) > 0 or min(values) == 0:
        return ""
    negated = [-value for value in values]
    if not (_binary(before, history.before(spread, _ROWS)) and _binary(negated, history.last(spread, _ROWS))):
        return ""
    return f"{_seen(history, figure, values)}, of a reward of 0 or 1"


def constant(history: History, name: str) -> str:
    """A learned reward ends at its highest value, and is left out."""
    means, spread = (history.last(f"rewards/{name}/{figure}", _ROWS) for figure in ("mean", "std"))
    before, wide = (history.before(f"rewards/{name}/{figure}", _ROWS) for figure in ("mean", "std"))
    if not (means and spread and before and wide) or max(spread) > 0 or min(wide) <= 0:
        return ""
    if max(means) - min(means) > 1e-6 or means[0] >= max(before) or (means[0] == 0 and _binary(before, wide)):
        return ""
    return (
        f"rewards/{name}/mean {means[0]:.3g} with std 0 in {_ROWS} logs; {span(before)} with std {span(wide)} before"
    )


def _binary(means: list[float], spread: list[float]) -> bool:
    """Return whether a reward is 0 or 1, so that its variance is m (1 - m)."""
    both = zip(means, spread, strict=False)
    return len(means) == len(spread) and all(0 <= m <= 1 and abs(s * s - m * (1 - m)) < 0.05 for m, s in both)
