"""Beside the loss: means over tokens for the log, the weight of the entropy bonus, the high-entropy mask."""

import math
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.objective.objective import Objective
from grpo_ext.objective.ratios import LOG_RATIO_BOUND, widest
from grpo_ext.objective.surrogates import Regions
from grpo_ext.packing.micro_batches import MicroBatch
from grpo_ext.trainer.diagnosis.recording import token_figures

Means = dict[str, tuple[Tensor, Tensor]]
"""By name, values and the mask of those that count: [batch, time], or [batch, 1], which count once for a completion;
or two scalars, a mean and its weight."""


class LossFigures(NamedTuple):
    """Figures of the loss of some rows, for the log."""

    means: Means
    regions: Regions | None
    """Clip regions; the least and the greatest share of a completion's tokens in them are figures."""
    mask: Tensor
    """Live tokens [batch, time]."""
    log_weights: Mapping[str, tuple[Tensor, Tensor]]
    """By name, log-weights [batch] whose effective sample size is a figure, and those that count."""
    entropy: Float[Tensor, "2"] | None = None
    """Sum and count of the entropies in the bonus, where there is one."""
    aux_loss: Float[Tensor, ""] | None = None
    """The router's auxiliary loss."""


class Figures:
    """Sums over micro-batches; one mean is logged over all tokens (or completions) of all of them.

    So a figure does not depend on how a step or an evaluation is split over processes and micro-batches.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start again from empty sums."""
        self.names: tuple[str, ...] = ()
        self.sums: Tensor | None = None
        self.extremes: Tensor | None = None
        self.weighted: tuple[str, ...] = ()
        self.log_sums: Tensor | None = None

    def add(self, figures: LossFigures) -> None:
        """Add a micro-batch."""
        means, regions, mask, log_weights = figures[:4]
        self.names, self.weighted = tuple(means), tuple(log_weights)
        sums = _sums_and_counts(means.values())
        self.sums = sums if self.sums is None else self.sums + sums
        if regions is not None:
            low, high = (_sequence_means(region.float(), mask) for region in regions)
            extremes = torch.stack([-_largest(-low), _largest(high)])
            kept = extremes if self.extremes is None else self.extremes
            self.extremes = torch.stack([torch.minimum(kept[0], extremes[0]), torch.maximum(kept[1], extremes[1])])
        if log_weights:
            powers = [(torch.stack([0 * w, w, 2 * w]), counted) for w, counted in log_weights.values()]
            # log N, log sum w and log sum w^2 of the weights that count, [figures, 3]
            log_sums = torch.stack([torch.where(counted, x, -torch.inf).logsumexp(dim=1) for x, counted in powers])
            self.log_sums = log_sums if self.log_sums is None else torch.logaddexp(self.log_sums, log_sums)

    def log(self, metrics: MutableMapping[str, list[float]], accelerator: Accelerator) -> None:
        """Append the means over all processes, except of figures without a count, and start again."""
        if self.sums is not None:
            totals = accelerator.reduce(self.sums, reduction="sum").tolist()
            for name, (total, count) in zip(self.names, totals, strict=True):
                if count:
                    metrics[name].append(total / count)
        if self.extremes is not None:
            low, high = accelerator.gather(self.extremes[None]).unbind(dim=1)
            for name, value in (("clip_ratio/low_min", low.min()), ("clip_ratio/high_max", high.max())):
                metrics[name].append(value.item() if value.isfinite() else float("nan"))
        if self.log_sums is not None:
            count, total, squares = accelerator.gather(self.log_sums[None]).logsumexp(dim=0).unbind(dim=1)
            sizes = (2 * total - squares - count).exp().tolist()
            for name, size, log_count in zip(self.weighted, sizes, count.tolist(), strict=True):
                if log_count > -math.inf:
                    metrics[name].append(size)
        self.clear()


