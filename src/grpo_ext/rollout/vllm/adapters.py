"""Adapters that vLLM holds as they are: which ones it can, and the tensors of a push."""

from collections.abc import Iterator
from typing import Any, cast

import torch
from peft import PeftModel, PeftType
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from grpo_ext.rollout.vllm.weights import Gather, base_model, is_quantised, places, whole

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM can keep room."""
KEEPS_BASE = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base as it is on disk."""
QUANTIZED = "the base is quantized, and the one that vLLM loads is not"


def unheld(model: nn.Module) -> str | None:
    """Return why vLLM cannot hold the adapter of `model` beside the base that it loads from disk; None: it can."""
    if not isinstance(model, PeftModel):
        return "all weights are trained"
    if len(model.active_adapters) != 1:
        return "several adapters are active"
    config: Any = model.peft_config[model.active_adapters[0]]
    kind, base = PeftType(config.peft_type), cast(Any, base_model(model))
    if kind != PeftType.LORA:
        return f"the adapter is of the type {kind.value}, and vLLM holds LoRA"
    if config.init_lora_weights not in KEEPS_BASE:
        return f"init_lora_weights: {config.init_lora_weights} changes the base"
    if is_quantised(model):
        return QUANTIZED
    if base.config.get_text_config() is not base.config:
        return "the model has more than a decoder of text"
    if (rank := rank_of(model)) > RANKS[-1]:
        return f"vLLM holds ranks up to {RANKS[-1]}, and this is {rank}"
    return next(_unheld_modules(model, base.get_output_embeddings()), None)


def _unheld_modules(model: PeftModel, head: object) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        name = name.removeprefix("base_model.model.")
        if ".experts." in name:
            yield "the model is a mixture of experts"
        factor = name.endswith("weight") and ("lora_A." in name or "lora_B." in name)
        if parameter.requires_grad and not factor:
            yield f"{name} is trained, which is not A or B of a linear layer"
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            if any(layer.lora_variant.values()):
                yield "vLLM computes plain LoRA, and this is a variant"
            if layer is head or not isinstance(layer.base_layer, nn.Linear):
                yield f"{name.removeprefix('base_model.model.')} is no linear layer of the decoder"


def rank_of(model: PeftModel) -> int:
    """Return the largest rank of the active LoRA."""
    name = model.active_adapters[0]
    return max(int(layer.r[name]) for layer in model.modules() if isinstance(layer, LoraLayer) and name in layer.r)


def slots(model: PeftModel, ahead: int) -> dict[str, Any]:
    """Return the options by which vLLM has room for an adapter that it can hold.

    With `rollout_ahead: ahead` so many versions are sampled by; the next one and that of an evaluation come beside.
    """
    return {"max_lora_rank": next(rank for rank in RANKS if rank >= rank_of(model)), "max_loras": ahead + 2}


def adapter_weights(
    model: PeftModel, dtype: torch.dtype, gather: Gather, device: torch.device | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield A and scaling B of each layer, in PEFT's names, as copies on the CPU that are rounded once; collective.

    All arguments are those of `effective_weights`.
    """
    name = model.active_adapters[0]
    for prefix, layers, _ in places(base_model(model)):
        for layer in cast(Any, layers):
            scaling = 0.0 if layer.disable_adapters else float(layer.scaling[name])
            for factor, scale in (("lora_A", 1.0), ("lora_B", scaling)):
                weight = getattr(layer, factor)[name].weight
                with gather([weight]):
                    exact = whole(layer, weight, device).float() * scale
                    yield f"base_model.model.{prefix}{factor}.weight", exact.to("cpu", dtype, copy=True).contiguous()
