"""Logs of runs as training writes them, sound but for what a test changes from some step on."""

from collections.abc import Callable, Mapping
from typing import Any

SOUND: dict[str, Callable[[int], float]] = {
    "rewards/accuracy/mean": lambda s: (0.40, 0.55, 0.30, 0.45)[s % 4],
    "rewards/accuracy/std": lambda s: (0.49, 0.50, 0.46, 0.50)[s % 4],
    "rewards/accuracy/errors": lambda s: 0.0,
    "rewards/accuracy/none_frac": lambda s: 0.0,
    "rewards/accuracy/of_length": lambda s: 0.4,
    "rewards/accuracy/of_advantage": lambda s: 0.9,
    "rewards/format/mean": lambda s: (0.9, 0.95)[s % 2],
    "rewards/format/std": lambda s: (0.3, 0.2)[s % 2],
    "rewards/format/errors": lambda s: 0.0,
    "rewards/format/none_frac": lambda s: 0.0,
    "rewards/format/of_length": lambda s: 0.1,
    "rewards/format/of_advantage": lambda s: 0.4,
    "rewards/same_text_differs": lambda s: 0.0,
    "reward": lambda s: (1.3, 1.5, 1.2, 1.4)[s % 4],
    "reward_std": lambda s: 0.5,
    "entropy": lambda s: (0.5, 0.6, 0.45)[s % 3],
    "advantages/zero_variance_groups": lambda s: (0.25, 0.5)[s % 2],
    "advantages/of_reward": lambda s: 0.97,
    "groups/all_right": lambda s: 0.125,
    "groups/all_wrong": lambda s: 0.25,
    "completions/clipped_ratio": lambda s: (0.0, 0.1)[s % 2],
    "completions/min_length": lambda s: 12,
    "completions/mean_length": lambda s: (30, 33, 31)[s % 3],
    "completions/max_length": lambda s: 60,
    "completions/mask_misplaced": lambda s: 0.0,
    "sampling/mismatch": lambda s: (4e-8, 6e-8)[s % 2],
    "sampling/mismatch_from_0": lambda s: 3e-8,
    "sampling/mismatch_from_128": lambda s: 5e-8,
    "sampling/mismatch_first_turn": lambda s: 3e-8,
    "sampling/mismatch_later_turns": lambda s: 5e-8,
    "sampling/bias": lambda s: 1e-9,
    "sampling/kept": lambda s: (1.01, 0.98)[s % 2],
    "sampling/kept_short": lambda s: (1.0, 0.99)[s % 2],
    "sampling/kept_long": lambda s: (0.97, 1.01)[s % 2],
    "ratio/ess_completions": lambda s: (1.0, 0.9)[s % 2],
    "clip_ratio/region_mean": lambda s: (0.3, 0.5)[s % 2],
    "completions/skipped": lambda s: (0.0, 0.25)[s % 2],
    "groups/distinct": lambda s: (0.9, 1.0)[s % 2],
    "grad_norm": lambda s: (0.2, 0.3)[s % 2],
    "learning_rate": lambda s: 1e-6,
    "weights/change": lambda s: (2e-4, 3e-4)[s % 2],
    "nonfinite/skipped_steps": lambda s: 0.0,
}

Changes = Mapping[str, Any]
"""By figure: a value, a function of the number of changed steps so far, or None for a figure that is missing."""


def history(changes: Changes | None = None, *, since: int = 11, steps: int = 20) -> list[dict[str, Any]]:
    """A log, with some figures changed from step `since` on."""
    rows = []
    for step in range(1, steps + 1):
        row: dict[str, Any] = {name: figure(step) for name, figure in SOUND.items()} | {"step": step}
        if step >= since:
            for name, value in (changes or {}).items():
                row[name] = value(step - since + 1) if callable(value) else value
        rows.append(row)
    return rows
