"""Metrics that only a diagnosis needs: of the sampler's tokens, of the rows as they train, of gradients.

Each is a reduction over tensors that exist anyway; `FIGURES` defines them.
"""

import re
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from functools import lru_cache
from operator import mul
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerState

from grpo_ext.objective.ratios import LOG_RATIO_BOUND
from grpo_ext.packing.micro_batches import live_mask
from grpo_ext.trainer.credit import per_completion

FIGURES: dict[str, str] = {
    "sampling/mismatch": "mean of |log p(sampler) - log p(policy)| over tokens, in nats: 0 but for rounding",
    "sampling/mismatch_first": "the same over the first third of each completion",
    "sampling/mismatch_middle": "the same over the second third",
    "sampling/mismatch_last": "the same over the last third",
    "sampling/bias": "mean of log p(sampler) - log p(policy): as large as the mismatch where sampling is truncated",
    "sampling/mismatch_kl": "mean of w - 1 - log w over tokens, w = p(policy) / p(sampler): KL(sampler, policy) a "
    "token, in nats; `sampling/bias` estimates the same with more noise",
    "sampling/chi2": "mean of (w - 1)^2 over tokens, w = p(policy) / p(sampler)",
    "sampling/ess": "mean over steps of 1 / (1 + chi2), chi2 that of the step: the share of tokens that an estimate "
    "with these weights is worth",
    "ratio/chi2": "mean of (r - 1)^2, r the loss's ratio of the policy to the one that the generation began with",
    "groups/distinct": "share of a group's completions that are different texts, mean over groups",
    "completions/length_above": "mean tokens of completions with more reward than their group's mean",
    "completions/length_below": "mean tokens of completions with less",
    "completions/skipped": "share of completions that are masked out of the loss altogether",
    "completions/mask_misplaced": "share of the others whose mask does not cover exactly the tokens that were drawn",
    "advantages/of_reward": "correlation of the advantage that a row trains with (mean over the tokens that are "
    "trained) and its reward, within groups; not of credit by turn",
    "rewards/same_text_differs": "share of completions whose text another of the group has, with another reward",
    "rewards/<reward>/of_length": "correlation of that reward and the length, within groups",
    "rewards/<reward>/of_advantage": "correlation of that reward and the advantage, within groups; not of credit by "
    "turn",
    "weights/change": "relative change of some 1,000 weights by an optimizer step, at the steps that are logged",
    "grad_norm/<block>": "norm of the gradient of the embeddings, of each third of the layers, and of the rest; "
    "before clipping, at the steps that are logged",
}
"""Names in the log, with their definitions."""

ROWS = "recorded"
"""Key of the record of each row: [rows, figures, 1], a shape that is not mistaken for tokens."""
DRAWN = "drawn_per_token_logps"
"""Key of the sampler's log-probabilities that only a diagnosis may read: the loss must not build a mask from them."""
THIRDS = ("first", "middle", "last")
_LAYER = re.compile(r"\.(\d+)\.")
_TINY = 1e-12


# Tokens: the sampler and the policy.


def token_figures(
    inputs: Mapping[str, Any], log_ratio: Tensor, mask: Tensor, computed: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return values and masks of a micro-batch's tokens, for the trainer's `Figures`.

    Args:
        inputs: the micro-batch, with the policy's log-probabilities from before the generation's first step.
        log_ratio: the log-ratio of the loss, [batch, time] or [batch, 1].
        mask: live tokens [batch, time].
        computed: live tokens of rows that were computed.
    """
    figures = {"ratio/chi2": (log_ratio.detach().expm1().square(), mask)}
    policy, sampler = inputs.get("old_per_token_logps"), inputs.get(DRAWN, inputs.get("sampling_per_token_logps"))
    if policy is None or sampler is None:
        return figures
    known = computed.bool() & ~sampler.isnan()
    difference = torch.where(known, sampler - policy, 0.0)
    distance = difference.abs()
    figures["sampling/mismatch"] = distance, known
    place = mask.cumsum(dim=1)
    third = torch.where(known, (3 * place - 1) // place[:, -1:].clamp(min=1), -1)
    for i, name in enumerate(THIRDS):
        figures[f"sampling/mismatch_{name}"] = distance, third == i
    figures["sampling/bias"] = difference, known
    log_ratio = (-difference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    figures["sampling/mismatch_kl"] = log_ratio.expm1() - log_ratio, known
    figures["sampling/chi2"] = log_ratio.expm1().square(), known
    return figures


def add_ess(metrics: MutableMapping[str, list[float]]) -> None:
    """Log the effective sample size of the last chi2."""
    if chi2 := metrics.get("sampling/chi2"):
        metrics["sampling/ess"].append(1 / (1 + chi2[-1]))


# Rows, from scoring to training.


def row_record(
    rewards: Tensor, total: Tensor, completion_ids: Sequence[Sequence[int]], first_row: int, group: int
) -> Tensor:
    """Return the record of this process's rows: numbers of their text and group here, length, total, rewards.

    Args:
        rewards: this process's, [rows, functions].
        total: this process's, [rows].
        completion_ids: sampled tokens.
        first_row: the number of the first row, over all processes.
        group: completions of a prompt.
    """
    groups = [(first_row + i) // group - first_row // group for i in range(len(completion_ids))]
    seen: dict[tuple[int, ...], int] = {}
    texts = [seen.setdefault((of, *ids), len(seen)) for of, ids in zip(groups, completion_ids, strict=True)]
    known = [texts, groups, [len(ids) for ids in completion_ids]]
    columns = torch.tensor(known, dtype=torch.float64, device=rewards.device).T
    return torch.cat([columns, total[:, None], rewards], dim=1)[..., None]


def row_sums(batches: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Return sums over this process's rows before they train, which add up over processes.

    Two make a mean: sum and count. Three make a correlation: products, squares and squares.

    Args:
        batches: of one generation, with the rows' records.
        names: of the rewards.
    """
    table = torch.cat([_row_table(batch) for batch in batches])
    text, group, length, total, *rewards, advantage, live, begins = table.T.tolist()
    alike, members = Counter(text), Counter(group)
    off_length, off_total, off_advantage = (_less_means(x, group) for x in (length, total, advantage))
    off_text = _less_means(total, text)
    counted: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        "groups/distinct": ([1 / alike[t] for t in text], [1 / members[g] for g in group]),
        "completions/length_above": (length, [x > 1e-9 for x in off_total]),
        "completions/length_below": (length, [x < -1e-9 for x in off_total]),
        "completions/skipped": ([not n for n in live], [1] * len(live)),
        "completions/mask_misplaced": (
            [n != drawn or not first for n, drawn, first in zip(live, length, begins, strict=True)],
            [n > 0 for n in live],
        ),
        "rewards/same_text_differs": (
            [abs(x) > 1e-6 for x in off_text],
            [alike[t] > 1 and x == x for t, x in zip(text, total, strict=True)],
        ),
    }
    sums: dict[str, tuple[float, ...]] = {n: (_product(x, among), sum(among)) for n, (x, among) in counted.items()}
    pairs = {"advantages/of_reward": (off_total, off_advantage)}
    for name, values in zip(names, rewards, strict=True):
        off = _less_means(values, group)
        pairs |= {f"rewards/{name}/of_length": (off, off_length), f"rewards/{name}/of_advantage": (off, off_advantage)}
    return sums | {name: (_product(x, y), _product(x, x), _product(y, y)) for name, (x, y) in pairs.items()}


