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
_FACTORS = ("lora_A.", "lora_B.")


def unheld(model: nn.Module, *, sleeps: bool, transfer: str) -> str | None:
    """Return why vLLM cannot hold the adapter of `model` beside the base that it loads from disk; None: it can.

    Args:
        model: the policy, perhaps without data.
        sleeps: whether the engine drops its weights between rollouts.
        transfer: `vllm_weight_transfer`, of a server.
    """
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
    return _unheld_module(model, base) or _unheld_setting(rank_of(model), sleeps, transfer)


def _unheld_module(model: PeftModel, base: Any) -> str | None:
    parameters = dict(model.named_parameters())
    if any(".experts." in name for name in parameters):
        return "the model is a mixture of experts"
    name, head = model.active_adapters[0], base.get_output_embeddings()
    for module, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            module = module.removeprefix("base_model.model.")
            if variant := layer.lora_variant.get(name):
                return f"{type(variant).__name__} on {module} is more than A and B"
            if layer is head or not isinstance(layer.base_layer, nn.Linear):
                return f"{module} is no linear layer of the decoder"
    beside = (n for n, p in parameters.items() if p.requires_grad and not (n.endswith("weight") and _is_factor(n)))
    trained = next(beside, None)
    return None if trained is None else f"{trained.removeprefix('base_model.model.')} is trained, which is not A or B"


def _is_factor(name: str) -> bool:
    return any(factor in name for factor in _FACTORS)


def _unheld_setting(rank: int, sleeps: bool, transfer: str) -> str | None:
    if rank > RANKS[-1]:
        return f"vLLM holds ranks up to {RANKS[-1]}, and this is {rank}"
    if sleeps:
        return "vllm_enable_sleep_mode drops the base between rollouts"
    return "vllm_weight_transfer: nccl takes whole weights" if transfer == "nccl" else None


def rank_of(model: PeftModel) -> int:
    """Return the largest rank of the active LoRA."""
    name = model.active_adapters[0]
    return max(int(layer.r[name]) for layer in model.modules() if isinstance(layer, LoraLayer) and name in layer.r)


def slots(model: PeftModel, versions: int) -> dict[str, Any]:
    """Return the options by which vLLM keeps room for `versions` of an adapter that it can hold."""
    return {"max_lora_rank": next(rank for rank in RANKS if rank >= rank_of(model)), "max_loras": versions}


def described(model: PeftModel) -> dict[str, Any]:
    """Return the content of `adapter_config.json`, for tensors whose scaling is 1."""
    prefixes = (prefix for prefix, layers, _ in places(base_model(model)) if layers)
    targets = sorted({prefix.split(".")[-2] for prefix in prefixes})
    rank = rank_of(model)
    return {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}


def adapter_weights(
    model: PeftModel, dtype: torch.dtype, gather: Gather, device: torch.device | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield A and scaling B of each layer, in PEFT's names, as copies on the CPU that are rounded once; collective.

    Args:
        model: the policy, which is only read.
        dtype: of the engine.
        gather, device: as in `effective_weights`.
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
