"""Micro-batches: their tensors, which rows of a generation share one, and which rows need no forward."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypedDict, cast

import numpy as np
import torch
from torch import Tensor

from grpo_ext.packing.images import COUNT, IMAGES, RowImages
from grpo_ext.packing.layout import groups_of
from grpo_ext.packing.routes import ROUTES
from grpo_ext.packing.sampling_support import SUPPORTS


class MicroBatch(TypedDict, total=False):
    """Rows of a generation as the loss sees them, padded to [rows, time]."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    tool_mask: Tensor
    """1 for tokens that the policy wrote, 0 for those of tools and environments."""
    later_turns: Tensor
    """1 for tokens that the policy wrote behind its first turn; of rows with a `tool_mask`, before any rejection."""
    parents: Tensor
    """Index of the token before each token of the completion, for trajectories with rewritten contexts."""
    sampling_supports: list[Tensor]
    """The sets that a truncated sampler drew each row's tokens from, as in `sampling_support`."""
    routes: list[Tensor]
    """The experts that the sampler sent each row's tokens to, as in `routes`."""
    advantages: Tensor
    """[rows] or [rows, time]."""
    marks: Tensor
    """Tokens that the surrogate treats apart."""
    num_items_in_batch: Tensor
    """Live tokens of the generation, over all processes."""
    old_per_token_logps: Tensor
    ref_per_token_logps: Tensor
    sampling_per_token_logps: Tensor
    """The sampler's log-probabilities, where the loss corrects for them."""
    sampler_per_token_logps: Tensor
    """The sampler's log-probabilities, for diagnostics only: the loss must not build a mask from these."""
    importance_sampling_ratio: Tensor
    recorded: Tensor
    """Figures of each row for a diagnosis, [rows, figures, 1]."""
    images: list[RowImages]
    """The processor's tensors of each row's prompt beside its tokens, as in `images`."""


PARENTS: Final = "parents"
TOKENS: Final = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def active_mask(inputs: Mapping[str, Any]) -> Tensor:
    """Completion tokens [rows, time] that the policy wrote and that are trained on."""
    return inputs["completion_mask"] * inputs.get("tool_mask", 1)


# Groups stay together, and micro-batches are equally long.


def regroup(
    micro_batches: Sequence[MicroBatch], accumulation: int, skip_zero_advantages: bool = False
) -> list[MicroBatch]:
    """Arrange the same rows in as many micro-batches of the same size, with groups together and little padding.

    Each optimizer step (`accumulation` micro-batches) keeps its rows; within it, rows of one prompt stay together and
    micro-batches get about the same number of tokens to compute. With `skip_zero_advantages`, rows without an
    advantage count as free.
    """
    batches = []
    for begin in range(0, len(micro_batches), accumulation):
        step = micro_batches[begin : begin + accumulation]
        joined = _joined(step)
        prompt_mask = joined["prompt_mask"].cpu().numpy()
        groups = groups_of(joined["prompt_ids"].cpu().numpy(), prompt_mask)
        cost = joined["completion_mask"].sum(dim=1).cpu().numpy()
        if skip_zero_advantages:
            cost = np.where(zero_advantages(joined["advantages"]).cpu().numpy(), 0, cost)
        for rows in _balanced(groups, len(step[0]["prompt_ids"]), len(step), cost, prompt_mask.sum(axis=1)):
            batches.append(trim(rows_of(joined, torch.tensor(rows))))
    return batches


def _balanced(groups: list[list[int]], size: int, count: int, cost: np.ndarray, prefix: np.ndarray) -> list[list[int]]:
    """Deal rows into `count` sets of `size`: pieces of groups, the costliest first, each to the cheapest set."""
    sets: list[list[int]] = [[] for _ in range(count)]
    load = [0.0] * count
    pieces = [piece for group in groups for piece in _pieces_of(group, size, cost)]
    pieces.sort(key=lambda piece: (-len(piece), -_tokens(piece, cost, prefix)))
    while pieces:
        piece = pieces.pop(0)
        open_sets = [i for i, s in enumerate(sets) if len(s) < size]
        roomy = [i for i in open_sets if len(sets[i]) + len(piece) <= size]
        if not roomy:  # no set has room for the whole piece: break it
            room = max(size - len(sets[i]) for i in open_sets)
            pieces[:0] = [piece[:room], piece[room:]]
            continue
        chosen = min(roomy, key=lambda i: load[i])
        sets[chosen] += piece
        load[chosen] += _tokens(piece, cost, prefix)
    return sets


def _tokens(piece: list[int], cost: np.ndarray, prefix: np.ndarray) -> float:
    """Tokens of a piece of a group with its prompt once; 0 if no row of it is computed."""
    total = float(cost[piece].sum())
    return total + float(prefix[piece[0]]) if total else 0.0


