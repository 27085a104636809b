"""Evidence that the sampler differs from the policy, and where in completions it does."""

from statistics import fmean as mean
from statistics import median

from grpo_ext.trainer.diagnosis.evidence import ROWS, TREND, Evidence, History, seen, span
from grpo_ext.trainer.diagnosis.positions import DEPTHS, FIRST_TURN, LATER_TURNS, MISMATCH

_LEAP = 5.0
"""Factor over all earlier mismatches that counts as a leap."""
_ROUNDING = 2e-5
"""Nats per token below which a mismatch is rounding."""
_ALONE, _ONE_SIDED = 0.1, 1e-3
"""Nats per token above which a mismatch counts without earlier rows to compare with: rounding to bfloat16 stays below
the first, and is never one-sided."""
_ANOTHER_TEXT = 0.2
"""Nats per token that appear at once where two models read different prompts."""
_SHARP = 4.0
"""Factor between the mismatches behind a place and before it above which the difference begins at that place."""
_TRUNCATED = 0.99
"""Share of a mismatch that is one-sided where sampling is truncated; a sampler that reads other tokens is mostly surer
of what it draws, but not always."""

_KEPT = 0.75
"""Weight of long completions, as a share of that of short ones, below which the correction punishes length; and of
short ones, as a share of that of long ones."""
_NEARLY_NOTHING = 0.1
"""Weight of all completions below which hardly any of them trains."""


def _leap(history: History, name: str, rows: int, without_earlier: float = _ALONE) -> list[float]:
    """Return the last mismatches if all are far beyond the earlier ones, or beyond `without_earlier` without any.

    Where completions are of older weights, there is no limit without earlier ones.
    """
    values = history.last(name, rows)
    if not values or min(values) <= _ROUNDING:
        return []
    before = history.before(name, rows)
    if not before and history.samples_ahead:
        return []
    limit = _LEAP * max(before) if before else without_earlier
    return values if min(values) > limit else []


def _nats(history: History, name: str, values: list[float]) -> str:
    return seen(history, name, values, " nats per token")


def _one_sided(history: History, values: list[float], share: float = 0.9) -> bool:
    bias = history.last("sampling/bias", len(values))
    return bool(bias) and all(b > share * value for b, value in zip(bias, values, strict=True))


# Where a difference begins.

_Place = tuple[str, str]
"""Metrics of the tokens before a place in completions, and behind it."""
_TURN: _Place = FIRST_TURN, LATER_TURNS


def _reaches(history: History, name: str, rows: int) -> int:
    """Return in how many of the last rows completions reach a place; 0 for a single one, and for a shorter log."""
    reached = len(history.recent(name, rows))
    return reached if reached > 1 and history.rows >= rows else 0


def _behind(history: History, place: _Place, rows: int) -> tuple[History, list[float], list[float]]:
    """Return the rows whose completions reach behind a place, and in the last of them the mismatch on both sides.

    That behind is [] where it does not leap.
    """
    reached, last = history.where(place[1]), _reaches(history, place[1], rows)
    if not last:
        return reached, [], []
    return reached, reached.last(place[0], last), _leap(reached, place[1], last)


def _sharpness(history: History, place: _Place, rows: int) -> float:
    """Return how many times the mismatch behind a place is that before it; 0 where none leaps behind it.

    Places whose tokens differ in entropy differ in rounding too. So a leap must be beyond any rounding, or begin where
    there was none.
    """
    reached, low, high = _behind(history, place, rows)
    earlier = reached.before(place[1], len(high))
    if not low or not high or (min(high) <= _ALONE and earlier and max(earlier) > _ROUNDING):
        return 0.0
    return mean(high) / max(mean(low), _ROUNDING)


def _place(history: History, rows: int) -> _Place | None:
    """Return the place at which a mismatch begins, or None.

    Later turns are deeper than first ones, so that a fault shows at both kinds of places. What begins at a turn does
    not begin at one depth, and the other way round: at the wrong place, one side has sound and faulty tokens. So the
    sharper place is the right one.
    """
    first, *deeper = [name for name in DEPTHS if _reaches(history, name, rows)] or [""]
    places = [_TURN, *((first, deepest) for deepest in deeper[-1:])]
    sharpest = max(places, key=lambda place: _sharpness(history, place, rows))
    truncated = _one_sided(history, history.last(MISMATCH, rows), _TRUNCATED)
    return sharpest if _sharpness(history, sharpest, rows) >= _SHARP and not truncated else None


