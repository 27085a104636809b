"""Figures of a run that a diagnosis needs and nothing else logs: what the sampler drew, and the rows as they train.

Each is a reduction over tensors that are there anyway; `FIGURES` says what they mean.
"""

import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

FIGURES: dict[str, str] = {
    "sampling/mismatch": "mean of |log p(sampler) - log p(policy)| over tokens, in nats: 0 but for rounding",
    "sampling/mismatch_first": "the same over the first third of each completion",
    "sampling/mismatch_middle": "the same over the second third",
    "sampling/mismatch_last": "the same over the last third",
    "sampling/bias": "mean of log p(sampler) - log p(policy): as large as the mismatch where sampling is truncated",
    "sampling/chi2": "mean of (w - 1)^2 over tokens, w = p(policy) / p(sampler)",
    "sampling/ess": "1 / (1 + chi2): the share of tokens that an estimate with these weights is worth",
    "ratio/chi2": "mean of (r - 1)^2, r the loss's ratio of the policy to the one that the generation began with",
    "groups/distinct": "share of a group's completions that are different texts, mean over groups",
    "completions/length_above": "mean tokens of completions with more reward than their group's mean",
    "completions/length_below": "mean tokens of completions with less",
    "completions/skipped": "share of completions that are masked out of the loss altogether",
    "completions/mask_misplaced": "share of the others whose mask does not cover exactly the tokens that were drawn",
    "advantages/of_reward": "correlation of the advantage that a row trains with and its reward, within groups",
    "rewards/same_text_differs": "share of completions whose text another of the group has, with another reward",
    "rewards/<reward>/of_length": "correlation of that reward and the length, within groups",
    "rewards/<reward>/of_advantage": "correlation of that reward and the advantage, within groups",
    "weights/change": "relative change of some 1,000 weights by an optimizer step, at the steps that are logged",
    "grad_norm/<block>": "norm of the gradient of the embeddings, of each third of the layers, and of the rest; "
    "before clipping, at the steps that are logged",
}
"""Names in the log, and what they are."""

ROWS = "recorded"
"""Key of what each row of a generation carries along: [rows, figures, 1], so that nothing takes it for tokens."""
DRAWN = "drawn_per_token_logps"
"""Key of the sampler's log-probabilities where nothing but a diagnosis reads them."""
THIRDS = ("first", "middle", "last")
_LAYER = re.compile(r"\.(\d+)\.")
_TINY = 1e-12


# Tokens: the sampler beside the policy.


