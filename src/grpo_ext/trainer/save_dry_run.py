"""Save before the first step what a save writes beside weights, and load an adapter back."""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel
from trl.trainer.utils import create_model_from_path

from grpo_ext.config.adapters import with_adapter
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.errors import ABSENT, ConfigError, Problem, first_line
from grpo_ext.packing.scorer import in_evaluation
from grpo_ext.rollout.random_streams import random_streams_kept
from grpo_ext.rollout.vllm.weights import is_quantised
from grpo_ext.trainer.checkpoints.processes import agreed, is_sharded
from grpo_ext.trainer.checkpoints.writing import SAVING, discard, remove_if_empty
from grpo_ext.trainer.reference import HALF, TOLERANCE, kind, made_up

LOADED_BACK = 1e9
"""Largest number of parameters of a base that is loaded a second time."""


def check_saving(model: Any, tokenizer: Any, processor: Any, args: GRPOExtConfig) -> None:
    """Rehearse a save of `model`, on the main process.

    Raises:
        ConfigError: a file could not be written, or an adapter does not load as the policy that it was saved from; on
            all processes.
    """
    if not any(is_sharded(parameter) for parameter in model.parameters()):
        agreed(partial(_rehearse, model, tokenizer, processor, args))


def _rehearse(model: Any, tokenizer: Any, processor: Any, args: GRPOExtConfig) -> None:
    folder = Path(args.output_dir or ".") / SAVING / "trial"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if problems := [*_unwritable(model, processor, folder), *_without_room(model, folder)]:
            raise ConfigError(problems)
        if isinstance(model, PeftModel) and (problem := _loaded_otherwise(model, tokenizer, folder, args)):
            raise ConfigError([problem])
    finally:
        discard(folder)
        remove_if_empty(folder.parent)


def _unwritable(model: Any, processor: Any, folder: Path) -> Iterator[Problem]:
    """Yield what cannot be written; an OSError is of the disk."""
    parts = {"processing_class": processor, "adapter": model}
    if not isinstance(model, PeftModel):
        parts = {"processing_class": processor, "model.config": model.config}
        if model.can_generate() and model.generation_config is not None:
            parts["model.generation_config"] = model.generation_config
    for name, part in parts.items():
        try:
            part.save_pretrained(str(folder))
        except OSError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {first_line(error)}"
            reason = f"it cannot be written, and the first save would end the run: {what}"
            yield Problem(name, ABSENT, reason, "Correct it in the model's folder or on the object that is given.")


def _without_room(model: Any, folder: Path) -> Iterator[Problem]:
    kept = [p for p in model.parameters() if p.requires_grad or not isinstance(model, PeftModel)]
    needed, free = sum(p.numel() * p.element_size() for p in kept), shutil.disk_usage(folder).free
    if free < needed:
        reason = f"its disk has {free / 1e9:,.2f} GB free, and the weights of one save take {needed / 1e9:,.2f}"
        yield Problem("output_dir", str(folder.parent.parent), reason, "Make room, or set another one.")


def _loaded_otherwise(model: PeftModel, tokenizer: Any, folder: Path, args: GRPOExtConfig) -> Problem | None:
    """Return a problem if the adapter in `folder`, on its base as it lies on disk, is not the policy."""
    base, config = _base_on_disk(model, args), next(iter(model.peft_config.values()))
    if base is None:
        return None
    problem = partial(Problem, "model", kind(model))
    cure = "Train another kind of adapter or initialisation, such as a plain LoRA."
    try:
        with random_streams_kept():
            torch.seed()  # an initialisation that draws at random must not meet its own numbers again
            loaded = with_adapter(base, str(folder), tokenizer)
        device = next(model.parameters()).device
        ids = made_up(tokenizer, base.config.get_text_config().vocab_size, device)
        distance = (_logps(loaded.to(device), ids) - _logps(model, ids)).abs().max().item()
    except Exception as error:
        return problem(f"PEFT cannot load what it saves ({type(error).__name__}: {first_line(error)})", cure)
    if distance <= (TOLERANCE if model.dtype.itemsize >= 4 else HALF):
        return None
    reason = (
        f"what it saves is another policy when it is loaded on {config.base_model_name_or_path}, by {distance:.2g} "
        "nats: its initialisation draws at random, or the base was changed in memory"
    )
    return problem(reason, f"{cure} Or save the changed base, and load it from there.")


def _base_on_disk(model: PeftModel, args: GRPOExtConfig) -> PreTrainedModel | None:
    """Load the base once more; None where it is large, quantized or not on disk."""
    config: Any = next(iter(model.peft_config.values()))
    name = config.base_model_name_or_path
    if not name or model.num_parameters() > LOADED_BACK or is_quantised(model):
        return None
    options = {"revision": config.revision, "dtype": model.dtype, "trust_remote_code": args.trust_remote_code}
    attention = model.config._attn_implementation
    try:
        return create_model_from_path(name, device_map=None, attn_implementation=attention, **options)
    except (OSError, ValueError):
        return None


@torch.no_grad()
def _logps(model: Any, ids: Tensor) -> Tensor:
    with in_evaluation(model):
        return model(input_ids=ids).logits[:, -ids.shape[1] :].float().log_softmax(-1)
