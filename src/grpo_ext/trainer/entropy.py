"""Entropy in the loss: bonus, adaptive coefficient, and the tokens of highest entropy."""

from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_ext.objective.aggregation import StepTotals
from grpo_ext.objective.ratios import masked

BELOW_ANY = -1e8
"""What pads entropies on processes that have fewer of them is below this; an entropy is 0 or more."""
QUANTILE_LIMIT = 2**24
"""Elements beyond which `torch.quantile` gives up."""


class HasEntropyBonus(Protocol):
    """What TRL's trainer keeps of its bonus, and checkpoints: `_entropy_window_stats` is (sum, count) of the step."""

    accelerator: Any
    args: Any
    current_gradient_accumulation_steps: Any
    entropy_coef: float
    use_adaptive_entropy: bool
    _entropy_window_stats: Tensor | None
    _last_world_entropy: float
    _metrics: Any


def entropy_bonus(
    trainer: HasEntropyBonus,
    entropies: Float[Tensor, "batch time"],
    mask: Tensor,
    entropy_mask: Tensor | None,
    totals: StepTotals,
    mode: str,
) -> Float[Tensor, ""]:
    """coefficient x mean entropy of the tokens that the policy term sees; updates an adaptive coefficient."""
    live = mask if entropy_mask is None else mask * entropy_mask
    total, count = masked(entropies, live).sum(), live.sum()
    coefficient = trainer.entropy_coef
    if trainer.use_adaptive_entropy and trainer._last_world_entropy > trainer.args.entropy_target:
        coefficient = 0.0
    if trainer.args.exact_denominators and entropy_mask is None:
        mean = total / totals.tokens.clamp(min=1) * trainer.accelerator.num_processes
    else:
        accumulation = trainer.current_gradient_accumulation_steps if mode == "train" else 1.0
        mean = total / count.clamp(min=1.0) / accumulation
    if mode == "train":
        _update_coefficient(trainer, torch.stack([total.detach(), count.to(total.dtype)]))
    return coefficient * mean


def _update_coefficient(trainer: HasEntropyBonus, local: Tensor) -> None:
    """At an optimizer step, move the coefficient towards the target entropy. Skywork-OR1, arXiv:2505.22312."""
    args = trainer.args
    if trainer.use_adaptive_entropy:
        window = trainer._entropy_window_stats
        trainer._entropy_window_stats = local if window is None else window + local
    if not trainer.accelerator.sync_gradients:
        return
    if trainer.use_adaptive_entropy:
        total, count = trainer.accelerator.reduce(trainer._entropy_window_stats, reduction="sum")
        trainer._last_world_entropy = (total / count.clamp(min=1.0)).item()
        rising = trainer._last_world_entropy <= args.entropy_target
        moved = trainer.entropy_coef + (args.entropy_coef_delta if rising else -args.entropy_coef_delta)
        low, high = args.entropy_coef_min, args.entropy_coef_max
        trainer.entropy_coef = min(moved, high) if rising else max(moved, low)
        trainer._entropy_window_stats = None
    trainer._metrics["train"]["entropy_coef"].append(trainer.entropy_coef)


def high_entropy_mask(
    accelerator: Any, entropies: Float[Tensor, "batch time"], mask: Tensor, threshold: float
) -> Bool[Tensor, "batch time"]:
    """Live tokens at or above the quantile `threshold` of all processes' live tokens."""
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
