"""Convert the trajectories that a `rollout_func` returns to the lists that TRL takes."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from grpo_ext.objective.trajectory import COLUMN, Trajectory, Turn, batch, known
from grpo_ext.packing.sampling_support import decoded, encoded


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
    by_process = gather_object([mine]) if PartialState().num_processes > 1 else [mine]
    return True in by_process and False not in by_process


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
    for i, (ids, logps) in enumerate(zip(completion_ids or (), logprobs or (), strict=False)):
        if logps is None:
            continue
        nested = next((value for value in logps if isinstance(value, Sequence) or getattr(value, "ndim", False)), None)
        if len(logps) != len(ids) or nested is not None:
            fault = f"{len(logps)} values for {len(ids)} tokens" if nested is None else f"{nested!r} among them"
            raise ValueError(
                f"rollout_func: logprobs of completion {i} has {fault}. Return one number (or None) for each token, "
                "or logprobs: None."
            )


def parents_of(trajectories: Sequence[Trajectory], width: int) -> Int[Tensor, "rows width"] | None:
    """Return the index of each token's parent, as in `Tree`; None if it always is the token before."""
    parents = torch.arange(-1, width - 1).repeat(len(trajectories), 1)
    for row, trajectory in zip(parents, trajectories, strict=True):
        row[: len(trajectory.tree.parents)] = torch.tensor(trajectory.tree.parents, dtype=torch.long)
    return parents if (parents != torch.arange(-1, width - 1)).any() else None


def supports_of(trajectories: Sequence[Trajectory]) -> list[Int[Tensor, " numbers"]]:
    """Return the sampling supports of the tokens of each trajectory's tree, as in `packing.sampling_support`.

    A token that was not sampled has the whole vocabulary. Each turn that sampled one has its support.
    """
    supports = []
    for trajectory in trajectories:
        sampled = torch.tensor(trajectory.tree.turns) >= 0
        counts, of_turns, ids = torch.zeros(len(sampled), dtype=torch.int32), list[Tensor](), list[Tensor]()
        for turn in trajectory.turns:
            if turn.support is None:
                continue
            of_turn, its_ids = decoded(turn.support, len(turn.sampled))
            of_turns.append(pad(of_turn, (0, len(turn.sampled) - len(of_turn))))  # an empty completion was filled
            ids.append(its_ids)
        counts[sampled] = torch.cat([counts[:0], *of_turns])
        supports.append(encoded(counts, torch.cat([counts[:0], *ids])))
    return supports


def turns_of_row(
    prompt_ids: list[int], completion_ids: list[int], images: Sequence[object] | None, turns: Sequence[Turn]
) -> Trajectory:
    """Return a row of TRL's loop of tools as a trajectory, from the turns that all rows of its batch have sampled.

    A turn is of this row if the row repeats it, as far as the row goes: TRL cuts the last one. Of rows that sampled
    the same after the same context, with the same images, either turn will do.

    Raises:
        ValueError: the row has other tokens than those that were sampled.
    """
    ids, of_row = prompt_ids + completion_ids, dict[int, Turn]()
    for turn in turns:
        begin = len(turn.context)
        sampled = ids[begin : begin + len(turn.sampled)]
        same = sampled == turn.sampled[: len(sampled)] and ids[:begin] == turn.context
        if same and turn.images == list(images or ())[: len(turn.images)]:
            of_row[begin] = replace(turn, sampled=sampled)
    if len(prompt_ids) not in of_row:
        raise ValueError("a completion has other tokens than those sampled, and top_p, top_k or min_p left some out.")
    return Trajectory([turn for _, turn in sorted(of_row.items())])