def _less_means(values: Sequence[float], groups: Sequence[float]) -> list[float]:
    """Subtract from values the mean of their group; 0 for unscored rows."""
    known: dict[float, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        if value == value:
            known.setdefault(group, []).append(value)
    means = {group: sum(scored) / len(scored) for group, scored in known.items()}
    return [value - means[group] if value == value else 0.0 for value, group in zip(values, groups, strict=True)]


def _product(x: Sequence[float], y: Sequence[float]) -> float:
    return sum(map(mul, x, y))


def _row_table(batch: dict[str, Any]) -> Tensor:
    """Return the rows' records, their advantages, the size of their mask, and whether it has the first token.

    The tokens of an environment are in the mask and among the sampled ones, but are not trained.
    """
    mask = batch["completion_mask"]
    advantages = per_completion(batch["advantages"], live_mask(batch))[:, None]
    return torch.cat([batch[ROWS][..., 0], advantages, mask.sum(dim=1, keepdim=True), mask[:, :1]], dim=1)


def log_rows(
    batches: Sequence[dict[str, Any]],
    names: Sequence[str],
    metrics: MutableMapping[str, list[float]],
    accelerator: Accelerator,
    *,
    by_turn: bool = False,
) -> None:
    """Append the metrics of a generation's rows, over all processes.

    Credit by turn makes the correlation of advantages and total rewards meaningless, so it is left out.
    """
    if any(ROWS not in batch for batch in batches):
        return
    sums = row_sums(batches, names)
    if by_turn:
        sums = {name: found for name, found in sums.items() if not name.endswith(("/of_reward", "/of_advantage"))}
    flat = [x for found in sums.values() for x in found]
    if accelerator.num_processes > 1:
        here = torch.tensor(flat, dtype=torch.float64, device=accelerator.device)
        flat = accelerator.reduce(here, reduction="sum").tolist()
    total = iter(flat)
    for name, found in sums.items():
        value = _mean_or_correlation(*(next(total) for _ in found))
        if value is not None:
            metrics[name].append(value)


def _mean_or_correlation(product: float, x: float, y: float | None = None) -> float | None:
    if y is None:
        return product / x if x else None
    return product / (x * y) ** 0.5 if x > _TINY and y > _TINY else None


# Logged steps: metrics that cost time are computed only there.


def is_logged(state: TrainerState, ahead: int = 0) -> bool:
    """Return whether the current step will be logged, or a step `ahead` of it."""
    return (state.global_step + 1 + ahead) % max(1, int(state.logging_steps)) == 0


def gradient_figures(named: Sequence[tuple[str, Any]]) -> dict[str, float]:
    """Return the norm of the gradients by block; one device sync."""
    norms = torch._foreach_norm([parameter.grad for _, parameter in named])
    squares: dict[str, float] = {}
    whole = torch.stack([(n.full_tensor() if isinstance(n, DTensor) else n).to(norms[0].device) for n in norms])
    for block, norm in zip(_blocks(tuple(name for name, _ in named)), whole.tolist(), strict=True):
        squares[block] = squares.get(block, 0.0) + norm * norm
    return {f"grad_norm/{block}": square**0.5 for block, square in squares.items()}


@lru_cache(maxsize=1)
def _blocks(names: tuple[str, ...]) -> list[str]:
    """Return the block of each parameter."""
    layers = [int(match[1]) if (match := _LAYER.search(name)) else None for name in names]
    count = 1 + max((layer for layer in layers if layer is not None), default=0)
    return [
        f"layers_{THIRDS[3 * layer // count]}" if layer is not None else "embeddings" if "embed" in name else "rest"
        for name, layer in zip(names, layers, strict=True)
    ]
