"""Rewards by turn: a function may score a trajectory with a list, a number for each of its turns."""

from collections.abc import Mapping
from typing import Any

from grpo_ext.objective.trajectory import COLUMN


def turn_counts(columns: Mapping[str, Any]) -> list[int | None]:
    """How many turns the trajectory of each row has; None where completions are no trajectories."""
    trajectories = columns.get(COLUMN)
    return [None] * len(columns["completions"]) if trajectories is None else [len(t.turns) for t in trajectories]


def split(value: Any, turns: int | None) -> tuple[Any, list[float] | None]:
    """The sum of a list, and the list with 0 for a turn of None; any other value as it is, of a row without turns too.

    Raises:
        ValueError: a list of another length, or of what are no numbers.
    """
    if turns is None or not isinstance(value, list | tuple):
        return value, None
    if len(value) != turns:
        raise ValueError(
            f"it returned {len(value)} rewards for a trajectory of {turns} turns. Return one number for each turn, in "
            "a list, or one for the whole trajectory."
        )
    try:
        earned = [0.0 if reward is None else float(reward) for reward in value]
    except (TypeError, ValueError):
        raise ValueError(f"it returned {value!r:.200}. Return a number for each turn, or None.") from None
    return (None if all(reward is None for reward in value) else sum(earned)), earned
