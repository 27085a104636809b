"""Convert the trajectories that a `rollout_func` returns to the lists that TRL takes."""

from collections.abc import Callable, Collection, Sequence

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from jaxtyping import Int
from torch import Tensor

from grpo_ext.objective.trajectory import COLUMN, Trajectory, batch, known


def completed(rollout_func: Callable[..., dict], ends: Collection[int], eos_token_id: int) -> Callable[..., dict]:
    """Return `rollout_func` with its trajectories converted to TRL's lists and its empty completions filled.

    The function may return `{"trajectories": [...]}`, one per prompt, in place of TRL's lists.
    """

    def rollout(prompts: list, *args: object) -> dict:
        output = rollout_func(prompts, *args)
        if "trajectories" in output:
            output = _converted(output, len(prompts), ends)
        else:
            check_logprobs(output.get("completion_ids"), output.get("logprobs"))
        if "completion_ids" in output:
            fill_empty(output["completion_ids"], output.get("logprobs"), eos_token_id)
        return output

    return rollout


def _converted(output: dict, count: int, ends: Collection[int]) -> dict:
    trajectories = output.pop("trajectories")
    if len(trajectories) != count:
        raise ValueError(
            f"rollout_func returned {len(trajectories)} trajectories for {count} prompts. Return one for each, in "
            "their order."
        )
    rows = batch(trajectories, ends, logprobs=known_everywhere(trajectories))
    lists = {"prompt_ids": rows.prompt_ids, "completion_ids": rows.completion_ids, "logprobs": rows.logprobs}
    return {**output, **lists, "env_mask": rows.tool_mask, COLUMN: trajectories}


def known_everywhere(trajectories: Sequence[Trajectory]) -> bool:
    """Return whether the samplers of all processes have reported all log-probabilities; collective."""
    mine = known(trajectories)
    found = gather_object([mine]) if PartialState().num_processes > 1 else [mine]
    return True in found and False not in found


def fill_empty(completion_ids: list[list[int]], logprobs: list | None, eos_token_id: int) -> None:
    """Make each empty completion, on which stock TRL crashes, one end-of-sequence token, in place."""
    for i, ids in enumerate(completion_ids):
        if not ids:
            completion_ids[i] = [eos_token_id]
            if logprobs is not None:
                logprobs[i] = [None]  # unknown to the sampler: TRL then applies no correction


def completions_seen(trajectories: Sequence[Trajectory], completions: list) -> list:
    """Return completions as reward functions and tables see them: `messages` if a row has some, else its text."""
    return [seen.messages or text for seen, text in zip(trajectories, completions, strict=True)]


def check_logprobs(completion_ids: Sequence[Sequence] | None, logprobs: Sequence[Sequence | None] | None) -> None:
    """Require one number, or None, per token.

    Raises:
        ValueError: the log-probabilities of a completion are not so; names the first such completion.
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
    """Return the index of each token's parent, as in `Tree`; None if it always is the token before."""
    found = torch.arange(-1, width - 1).repeat(len(trajectories), 1)
    for row, trajectory in zip(found, trajectories, strict=True):
        row[: len(trajectory.tree.parents)] = torch.tensor(trajectory.tree.parents, dtype=torch.long)
    return found if (found != torch.arange(-1, width - 1)).any() else None