def _pieces_of(group: list[int], size: int, cost: np.ndarray) -> list[list[int]]:
    """Split a group that is larger than a micro-batch into pieces of about equal cost."""
    parts: list[list[int]] = [[] for _ in range(-(-len(group) // size))]
    for row in sorted(group, key=lambda row: -cost[row]):
        min((p for p in parts if len(p) < size), key=lambda p: (sum(cost[p]), len(p))).append(row)
    return [part for part in parts if part]


def _joined(micro_batches: Sequence[MicroBatch]) -> MicroBatch:
    """Return all rows as one batch; the micro-batches are of one width."""

    def concatenated(name: str, first: Any) -> Any:
        values: list[Any] = [batch[name] for batch in micro_batches]  # type: ignore[literal-required]
        if isinstance(first, list):
            return [x for value in values for x in value]
        return torch.cat(values) if isinstance(first, Tensor) and first.ndim > 0 else first

    return _changed(micro_batches[0], concatenated)


def _changed(batch: MicroBatch, change: Callable[[str, Any], Any]) -> MicroBatch:
    return cast(MicroBatch, {name: change(name, value) for name, value in batch.items()})


def rows_of(batch: MicroBatch, rows: Tensor) -> MicroBatch:
    """Return the rows of these numbers."""

    def taken(_: str, value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim > 0:
            return value[rows.to(value.device)]
        return [value[i] for i in rows.tolist()] if isinstance(value, list) else value

    return _changed(batch, taken)


def active_columns(prompt_mask: Tensor, completion_mask: Tensor) -> tuple[int, int]:
    """Return the first column that some prompt has, and the number of columns of completions, at least 1."""
    asked, answered = prompt_mask.any(dim=0), completion_mask.any(dim=0)
    return int(asked.int().argmax()), int(answered.nonzero().max()) + 1 if answered.any() else 1


def trim(batch: MicroBatch, *, prompts: bool = True) -> MicroBatch:
    """Remove columns that are padding in every row: on the left of prompts, on the right of completions.

    With absolute positions a prompt must keep its padding (`prompts=False`).
    """
    first, last = active_columns(batch["prompt_mask"], batch["completion_mask"])
    first, width = first if prompts else 0, batch["completion_mask"].shape[1]

    def trimmed(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim != 2:
            return value
        if name.startswith("prompt_"):
            return value[:, first:]
        return value[:, :last] if value.shape[1] == width else value

    return _changed(batch, trimmed)


# Rows without a gradient.


def zero_advantages(advantages: Tensor) -> Tensor:
    """Rows [batch] whose advantages, [batch] or [batch, time], are all zero."""
    return ~advantages.reshape(len(advantages), -1).any(dim=1)


def of_active_rows(
    forward: Callable[[MicroBatch], tuple[Tensor, Tensor | None, Tensor | None]], inputs: MicroBatch, active: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [batch, time] of the rows that are `active`, through a forward of only those.

    The others have their old log-probabilities, a ratio of 1, and no gradient. Where no row is active the forward runs
    over a single token, for the processes that wait for this one's collectives, and the result depends on it by zero;
    where rows have images it runs over the whole of one.
    """
    rows, time = inputs["completion_ids"].shape
    if active.any():
        at = active.nonzero()[:, 0]
        needed = {
            name: value for name, value in inputs.items() if name in (*TOKENS, PARENTS, SUPPORTS, ROUTES, IMAGES)
        }
        batch = trim(rows_of(cast(MicroBatch, needed), at), prompts=False)
    elif IMAGES in inputs:
        sees = next((i for i, row in enumerate(inputs[IMAGES]) if int(row[COUNT])), 0)
        at = active.new_tensor([sees], dtype=torch.long)
        batch = rows_of(cast(MicroBatch, {name: inputs[name] for name in (*TOKENS, IMAGES)}), at)
    else:
        at = active.new_zeros(1, dtype=torch.long)
        prompt, token = inputs["prompt_ids"][:1, -1:], inputs["completion_ids"][:1, :1]
        masks = torch.ones_like(inputs["prompt_mask"][:1, -1:]), torch.ones_like(inputs["completion_mask"][:1, :1])
        batch = MicroBatch(prompt_ids=prompt, prompt_mask=masks[0], completion_ids=token, completion_mask=masks[1])
    logps, entropies, _ = forward(batch)
    assert entropies is not None
    old = inputs.get("old_per_token_logps")
    ground = logps.new_zeros(rows, time) if old is None else old.to(logps.dtype)
    padding = (0, time - logps.shape[1])
    if not active.any():
        return ground + torch.nn.functional.pad(logps * 0.0, padding), entropies.new_zeros(rows, time)
    logps, entropies = (torch.nn.functional.pad(x, padding) for x in (logps, entropies))
    return ground.index_copy(0, at, logps), entropies.new_zeros(rows, time).index_copy(0, at, entropies)