def token_figures(
    inputs: Mapping[str, Any], log_ratio: Tensor, mask: Tensor, computed: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Values and masks of a micro-batch's tokens, for the trainer's `Figures`.

    Args:
        inputs: the micro-batch, with the policy's log-probabilities from before the generation's first step.
        log_ratio: as the loss has it, [batch, time] or [batch, 1].
        mask: live tokens [batch, time].
        computed: those of rows that were computed.
    """
    figures = {"ratio/chi2": ((log_ratio.detach().exp() - 1).square(), mask)}
    policy, sampler = inputs.get("old_per_token_logps"), inputs.get(DRAWN, inputs.get("sampling_per_token_logps"))
    if policy is None or sampler is None:
        return figures
    known = computed * ~sampler.isnan()
    difference = torch.where(known.bool(), sampler - policy, 0.0)
    place = mask.cumsum(dim=1) * 3
    length = mask.sum(dim=1, keepdim=True)
    distance = difference.abs()
    figures["sampling/mismatch"] = distance, known
    for i, name in enumerate(THIRDS):
        figures[f"sampling/mismatch_{name}"] = distance, known * (place > i * length) * (place <= (i + 1) * length)
    figures["sampling/bias"] = difference, known
    figures["sampling/chi2"] = (difference.clamp(-20, 20).neg().exp() - 1).square(), known
    return figures


def add_ess(metrics: MutableMapping[str, list[float]]) -> None:
    """The effective sample size that goes with the last chi2."""
    if chi2 := metrics.get("sampling/chi2"):
        metrics["sampling/ess"].append(1 / (1 + chi2[-1]))


# Rows: carried from where they are scored to where they train.


def row_record(
    rewards: Tensor, total: Tensor, lengths: Sequence[int], completion_ids: Tensor, first_row: int, group: int
) -> Tensor:
    """What the rows of this process carry along: rewards, their total, length, text and group.

    Args:
        rewards: this process's, [rows, functions].
        total: this process's, [rows].
        lengths: tokens that were drawn.
        completion_ids: padded, [rows, time].
        first_row: the place of the first row among those of all processes.
        group: completions of a prompt.
    """
    device = rewards.device
    count = torch.as_tensor(lengths, device=device)
    place = torch.arange(completion_ids.shape[1], device=device)
    factors = (place * 2654435761 + 40503) % 2147483647  # a text's number: any that tells most texts apart
    ids = torch.where(place < count[:, None], completion_ids + 1, 0)
    text = (ids * factors).sum(dim=1) % 2**52
    rows = torch.arange(len(rewards), device=device) + first_row
    columns = [*rewards.unbind(dim=1), total, count, text, rows // group]
    return torch.stack([column.double() for column in columns], dim=1)[..., None]


def row_sums(batches: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Sums over this process's rows as they are about to train, which add up over processes.

    Two of them make a mean, sum and count; three a correlation, of products, squares and squares.

    Args:
        batches: of one generation, with what `row_record` gave to their rows.
        names: of the rewards.
    """
    table = torch.cat([_row_table(batch) for batch in batches]).cpu().numpy().T
    parts, (total, length, text, group, advantage, live, begins) = table[: len(names)], table[len(names) :]
    _, of_group, members = np.unique(group, return_inverse=True, return_counts=True)

    def centred(values: np.ndarray) -> np.ndarray:
        """Less the group's mean; what was not scored is there."""
        known = ~np.isnan(values)
        sums = np.bincount(of_group, np.where(known, values, 0.0))
        means = sums / np.maximum(np.bincount(of_group, known), 1)
        return np.where(known, values - means[of_group], 0.0)

    def mean(values: np.ndarray, among: np.ndarray) -> tuple[float, float]:
        return float(values[among].sum()), float(among.sum())

    def correlation(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
        return float(x @ y), float(x @ x), float(y @ y)

    off, lengths, advantages = centred(total), centred(length), centred(advantage)
    _, same, alike = np.unique(np.stack([group, text]), axis=1, return_inverse=True, return_counts=True)
    same = same.ravel()
    differs = np.abs(total - (np.bincount(same, np.nan_to_num(total)) / alike)[same]) > 1e-6
    distinct = np.bincount(of_group, 1 / alike[same]) / members
    trained = live > 0
    sums: dict[str, tuple[float, ...]] = {
        "groups/distinct": mean(distinct, np.ones(len(members), dtype=bool)),
        "completions/length_above": mean(length, off > 1e-9),
        "completions/length_below": mean(length, off < -1e-9),
        "completions/skipped": mean(~trained, np.ones_like(trained)),
        "completions/mask_misplaced": mean((live != length) | (begins == 0), trained),
        "advantages/of_reward": correlation(off, advantages),
        "rewards/same_text_differs": mean(differs, (alike[same] > 1) & ~np.isnan(total)),
    }
    for name, values in zip(names, parts, strict=True):
        own = centred(values)
        sums[f"rewards/{name}/of_length"] = correlation(own, lengths)
        sums[f"rewards/{name}/of_advantage"] = correlation(own, advantages)
    return sums


def _row_table(batch: Mapping[str, Any]) -> Tensor:
    """What the rows carry, their advantages, their live tokens, and whether the first token is one."""
    mask, advantages = batch["completion_mask"], batch["advantages"]
    live = mask.sum(dim=1)
    if advantages.dim() == 2:
        advantages = (advantages * mask).sum(dim=1) / live.clamp(min=1)
    further = torch.stack([x.double() for x in (advantages, live, mask[:, 0])], dim=1)
    return torch.cat([batch[ROWS][..., 0], further], dim=1)


def log_rows(
    batches: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    metrics: MutableMapping[str, list[float]],
    accelerator: Any,
) -> None:
    """Append the figures of a generation's rows, over all processes."""
    if any(ROWS not in batch for batch in batches):
        return
    sums = row_sums(batches, names)
    flat = torch.tensor([x for found in sums.values() for x in found], dtype=torch.float64, device=accelerator.device)
    total = iter(accelerator.reduce(flat, reduction="sum").tolist())
    for name, found in sums.items():
        value = _mean_or_correlation(*(next(total) for _ in found))
        if value is not None:
            metrics[name].append(value)


def _mean_or_correlation(product: float, x: float, y: float | None = None) -> float | None:
    if y is None:
        return product / x if x else None
    return product / (x * y) ** 0.5 if x > _TINY and y > _TINY else None


# Steps that are logged, which alone are measured where measuring costs.


def is_logged(state: Any) -> bool:
    """Whether what the step that is being computed comes to will be logged."""
    return (state.global_step + 1) % max(1, int(state.logging_steps)) == 0


def gradient_figures(named: Sequence[tuple[str, Any]]) -> dict[str, float]:
    """Norms by block of parameters with a gradient; one wait for the device."""
    layers = [int(match[1]) if (match := _LAYER.search(name)) else None for name, _ in named]
    count = 1 + max((layer for layer in layers if layer is not None), default=0)
    norms = torch._foreach_norm([parameter.grad for _, parameter in named])
    squares = torch.stack([_whole(norm).double().square() for norm in norms]).tolist()
    blocks: dict[str, float] = {}
    for (name, _), layer, square in zip(named, layers, squares, strict=True):
        whole = "embeddings" if "embed" in name else "rest"
        block = whole if layer is None else f"layers_{THIRDS[3 * layer // count]}"
        blocks[block] = blocks.get(block, 0.0) + square
    return {f"grad_norm/{block}": square**0.5 for block, square in blocks.items()}


def _whole(norm: Any) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