def loss_figures(
    objective: Objective,
    tensors: Mapping[str, Any],
    entropies: Tensor,
    inputs: MicroBatch,
    active: Tensor | None,
    *,
    as_stock: bool,
) -> tuple[Means, Regions | None]:
    """Figures of a micro-batch (KL, entropy, clip, clamp, sampler), each with its mask, and the clip regions.

    A figure of shape [batch, 1] counts once for a completion that has an active token, with `as_stock` for every
    completion. Rows that are not `active` were not computed: they count as not clipped, have a ratio of 1 in the
    metrics of the loss itself, and do not count in the entropy and the clamped ratios.
    """
    mask = tensors["mask"]
    computed = mask if active is None else mask * active[:, None]
    clamped = (tensors["log_ratio"].detach().abs() >= LOG_RATIO_BOUND).float()
    figures = {name: (values.detach(), mask) for name, values in objective.metrics(tensors).items()}
    figures |= {"entropy": (entropies.detach(), computed), "log_ratio/clamped_frac": (clamped, computed)}
    figures |= token_figures(inputs, tensors["log_ratio"], mask, computed)
    if "kl" in tensors:
        figures["kl"] = tensors["kl"].detach(), mask
    regions = objective.clip_regions(tensors)
    if regions is not None:
        low, high = (region.float() for region in regions)
        figures |= {"clip_ratio/low_mean": (low, mask), "clip_ratio/high_mean": (high, mask)}
        figures["clip_ratio/region_mean"] = low + high, mask
    if as_stock:
        every = torch.ones_like(mask)
        for name, (x, among) in figures.items():
            if x.shape[1] == 1 and among.shape == mask.shape:  # not a slice of one token
                figures[name] = x, every
    return figures, regions


def _sums_and_counts(figures: Iterable[tuple[Tensor, Tensor]]) -> Float[Tensor, "figures 2"]:
    """Sum and count per figure; counts are cached per mask."""
    active: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}

    def counted(mask: Tensor, once: bool) -> tuple[Tensor, Tensor]:
        if (key := (id(mask), once)) not in active:
            counts = mask.bool().any(dim=1, keepdim=True) if once else mask.bool()
            active[key] = counts, counts.sum(dtype=widest(mask.device))
        return active[key]

    sums: list[Tensor] = []
    for values, mask in figures:
        if values.dim() == 0:
            sums += [values * mask, mask]
        else:  # [batch, 1] counts once for each completion that has an active token
            counts, number = counted(mask, values.shape[1] == 1)
            sums += [torch.where(counts, values, 0.0).sum(), number]
    return torch.stack([x.to(widest(x.device)) for x in sums]).view(-1, 2)


def _sequence_means(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each completion's active tokens, NaN where it has none."""
    if values.shape[1] == 1:
        return values.squeeze(1).masked_fill(~mask.bool().any(dim=1), torch.nan)
    return torch.where(mask.bool(), values, 0.0).sum(dim=-1) / mask.sum(dim=-1)


def _largest(values: Float[Tensor, " rows"]) -> Float[Tensor, ""]:
    """Maximum without NaN; minus infinity if all values are NaN."""
    return values.masked_fill(values.isnan(), -torch.inf).amax()


# Entropy.

BELOW_ANY = -1e8
"""Padding of entropies is below this; an entropy is 0 or more."""
QUANTILE_LIMIT = 2**24
"""Largest number of elements that `torch.quantile` takes."""


def moved_coefficient(coefficient: float, entropy: float, args: GRPOExtConfig) -> float:
    """Return the weight of the entropy bonus, moved by a step towards the target entropy, within its bounds."""
    if entropy <= args.entropy_target:
        return min(coefficient + args.entropy_coef_delta, args.entropy_coef_max)
    return max(coefficient - args.entropy_coef_delta, args.entropy_coef_min)


def high_entropy_mask(
    accelerator: Accelerator, entropies: Float[Tensor, "batch time"], mask: Tensor, threshold: float
) -> Bool[Tensor, "batch time"]:
    """Live tokens at or above the quantile `threshold` of all processes' active tokens."""
    local = entropies[mask.bool()].float()
    gathered = accelerator.gather(accelerator.pad_across_processes(local, dim=0, pad_index=10 * BELOW_ANY))
    gathered = gathered[gathered > BELOW_ANY]
    if gathered.numel() == 0:
        return torch.zeros_like(entropies, dtype=torch.bool)
    if gathered.numel() <= QUANTILE_LIMIT:
        bound = torch.quantile(gathered, threshold)
    else:
        bound = gathered.new_tensor(np.quantile(gathered.cpu().numpy(), threshold))
    return (entropies * mask >= bound) & mask.bool()
