"""Rewards by turn: a function may score a trajectory with a list, one number for each of its turns."""

from typing import Any

from grpo_ext.objective.trajectory import COLUMN
from grpo_ext.rewards.columns import Columns


def turn_counts(columns: Columns) -> list[int | None]:
    """Return the number of turns of each row's trajectory; None where completions are not trajectories."""
    trajectories = columns.get(COLUMN)
    return [None] * len(columns["completions"]) if trajectories is None else [len(t.turns) for t in trajectories]


def split(value: Any, turns: int | None) -> tuple[Any, list[float] | None]:
    """Return the sum of a list, and the list with 0 in place of None; any other value as it is, and None.

    A list is also returned as it is for a row without turns.

    Raises:
        ValueError: a list of another length, or with other values than numbers and None.
    """
    if turns is None or not isinstance(value, list | tuple):
        return value, None
    if len(value) != turns:
        raise ValueError(
            f"it returned {len(value)} rewards for a trajectory of {turns} turns. Return one number for each turn, in "
            "a list, or one for the whole trajectory."
        )
    try:
        rewards = [0.0 if reward is None else float(reward) for reward in value]
    except (TypeError, ValueError):
        raise ValueError(f"it returned {value!r:.200}. Return a number for each turn, or None.") from None
    return (None if all(reward is None for reward in value) else sum(rewards)), rewards
