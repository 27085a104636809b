"""Trajectories in a rollout: from what a `rollout_func` returns to what TRL takes, and what TRL has no place for."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from jaxtyping import Int
from torch import Tensor

from grpo_ext.objective.trajectory import COLUMN, Trajectory, batch, known


def with_trajectories(rollout_func: Callable[..., dict], ends: Collection[int]) -> Callable[..., dict]:
    """`rollout_func`, which may return `{"trajectories": [...]}`, one for each prompt, in place of TRL's lists."""

    def rollout(prompts: list, *args: Any) -> dict:
        output = rollout_func(prompts, *args)
        if "trajectories" not in output:
            check_logprobs(output.get("completion_ids"), output.get("logprobs"))
            return output
        trajectories = output.pop("trajectories")
        if len(trajectories) != len(prompts):
            raise ValueError(
                f"rollout_func returned {len(trajectories)} trajectories for {len(prompts)} prompts. Return one for "
                "each, in their order."
            )
        mine = known(trajectories)
        said = gather_object([mine]) if PartialState().num_processes > 1 else [mine]
        rows = batch(trajectories, ends, logprobs=True in said and False not in said)  # on all processes or on none
        lists = {"prompt_ids": rows.prompt_ids, "completion_ids": rows.completion_ids, "logprobs": rows.logprobs}
        return {**output, **lists, "env_mask": rows.tool_mask, COLUMN: trajectories}

    return rollout


def completions_seen(trajectories: Sequence[Trajectory], completions: list) -> list:
    """Completions as reward functions and tables see them: a row's `messages`, or its text where it has none."""
    return [seen.messages or text for seen, text in zip(trajectories, completions, strict=True)]


def check_logprobs(completion_ids: Any, logprobs: Any) -> None:
    """Refuse log-probabilities that are not one number, or None, for each token.

    Raises:
        ValueError: naming the first completion of which that is so.
    """
    for i, (ids, given) in enumerate(zip(completion_ids or (), logprobs or (), strict=False)):
        if given is None:
            continue
        nested = next((value for value in given if isinstance(value, Sequence) or getattr(value, "ndim", False)), None)
        if len(given) != len(ids) or nested is not None:
            found = f"{len(given)} values for {len(ids)} tokens" if nested is None else f"{nested!r} among them"
            raise ValueError(
                f"rollout_func: logprobs of completion {i} has {found}. Return one number (or None) for each token, "
                "or logprobs: None."
            )


def parents_of(trajectories: Sequence[Trajectory], width: int) -> Int[Tensor, "rows width"] | None:
    """Which token each token of the completions follows, as in `Tree`; None where it is always the one before."""
    found = torch.arange(-1, width - 1).repeat(len(trajectories), 1)
    for row, trajectory in zip(found, trajectories, strict=True):
        row[: len(trajectory.tree.parents)] = torch.tensor(trajectory.tree.parents, dtype=torch.long)
    return found if (found != torch.arange(-1, width - 1)).any() else None