def _by_depth(history: History, rows: int) -> str:
    """Return the mismatches of all depths."""
    by_depth = ((first, history.recent(name, rows)) for name, (first, _) in DEPTHS.items())
    return ", ".join(f"{median(values):.3g} from token {first + 1:,}" for first, values in by_depth if values)


def _placed(history: History, place: _Place) -> str:
    times = _sharpness(history, place, ROWS)
    above = f"{times:.3g} times" if times < 1000 else "over 1000 times"
    reached, low, high = _behind(history, place, ROWS)
    before, behind = place
    return f"{_nats(reached, behind, high)}, {above} {before} ({span(low)}); by depth {_by_depth(history, ROWS)}"


def by_turn(history: History) -> str:
    """Find a mismatch that begins with the second turn."""
    place = _place(history, ROWS)
    return _placed(history, place) if place == _TURN else ""


def by_depth(history: History) -> str:
    """Find a mismatch that begins at a depth."""
    place = _place(history, ROWS)
    return _placed(history, place) if place and place != _TURN else ""


# Everywhere.


def _everywhere(history: History, rows: int, without_earlier: float = _ALONE) -> list[float]:
    """Return the last mismatches if they leap, and begin at no place."""
    return [] if _place(history, rows) else _leap(history, MISMATCH, rows, without_earlier)


def another_prompt(history: History) -> str:
    """Find a mismatch that leaps beyond what any rounding makes."""
    values = _everywhere(history, ROWS)
    return _nats(history, MISMATCH, values) if values and min(values) >= _ANOTHER_TEXT else ""


def truncated(history: History) -> str:
    """Find a mismatch that leaps and is one-sided."""
    values = _everywhere(history, ROWS, _ONE_SIDED)
    if not values or min(values) > _ANOTHER_TEXT or not _one_sided(history, values):
        return ""
    nats = _nats(history, MISMATCH, values)
    return f"{nats}, all of it one-sided (sampling/bias): the sampler is surer of what it draws"


def _two_sided(history: History) -> list[float]:
    values = _everywhere(history, TREND)
    return values if values and min(values) <= _ANOTHER_TEXT and not _one_sided(history, values) else []


def _grows(values: list[float]) -> bool:
    return mean(values[-2:]) > 1.5 * mean(values[:2])


def stale(history: History) -> str:
    """Find a two-sided mismatch that leaps and grows."""
    values = _two_sided(history)
    if not values or not _grows(values):
        return ""
    depths = _by_depth(history, TREND)
    return f"{_nats(history, MISMATCH, values)}, growing{f'; by depth {depths}' if depths else ''}"


def precision(history: History) -> str:
    """Find a two-sided mismatch that leaps to a level."""
    values = _two_sided(history)
    if not values or _grows(values):
        return ""
    return f"{_nats(history, MISMATCH, values)}, neither growing nor one-sided"


# The correction of the sampler.


def loses(third: str, other: str) -> Evidence:
    """Evidence: a third of the completions, by length, has lost a quarter of its weight beside another, in each log.

    Lengths differ in noise too, so a smaller loss is no evidence.
    """
    names = f"sampling/kept_{third}", f"sampling/kept_{other}"

    def evidence(history: History) -> str:
        lost, usual = (history.last(name, ROWS) for name in names)
        if not (lost and usual) or any(kept >= _KEPT * full for kept, full in zip(lost, usual, strict=True)):
            return ""
        return f"{names[0]} {span(lost)} in {ROWS} logs, {names[1]} {span(usual)}"

    return evidence


def dropped(history: History) -> str:
    """The mean weight is 1 where a correction loses no gradient; noise does not make a tenth of it."""
    values = history.last("sampling/kept", ROWS)
    if not values or max(values) >= _NEARLY_NOTHING:
        return ""
    mismatch = history.last(MISMATCH, ROWS)
    beside = f", with {MISMATCH} {span(mismatch)} nats per token" if mismatch else ""
    return f"sampling/kept {span(values)} in {ROWS} logs{beside}"
