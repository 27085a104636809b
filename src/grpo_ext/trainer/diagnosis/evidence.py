"""Evidence of faults in the training metrics of a run: the last rows of its log, beside those before them.

Each function looks at the last rows and returns its evidence, or "". It names what cannot be in a sound run (a
misplaced mask, a reward that fails, a sampler that differs from the policy beyond rounding) or states a measured fact
(a reward that gives one value, completions that no longer end). A metric that is merely bad is not a fault.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

ROWS = 3
"""Consecutive logged rows that a rule needs, where it names no other number."""
TREND = 5
"""Rows that separate a trend from a level."""
_FEW_CARRY, _OFTEN_CLIPPED = 0.3, 0.1
"""Effective share of completions below which, and clipped share above which, a batch is stale. The first does not show
it without the second: a low share is frequent in sound runs too."""
CUT, ZERO_VARIANCE = "completions/clipped_ratio", "advantages/zero_variance_groups"
_FEW = 5
"""Earlier rows that a comparison needs."""
MANY = 20
"""Earlier rows that a comparison reads at most."""
OF_UPDATES = _SIZE, _CLIPPED = "ratio/ess_completions", "clip_ratio/region_mean"
"""Metrics that are read of all rows: further steps on a generation have no reward."""


class History:
    """Metrics of the training rows of a log, in order.

    Attributes:
        columns: by name the value of each row with a reward, None where it is missing.
        updates: the same of `OF_UPDATES`, of all rows.
        evaluations: by name the shares that held-out evaluations have logged, with both ends of their intervals.
        rewards: names in the last row.
        complete: whether the log has no further row; a rule may then speak of fewer rows.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.columns: dict[str, list[float | None]] = {}
        self.updates: dict[str, list[float | None]] = {name: [] for name in OF_UPDATES}
        self.evaluations: dict[str, list[float]] = {}
        self.rewards: list[str] = []
        self.complete = False

    def add(self, row: Mapping[str, Any]) -> bool:
        """Add a row; return False for an evaluation or a summary, which is left out."""
        for name in row:
            if name.startswith("eval_") and "/avg@" in name and (share := _number(row[name])) is not None:
                self.evaluations.setdefault(name, []).append(share)
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
        values = self.recent(name, rows)
        return values if len(values) == rows else []

    def recent(self, name: str, rows: int) -> list[float]:
        """Return the values of the last rows that have one."""
        return known_of(self.columns.get(name, [])[-rows:])

    def known(self, name: str, rows: int) -> list[float]:
        """Return the last known values, from at most twice as many rows, or []."""
        values = self.recent(name, 2 * rows)[-rows:]
        return values if len(values) == rows else []

    def where(self, name: str) -> "History":
        """Return the rows in which a metric is known."""
        history, column = History(), self.columns.get(name, [])
        kept = [at for at, value in enumerate(column) if value is not None]
        history.rows = len(kept)
        history.columns = {other: [values[at] for at in kept] for other, values in self.columns.items()}
        return history

    def before(self, name: str, rows: int) -> list[float]:
        """Return the values before the last `rows`, or [] if too few are known."""
        values = known_of(self.columns.get(name, [])[-rows - MANY : -rows])
        return values if len(values) >= _FEW else []


Evidence = Callable[[History], str]


def known_of(values: Sequence[float | None]) -> list[float]:
    """Return the values that are there."""
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


# Combinators.


def seen(history: History, name: str, values: list[float], unit: str = "") -> str:
    """Format the last values of a metric and the range of those before."""
    before = history.before(name, len(values))
    return f"{name} {span(values)}{unit} in {len(values)} logs{f', {span(before)} before' if before else ''}"


def stays_above(name: str, limit: float, rows: int = ROWS) -> Evidence:
    """Evidence: the last values are above a limit."""

    def evidence(history: History) -> str:
        values = history.last(name, rows)
        return f"{name} {span(values)} in {rows} logs" if values and min(values) > limit else ""

    return evidence


def any_reward(rule: Callable[[History, str], str]) -> Evidence:
    """Evidence of the first reward for which a rule finds some."""
    return lambda history: next((evidence for name in history.rewards if (evidence := rule(history, name))), "")


# Rows train with the advantages, rewards or masks of others.


def other_rows(history: History) -> str:
    """Find advantages that are not of their rows' rewards."""
    values = history.known("advantages/of_reward", ROWS)
    if not values or max(values) > 0.3:
        return ""
    parts = [history.known(f"rewards/{name}/of_advantage", ROWS) for name in history.rewards]
    if any(part and max(part) > 0.5 for part in parts):
        return ""
    return f"advantages/of_reward {span(values)} in {ROWS} logs; 1 is expected"


def rewards_of_other_rows(history: History) -> str:
    """Find equal texts that begin to get different rewards."""
    name = "rewards/same_text_differs"
    values, before = history.known(name, ROWS), history.before(name, ROWS)
    return seen(history, name, values) if values and before and min(values) >= 0.2 and max(before) <= 0.01 else ""


