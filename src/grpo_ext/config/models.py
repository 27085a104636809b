"""Rules that need the model itself: gradient checkpointing, and special tokens that its tokenizer lacks."""

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.errors import ABSENT, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def model_problems(
    config: GRPOExtArguments, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[Problem]:
    """Yield what transformers or PEFT would fail of with an error of their own in the first step."""
    if config.gradient_checkpointing:
        yield from _checkpointing(model)
    for name in ("bos_token", "pad_token"):
        if getattr(tokenizer, name, None) is None and _requires(model.config, f"{name}_id"):
            reason = f"the tokenizer has no {name}, and {type(model.config).__name__} requires one"
            cure = f"Set tokenizer.{name} to a token that it has, and save it beside the model."
            yield Problem("model_name_or_path", model.name_or_path or ABSENT, reason, cure)


def _checkpointing(model: Any) -> Iterator[Problem]:
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    kinds = [getattr(adapter, "peft_type", None) for adapter in getattr(model, "peft_config", {}).values()]
    kind = next((getattr(kind, "value", kind) for kind in kinds if kind in ("PREFIX_TUNING", "CARTRIDGE")), None)
    reason = ""
    if kind is not None:
        reason = f"{kind} hands its tokens to the model as a cache, which checkpointing drops"
    elif not getattr(base, "supports_gradient_checkpointing", True):
        reason = f"{type(base).__name__} does not support it"
    if reason:
        yield Problem("gradient_checkpointing", True, reason, "Set gradient_checkpointing: false.")


def _requires(config: Any, name: str) -> bool:
    """Return whether a model's config refuses to lack a token; transformers copies the tokenizer's into it."""
    if getattr(config, name, None) is None:
        return False
    try:
        setattr(copy.copy(config), name, None)
    except Exception:  # of huggingface_hub's strict dataclasses
        return True
    return False
