"""Evidence that a run learns nothing, from its first step on or since its policy is gone, by absolute bounds."""

import math
from statistics import fmean

from grpo_ext.trainer.diagnosis.evidence import CUT, MANY, ROWS, TREND, ZERO_VARIANCE, History, known_of, span

_STILL = 1e-8
"""Relative change below which a step teaches nothing; a learning rate of 1e-7, the least of papers, moves by 2e-7."""
_CERTAIN = 1e-6
"""Nats per token below which a policy has one completion for each prompt."""
_FAR = 1e-3
"""Relative change of a step that may destroy a policy; most runs stay below it, and those of tiny models may not."""
_CLIMBED, _ROOM = 0.5, 0.9
"""Deviations by which a reward has climbed; share above which a held-out one cannot climb as well."""


def no_signal(history: History) -> str:
    """No group of the whole log has had an advantage; a share of one row is noise unless the log ends there."""
    values = known_of(history.columns.get(ZERO_VARIANCE, []))
    if not values or min(values) < 1 or len(values) < (1 if history.complete else TREND):
        return ""
    beside = ((name, known_of(history.columns.get(name, []))) for name in ("reward", "groups/all_wrong", CUT))
    beside_it = ", ".join(f"{name} {span(column)}" for name, column in beside if column)
    return f"{ZERO_VARIANCE} 1 in all {len(values)} logs; {beside_it}"


def all_masked(history: History) -> str:
    """Find logs without a token to train on."""
    name = "completions/skipped"
    values = known_of(history.columns.get(name, []))[-TREND:]
    if not values or min(values) < 1 or len(values) < (1 if history.complete else TREND):
        return ""
    cut = history.recent(CUT, len(values))
    return f"{name} 1 in {len(values)} logs{f'; {CUT} {span(cut)}' if cut else ''}"


def no_weight_moves(history: History) -> str:
    """No weight has moved in the whole log, although each of the last steps had a gradient; a warm-up has its time."""
    name, rows = "weights/change", 2 if history.complete else ROWS
    changes, norms = known_of(history.columns.get(name, [])), history.last("grad_norm", rows)
    rates, zero_variance = history.last("learning_rate", rows), history.last(ZERO_VARIANCE, rows)
    if len(changes) < rows or max(changes) > _STILL or not norms or min(norms) == 0:
        return ""
    warms_up = bool(rates) and rates[-1] > rates[0] and not (history.complete and len(changes) >= TREND)
    if warms_up or (zero_variance and max(zero_variance) == 1):
        return ""
    return f"{name} {span(changes)} in all {len(changes)} logs, grad_norm {span(norms)}, learning_rate {span(rates)}"


def collapsed(history: History) -> str:
    """Find a policy that is worse than at the start and cannot learn: sure of one completion, or without a signal."""
    now, entropies = history.last("reward", ROWS), known_of(history.columns.get("entropy", [])[-ROWS:])
    named = ("reward", ZERO_VARIANCE, "weights/change")
    rewards, zero_variance, moves = (known_of(history.columns.get(name, [])) for name in named)
    if not now or max(now) >= rewards[0]:
        return ""
    start = f"reward {span(now)}, {rewards[0]:.3g} in the first log"
    if entropies and max(entropies) <= _CERTAIN:
        return f"entropy {span(entropies)} in {ROWS} logs; {start}"
    lost = next((at for at, value in enumerate(reversed(zero_variance)) if value < 1), 0)
    texts = history.last("groups/distinct", MANY)  # without a gradient no entropy is logged
    if lost >= MANY and texts and max(texts) == min(texts) <= 0.5:
        return f"groups/distinct {span(texts)} and {ZERO_VARIANCE} 1 in the last {lost} logs; {start}"
    far = max(moves, default=0.0) > _FAR and lost >= max(ROWS if history.complete else TREND, history.rows / 2)
    return f"weights/change up to {max(moves):.3g}, {ZERO_VARIANCE} 1 in the last {lost} logs; {start}" if far else ""


def not_held_out(history: History) -> str:
    """The reward has climbed, and no held-out share by a third as much, each in its deviation at the start.

    The upper end of a share's last interval counts. One that began near 1 has no room to tell.
    """
    rewards, spreads = (known_of(history.columns.get(name, [])) for name in ("reward", "reward_std"))
    count = max(TREND, len(rewards) // 10)
    if len(rewards) < 2 * count or not any(spreads[:count]):
        return ""
    before, after = fmean(rewards[:count]), fmean(rewards[-count:])
    climbed = (after - before) / fmean(spreads[:count])
    ends = [(name, means, history.evaluations.get(f"{name}_high", [])) for name, means in history.evaluations.items()]
    shares = [(name, means[0], means[-1], high[-1]) for name, means, high in ends if high and len(means) > 1]
    shares = [share for share in shares if share[1] <= _ROOM]
    # deviations of single completions, not below that of a share of one in a hundred
    deviations = [math.sqrt(max(first * (1 - first), 0.0099)) for _, first, _, _ in shares]
    rises = [high - first for _, first, _, high in shares]
    if climbed < _CLIMBED or any(rise > climbed / 3 * d for rise, d in zip(rises, deviations, strict=True)):
        return ""
    texts = [f"{name} {first:.3g} to {last:.3g} (at most {high:.3g})" for name, first, last, high in shares]
    return f"reward {before:.3g} to {after:.3g}; {', '.join(texts)}" if texts else ""


def agent_fails(history: History) -> str:
    """Find an agent whose episodes have all ended with another status than 0 and the same pay."""
    names = [name for name in history.columns if name.startswith("environments/") and name.endswith("/nonzero_exit")]
    for name in names if no_signal(history) else ():
        if min(values := known_of(history.columns[name]), default=0) == 1:
            return f"{name} 1 in all {len(values)} logs"
    return ""
