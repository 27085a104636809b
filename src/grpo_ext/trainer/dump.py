"""Write the batch of a step in which NaN or inf was found, as the loss saw it: one file for each process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor

from grpo_ext import __version__
from grpo_ext.packing.images import IMAGES
from grpo_ext.packing.sampling_support import KEPT
from grpo_ext.safe_reading import replacing
from grpo_ext.trainer.checkpoints.identity import plain, settings
from grpo_ext.trainer.checkpoints.manifest import sync
from grpo_ext.trainer.nan_report import ObservedBatch


def content(trainer: Any, window: Sequence[ObservedBatch]) -> dict[str, Any]:
    """Return what a batch belongs to, and this process's micro-batches of the current step, if there are any yet."""
    config = getattr(trainer.model, "config", None)
    origin = {
        "grpo_ext": __version__,
        "step": trainer.state.global_step + 1,
        "rank": trainer.accelerator.process_index,
        "processes": trainer.accelerator.num_processes,
        "settings": settings(trainer.args),
        "objective": plain(trainer.objective.to_dict()),
        "model": getattr(config, "_name_or_path", None) or None,
        "adapter": is_peft_model(trainer.model),
        "reward_names": list(trainer.reward_func_names),
        "reward_weights": trainer.reward_weights.tolist(),
    }
    if not window:
        return origin
    totals = trainer._generation.totals_of(window[0].inputs)
    return {
        **origin,
        "totals": None if totals is None else torch.stack(list(totals)).cpu(),
        "micro_batches": [on_cpu({**watched.inputs, **watched.computed}) for watched in window],
    }


def on_cpu(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of a micro-batch's tensors on the CPU, its kept sets and its images."""
    found: dict[str, Any] = {n: v.detach().cpu().clone() for n, v in batch.items() if isinstance(v, Tensor)}
    if KEPT in batch:
        found[KEPT] = [of_row.cpu() for of_row in batch[KEPT]]
    if IMAGES in batch:  # those of a prompt are one object for all its rows, on the disk too
        found[IMAGES] = batch[IMAGES]
    return found


def write(path: Path, dump: Mapping[str, Any]) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: the disk refuses.
        RuntimeError: the same, raised by torch.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        torch.save(dict(dump), aside)
        sync(aside)
