"""Figures of a loss, under TRL's names where TRL has one, for every ratio level."""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import nanmax, nanmin

from grpo_ext.objective.ratios import LOG_RATIO_BOUND


def log_loss_metrics(
    trainer: Any,
    tensors: dict[str, Any],
    entropies: Tensor,
    metrics: MutableMapping[str, list[float]],
    live: Tensor | None = None,
) -> None:
    """Append KL, entropy, clip and clamp figures of a micro-batch, averaged over all processes' live tokens.

    `tensors` are the trainer's; a figure of shape [batch, 1] counts once per completion. Rows that are not `live` were
    not computed: they are never clipped (as ever where the advantage is 0), have a ratio of 1 in the metrics of the
    loss itself, and have no part in the entropy and the clamped ratios.
    """
    mask, accelerator, objective = tensors["mask"], trainer.accelerator, trainer.objective
    means = {name: values.detach() for name, values in objective.metrics(tensors).items()}
    means["entropy"] = entropies.detach()
    if "kl" in tensors:
        means["kl"] = tensors["kl"].detach()
    means["log_ratio/clamped_frac"] = (tensors["log_ratio"].detach().abs() >= LOG_RATIO_BOUND).float()
    regions = objective.clip_regions(tensors)
    if regions is not None:
        low, high = (region.float() for region in regions)
        means |= {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
        metrics["clip_ratio/low_min"].append(nanmin(accelerator.gather(_sequence_means(low, mask))).item())
        metrics["clip_ratio/high_max"].append(nanmax(accelerator.gather(_sequence_means(high, mask))).item())
    computed = dict.fromkeys(("entropy", "log_ratio/clamped_frac"), mask if live is None else mask * live[:, None])
    sums = torch.stack([_sum_and_count(x, computed.get(name, mask)) for name, x in means.items()])
    totals = accelerator.reduce(sums, reduction="sum")
    for name, (total, count) in zip(means, totals.tolist(), strict=True):
        metrics[name].append(total / max(count, 1.0))


def _sum_and_count(values: Tensor, mask: Tensor) -> Tensor:
    if values.shape[1] == 1:
        return torch.stack([values.sum(), values.new_tensor(float(len(values)))]).double()
    live = mask.bool()
    return torch.stack([torch.where(live, values, 0.0).sum(), live.sum().to(values.dtype)]).double()


def _sequence_means(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each completion's live tokens, NaN where it has none."""
    if values.shape[1] == 1:
        return values.squeeze(1)
    return torch.where(mask.bool(), values, 0.0).sum(dim=-1) / mask.sum(dim=-1)
