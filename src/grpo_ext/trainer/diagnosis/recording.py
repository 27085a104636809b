"""Diagnosis during training: metrics that only it needs, and a warning for each fault that the log shows.

Each metric is a reduction over tensors that exist anyway; `FIGURES` defines them.
"""

import logging
import re
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from functools import lru_cache
from operator import mul
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers import TrainingArguments as Arguments

from grpo_ext.objective.ratios import LOG_RATIO_BOUND, widest
from grpo_ext.packing.micro_batches import PARENTS, active_mask
from grpo_ext.trainer.advantages import per_completion
from grpo_ext.trainer.checkpoints.processes import local
from grpo_ext.trainer.diagnosis.positions import DEFINITIONS, MISMATCH, by_place
from grpo_ext.trainer.diagnosis.rules import Doctor

logger = logging.getLogger(__name__)

FIGURES: dict[str, str] = {
    MISMATCH: "mean of |log p(sampler) - log p(policy)| over tokens, in nats: 0 but for rounding",
    **DEFINITIONS,
    "sampling/bias": "mean of log p(sampler) - log p(policy): as large as the mismatch where sampling is truncated",
    "sampling/mismatch_kl": "mean of w - 1 - log w over tokens, w = p(policy) / p(sampler): KL(sampler, policy) a "
    "token, in nats; `sampling/bias` estimates the same with more noise",
    "sampling/chi2": "mean of (w - 1)^2 over tokens, w = p(policy) / p(sampler)",
    "sampling/ess": "mean over steps of 1 / (1 + chi2), chi2 that of the step: the share of tokens that an estimate "
    "with these weights is worth",
    "sampling/ess_completions": "(sum w)^2 / (N sum w^2) over the N completions of a step, w the product of "
    "p(policy) / p(sampler) over a completion's tokens: the share of completions that an estimate with these weights "
    "is worth. It falls with the length, `sampling/ess` does not",
    "ratio/chi2": "mean of (r - 1)^2, r the loss's ratio of the policy to the one that the generation began with",
    "ratio/ess_completions": "`sampling/ess_completions` of w = p(policy) / p(old policy), at any level of the loss",
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
SAMPLER_LOGPS = "sampler_per_token_logps"
"""Key of the sampler's log-probabilities that only a diagnosis may read: the loss must not build a mask from them."""
THIRDS = ("first", "middle", "last")
"""Blocks of layers, as `grad_norm/layers_first`."""
_LAYER = re.compile(r"\.(\d+)\.")
_TINY = 1e-12


# Tokens: the sampler and the policy.


def _logps_before(inputs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return log-probabilities from before the generation's first step: the policy's and the sampler's."""
    return inputs.get("old_per_token_logps"), inputs.get(SAMPLER_LOGPS, inputs.get("sampling_per_token_logps"))


def token_figures(
    inputs: Mapping[str, Any], log_ratio: Tensor, mask: Tensor, computed: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return values and masks of a micro-batch's tokens, for the trainer's `Figures`.

    Args:
        inputs: the micro-batch, with the policy's log-probabilities from before the generation's first step.
        log_ratio: the log-ratio of the loss, [batch, time] or [batch, 1].
        mask: active tokens [batch, time].
        computed: active tokens of rows that were computed.
    """
    figures = {"ratio/chi2": (log_ratio.detach().expm1().square(), mask)}
    policy, sampler = _logps_before(inputs)
    if policy is None or sampler is None:
        return figures
    counted = computed.bool() & ~sampler.isnan()
    difference = torch.where(counted, sampler - policy, 0.0)
    distance = difference.abs()
    places = by_place(distance, counted, inputs.get("later_turns"), inputs.get(PARENTS))
    figures |= {MISMATCH: (distance, counted), **places}
    figures["sampling/bias"] = difference, counted
    log_ratio = (-difference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    figures["sampling/mismatch_kl"] = log_ratio.expm1() - log_ratio, counted
    figures["sampling/chi2"] = log_ratio.expm1().square(), counted
    return figures


def log_weights(
    inputs: Mapping[str, Any], tensors: Mapping[str, Tensor], active: Tensor | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the log-weights of a micro-batch's completions, in the widest numbers, and which completions count.

    A weight is a product over tokens, so it is never formed itself: of long completions it leaves float64.

    Args:
        inputs: as of `token_figures`.
        tensors: of the objective: log-probabilities of the policy and the old policy, and active tokens.
        active: rows that were computed, or None for all.
    """
    computed = tensors["mask"].bool() if active is None else tensors["mask"].bool() & active[:, None]
    pairs = {"ratio/ess_completions": (tensors["per_token_logps"].detach(), tensors["old_per_token_logps"], computed)}
    policy, sampler = _logps_before(inputs)
    if policy is not None and sampler is not None:
        pairs["sampling/ess_completions"] = policy, sampler, computed & ~sampler.isnan()
    weights = {}
    for name, (above, below, counted) in pairs.items():
        wide = widest(above.device)
        log_ratio = (above.to(wide) - below.to(wide)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        weights[name] = torch.where(counted, log_ratio, 0.0).sum(dim=1), counted.any(dim=1)
    return weights


def add_ess(metrics: MutableMapping[str, list[float]]) -> None:
    """Log the effective sample size of the last chi2."""
    if chi2 := metrics.get("sampling/chi2"):
        metrics["sampling/ess"].append(1 / (1 + chi2[-1]))


# Rows, from scoring to training.


def row_record(
    rewards: Tensor, total: Tensor, completion_ids: Sequence[Sequence[int]], rank: int, group: int
) -> Tensor:
    """Return the record of this process's rows: numbers of their text and group here, length, total, rewards.

    Args:
        rewards: of all processes, [completions, functions].
        total: of all processes, [completions].
        completion_ids: sampled tokens of this one, which has as many as each other.
        rank: of this process.
        group: completions of a prompt.
    """
    count = len(completion_ids)
    first, mine = rank * count, slice(rank * count, (rank + 1) * count)
    groups = [(first + i) // group - first // group for i in range(count)]
    seen: dict[tuple[int, ...], int] = {}
    texts = [seen.setdefault((of, *ids), len(seen)) for of, ids in zip(groups, completion_ids, strict=True)]
    lists = [texts, groups, [len(ids) for ids in completion_ids]]
    columns = torch.tensor(lists, dtype=torch.float64).T
    return torch.cat([columns, total[mine, None], rewards[mine].double()], dim=1)[..., None]


def row_sums(batches: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Return sums over this process's rows before they train, which add up over processes.

    Two make a mean: sum and count. Three make a correlation: products, squares and squares.

    Args:
        batches: of one generation, with the rows' records.
        names: of the rewards.
    """
    table = torch.cat([_row_table(batch) for batch in batches])
    text, group, length, total, *rewards, advantage, active, begins = table.T.tolist()
    alike, members = Counter(text), Counter(group)
    off_length, off_total, off_advantage = (_less_means(x, group) for x in (length, total, advantage))
    off_text = _less_means(total, text)
    counted: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        "groups/distinct": ([1 / alike[t] for t in text], [1 / members[g] for g in group]),
        "completions/length_above": (length, [x > 1e-9 for x in off_total]),
        "completions/length_below": (length, [x < -1e-9 for x in off_total]),
        "completions/skipped": ([not n for n in active], [1] * len(active)),
        "completions/mask_misplaced": (
            [n != drawn or not first for n, drawn, first in zip(active, length, begins, strict=True)],
            [n > 0 for n in active],
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
    by_group: dict[float, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        if value == value:
            by_group.setdefault(group, []).append(value)
    means = {group: sum(scored) / len(scored) for group, scored in by_group.items()}
    return [value - means[group] if value == value else 0.0 for value, group in zip(values, groups, strict=True)]


def _product(x: Sequence[float], y: Sequence[float]) -> float:
    return sum(map(mul, x, y))


def _row_table(batch: dict[str, Any]) -> Tensor:
    """Return the rows' records, their advantages, the size of their mask, and whether it has the first token.

    The tokens of an environment are in the mask and among the sampled ones, but are not trained.
    """
    mask = batch["completion_mask"]
    advantages = per_completion(batch["advantages"], active_mask(batch))[:, None]
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

    Advantages by turn makes the correlation of advantages and total rewards meaningless, so it is left out.
    """
    if any(ROWS not in batch for batch in batches):
        return
    sums = row_sums(batches, names)
    if by_turn:
        sums = {name: values for name, values in sums.items() if not name.endswith(("/of_reward", "/of_advantage"))}
    flat = [x for values in sums.values() for x in values]
    if accelerator.num_processes > 1:
        here = torch.tensor(flat, dtype=torch.float64, device=accelerator.device)
        flat = accelerator.reduce(here, reduction="sum").tolist()
    total = iter(flat)
    for name, values in sums.items():
        value = _mean_or_correlation(*(next(total) for _ in values))
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


# A run, while it trains.

_Place = tuple[Tensor, int]
_FEW = 0.1
"""Share of moved weights below which the rounding of half precision is warned of."""
TENSORS, VALUES = 8, 128
"""Sampled weights: evenly spaced tensors, the first and the last among them, and values in the middle of each."""


class Watching(TrainerCallback):
    """Measures the logged steps, and reads each log like `grpo-ext diagnose`."""

    def __init__(self, metrics: MutableMapping[str, list[float]]) -> None:
        self.metrics = metrics
        self.doctor: Doctor | None = Doctor()
        self._sampled: list[_Place] = []
        self._before = torch.zeros(0)
        self._in_half: torch.dtype | None = None

    def on_train_begin(
        self, args: Arguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: object
    ) -> None:
        """Read the log history of the checkpoint, and choose the weights to sample."""
        self.doctor = Doctor()
        for row in state.log_history if state.is_world_process_zero else ():
            self.doctor.read(row)
        self._sampled = _chosen(model)
        self._before = _values(self._sampled)
        dtypes = {parameter.dtype for parameter, _ in self._sampled}
        self._in_half = next((dtype for dtype in dtypes if dtype.itemsize == 2), None)

    def on_optimizer_step(
        self, args: Arguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: object
    ) -> None:
        """Compare the weights with those after the previous step: an engine may make the step in its backward."""
        logged = is_logged(state)
        if not self._before.numel() or not (logged or is_logged(state, ahead=1)):
            return
        before, self._before = self._before, _values(self._sampled)
        if logged:
            change, was = torch.linalg.vector_norm(torch.stack([self._before - before, before]), dim=1).tolist()
            self.metrics["weights/change"].append(change / max(was, 1e-12))
            if self._in_half is not None and optimizer is not None:
                self._warn_of_rounding(self._before != before, optimizer.param_groups[0]["lr"])

    def _warn_of_rounding(self, moved: Tensor, rate: float) -> None:
        """Warn once if a step moved few of the sampled weights that have a gradient."""
        grads = [(parameter.grad, start) for parameter, start in self._sampled if parameter.grad is not None]
        active = _values(grads) != 0
        if rate == 0 or active.shape != moved.shape or not active.any():
            return
        half, self._in_half = self._in_half, None
        if (share := moved[active].float().mean().item()) < _FEW:
            logger.warning(
                f"learning_rate={rate:.1e}: a step moved {share:.1%} of the trained weights, because they are in "
                f"{str(half).removeprefix('torch.')}, which rounds smaller updates away. Set dtype: float32 (bf16: "
                "true keeps the forward in bfloat16), or train an adapter."
            )

    def on_log(self, args: Arguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Warn of faults that this log is the first to show; an error in a rule ends the warnings, not the run."""
        if not state.is_world_process_zero or not state.log_history or self.doctor is None:
            return
        try:
            for finding in self.doctor.read(state.log_history[-1]):
                logger.warning(str(finding))
        except Exception:
            self.doctor = None
            logger.warning("the diagnosis failed and is off from here on; please report it", exc_info=True)


def _chosen(model: nn.Module) -> list[_Place]:
    """Return trained parameters with a part on this process, and the place of the sampled values in that part."""
    trained = [p for p in model.parameters() if p.requires_grad and local(p).numel()]
    count = min(TENSORS, len(trained))  # with the first and the last: of adapters both factors, since one rests
    places = [round(i * (len(trained) - 1) / max(1, count - 1)) for i in range(count)]
    return [(trained[place], local(trained[place]).numel() // 2) for place in places]


def _values(sampled: list[_Place]) -> Tensor:
    parts = [local(p).reshape(-1)[start : start + VALUES] for p, start in sampled]
    return torch.cat([part.to(parts[0].device) for part in parts]).float() if parts else torch.zeros(0)
