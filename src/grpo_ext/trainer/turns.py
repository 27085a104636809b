"""What is known of the turns of trajectories, as `objective.turn_credit` asks for it."""

import hashlib
import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_ext.objective.trajectory import COLUMN, Trajectory
from grpo_ext.rollout.dynamic_sampling import Row

Earned = list[list[float] | None]
"""What each reward function said of the turns of a row; None where it scored the whole."""


def earned_by_turn(functions: Sequence[Any], rows: int) -> list[Earned]:
    """What the functions said of the batch that they have just scored."""
    said = [getattr(function, "turns", None) or [None] * rows for function in functions]
    return [list(row) for row in zip(*said, strict=True)]


def turn_tensors(trajectories: Sequence[Trajectory], earned: Sequence[Earned], width: int) -> dict[str, Tensor]:
    """`turns` [rows, width], `states` [rows, turns] and `turn_rewards` [rows, functions, turns] of this process."""
    turns = torch.full((len(trajectories), width), -1)
    states, rewards = [], []
    for row, trajectory, of_functions in zip(turns, trajectories, earned, strict=True):
        tree = trajectory.tree
        row[: len(tree.turns)] = torch.tensor(tree.turns, dtype=torch.long)
        states.append(torch.tensor([_number(state) for state in tree.states]))
        none = [0.0] * len(trajectory.turns)
        rewards.append(torch.tensor([said or none for said in of_functions], dtype=torch.float64).T)
    return {
        "turns": turns,
        "states": pad_sequence(states, batch_first=True, padding_value=-1),
        "turn_rewards": pad_sequence(rewards, batch_first=True, padding_value=math.nan).mT,
    }


def tokens_of(rows: Sequence[Row], *, sees_turns: bool) -> dict[str, Tensor]:
    """`mask` [rows, time] and, of trajectories, `turn_tensors`: of completions that dynamic sampling has scored."""
    masks = [torch.tensor([1] * len(row.completion_ids) if row.tool_mask is None else row.tool_mask) for row in rows]
    tokens = {"mask": pad_sequence(masks, batch_first=True)}
    made = [row.example[COLUMN] for row in rows if COLUMN in row.example]
    if made and sees_turns:
        tokens |= turn_tensors(made, [row.earned for row in rows], tokens["mask"].shape[1])
    return tokens


PADDING = {"turns": -1, "states": -1, "turn_rewards": math.nan}
"""Where another process has more turns or tokens."""


def _number(state: Hashable) -> int:
    """Equal for equal states, on every process."""
    return int.from_bytes(hashlib.blake2b(repr(state).encode(), digest_size=7).digest())