def end_lost(history: History) -> str:
    """Episodes of environments and tools may be ended from outside, at any length, so they are left out."""
    cut = history.last(CUT, ROWS)
    if not cut or min(cut) < 0.99 or history.several_turns:
        return ""
    least, most = (history.last(f"completions/{name}_length", ROWS) for name in ("min", "max"))
    if not (least and most) or any(low > 0.9 * high for low, high in zip(least, most, strict=True)):
        return ""
    return (
        f"{CUT} {span(cut)} in {ROWS} logs, although lengths of {min(least):g} to {max(most):g} tokens show that no "
        "common limit cut them"
    )


def no_end(history: History) -> str:
    """Find completions that begin to run into the limit."""
    values, before = history.last(CUT, ROWS), history.before(CUT, ROWS)
    leaps = values and before and min(values) >= 0.8 and median(before) <= 0.3
    return seen(history, CUT, values) if leaps and not history.several_turns and not end_lost(history) else ""


# Steps.


def few_carry(history: History) -> str:
    """Find batches in which few completions carry the update, and many tokens are clipped."""
    sizes, clipped = (known_of(history.updates[name][-ROWS:]) for name in (_SIZE, _CLIPPED))
    if len(sizes) < ROWS or len(clipped) < ROWS or max(sizes) >= _FEW_CARRY or min(clipped) <= _OFTEN_CLIPPED:
        return ""
    sampler = history.last("sampling/ess_completions", ROWS)
    if sampler and max(sampler) < _FEW_CARRY:
        return ""  # where it is the old policy too (`old_logps: sampler`), the other rules name the difference
    return f"{_SIZE} {span(sizes)} and {_CLIPPED} {span(clipped)} in {ROWS} logs"


def steps_too_large(history: History) -> str:
    """Find steps that move the weights far and do harm, or less far and do both harms."""
    name = "weights/change"
    values, before, harms = history.last(name, ROWS), history.before(name, ROWS), _harms(history)
    if not values or not harms:
        return ""
    far = min(values) > 0.05 or (bool(before) and min(values) > 10 * max(before))
    both = min(values) > 0.01 and len(harms) == 2
    return f"{seen(history, name, values)}; {', '.join(harms)}" if far or both else ""


def _harms(history: History) -> list[str]:
    """Return what the last steps have done to the reward and to the entropy."""
    harms = []
    for name in ("reward", "entropy"):
        values = history.columns.get(name, [])
        after, earlier = history.last(name, 2), [v for v in values[:-ROWS] or values[:1] if v is not None]
        if not after or not earlier:
            continue
        now, usual = median(after), median(earlier)
        worse = now < min(min(earlier), usual - 0.1 * abs(usual))
        if worse if name == "reward" else not usual / 3 <= now <= usual * 3:
            harms.append(f"{name} {now:.3g}, {usual:.3g} before")
    return harms


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
    """Find an environment in which most episodes fail."""
    names = [name for name in history.columns if name.startswith("environments/") and name.endswith("/failed")]
    return next((evidence for name in names if (evidence := stays_above(name, 0.5)(history))), "")


def sign(history: History, name: str) -> str:
    """A reward of 0 or 1 is now 0 or -1, which cannot be learned."""
    figure, spread = f"rewards/{name}/mean", f"rewards/{name}/std"
    values, before = history.last(figure, ROWS), history.before(figure, ROWS)
    if not values or not before or max(before) <= 0 or max(values) > 0 or min(values) == 0:
        return ""
    negated = [-value for value in values]
    if not (_binary(before, history.before(spread, ROWS)) and _binary(negated, history.last(spread, ROWS))):
        return ""
    return f"{seen(history, figure, values)}, of a reward of 0 or 1"


def constant(history: History, name: str) -> str:
    """A learned reward ends at its highest value, and is left out."""
    means, spread = (history.last(f"rewards/{name}/{figure}", ROWS) for figure in ("mean", "std"))
    before, wide = (history.before(f"rewards/{name}/{figure}", ROWS) for figure in ("mean", "std"))
    if not (means and spread and before and wide) or max(spread) > 0 or min(wide) <= 0:
        return ""
    if max(means) - min(means) > 1e-6 or means[0] >= max(before) or (means[0] == 0 and _binary(before, wide)):
        return ""
    return f"rewards/{name}/mean {means[0]:.3g} with std 0 in {ROWS} logs; {span(before)} with std {span(wide)} before"


def _binary(means: list[float], spread: list[float]) -> bool:
    """Return whether a reward is 0 or 1, so that its variance is m (1 - m)."""
    both = zip(means, spread, strict=False)
    return len(means) == len(spread) and all(0 <= m <= 1 and abs(s * s - m * (1 - m)) < 0.05 for m, s in both)
