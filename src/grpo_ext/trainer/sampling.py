"""The correction of a sampler that is not the policy, for the rows of a generation, and its metrics."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor

from grpo_ext.objective.ratios import widest
from grpo_ext.objective.sampler_correction import Corrected, SamplerRule, corrected
from grpo_ext.packing.micro_batches import active_mask

Metrics = MutableMapping[str, list[float]]
LENGTHS = ("short", "medium", "long")


def correct_sampler(
    rules: Sequence[SamplerRule],
    policy_logps: Float[Tensor, "batch time"],
    output: Mapping[str, Any],
    metrics: Metrics,
    accelerator: Accelerator,
) -> dict[str, Tensor]:
    """Return the columns of a generation that the rules change: weights, and where they reject, the trained tokens.

    Rejected tokens leave `tool_mask`, not `completion_mask`: a token that does not train is still read by those behind
    it.

    Args:
        rules: `sampler_rules` of the config.
        policy_logps: of the policy that has just been pushed to the sampler.
        output: columns of this process's rows.
        metrics: of the mode.
        accelerator: the generation is that of all processes.
    """
    mask, sampler_logps = active_mask(output), output["sampling_per_token_logps"]

    def gather(values: Tensor) -> Tensor:
        padded = accelerator.pad_across_processes(values, dim=0, pad_index=-1)
        gathered = accelerator.gather(padded)
        return gathered[gathered >= 0]

    correction = corrected(rules, policy_logps, sampler_logps, mask, gather)
    for name, value in weight_figures(correction, mask, accelerator).items():
        metrics[name].append(value)
    changed = {"importance_sampling_ratio": correction.weights}
    if any(rule.action == "reject" for rule in rules):
        changed["tool_mask"] = output.get("tool_mask", torch.ones_like(mask)) * correction.counted
    return changed


def weight_figures(correction: Corrected, mask: Tensor, accelerator: Accelerator) -> dict[str, float]:
    """Return the mean weight of the active tokens of all processes, also by thirds of completions, and the extremes.

    The mean weight is the share of the gradient that is left: what is dropped weighs 0, and an unbiased weight has a
    mean of 1.
    """
    active = mask.bool()
    wide = widest(mask.device)
    weights = torch.where(active, correction.weights, 0.0).to(wide)
    lowest = torch.where(active, correction.weights, torch.inf).amin(dim=1).to(wide)
    rows = torch.stack([active.sum(dim=1).to(wide), weights.sum(dim=1), lowest, weights.amax(dim=1)], dim=1)
    rows = accelerator.gather(rows)
    rows = rows[rows[:, 0] > 0]
    if not len(rows):
        return {}
    rows = rows[rows[:, 0].argsort(stable=True)]
    figures = {"sampling/kept": rows}
    if len(rows) >= len(LENGTHS):
        thirds = rows.tensor_split([len(rows) // 3, len(rows) * 2 // 3])
        figures |= {f"sampling/kept_{name}": part for name, part in zip(LENGTHS, thirds, strict=True)}
    return {
        **{name: (part[:, 1].sum() / part[:, 0].sum()).item() for name, part in figures.items()},
        "sampling/importance_sampling_ratio/min": rows[:, 2].min().item(),
        "sampling/importance_sampling_ratio/max": rows[:, 3].max().item(),
    }
