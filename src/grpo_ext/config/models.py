"""Rules that need the model itself: what gradient checkpointing would drop."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.errors import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_problems(config: GRPOExtArguments, model: "PreTrainedModel") -> Iterator[Problem]:
    """Yield the problem of an adapter whose tokens gradient checkpointing would drop."""
    kinds = [getattr(adapter, "peft_type", None) for adapter in getattr(model, "peft_config", {}).values()]
    kind = next((getattr(kind, "value", kind) for kind in kinds if kind in ("PREFIX_TUNING", "CARTRIDGE")), None)
    if config.gradient_checkpointing and kind is not None:
        reason = f"{kind} hands its tokens to the model as a cache, which checkpointing drops"
        yield Problem("gradient_checkpointing", True, reason, "Set gradient_checkpointing: false.")
