"""Why rows may not share the forward of their prompt."""

from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.packing.dropout import active_dropout


def forward_obstacle(model: torch.nn.Module, args: GRPOExtConfig) -> str | None:
    """Why completions cannot share one forward of their prompt, as far as the run and not the architecture says."""
    if dropout := active_dropout(model):
        return f"dropout is active in {dropout[0]}, and each completion would see the same one"
    if args.neftune_noise_alpha is not None:
        return "neftune_noise_alpha adds noise to the embeddings"
    parallel = args.parallelism_config
    if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
        return "sequences are spread over processes"
    return "torch_compile compiles the plain forward" if args.torch_compile else None


KNOWN_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Implementations of transformers that differ in rounding alone, so that another one may stand in."""
GROWING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the length of the batch."""


def causal_lm(model: Any) -> Any:
    """The causal language model inside of adapters."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def invoked_later(adapter: Any) -> bool:
    """Whether an adapter acts on a row from its invocation tokens on (aLoRA, arXiv:2504.12397)."""
    return getattr(adapter, "alora_invocation_tokens", None) is not None


def obstacles(model: Any) -> Iterator[str]:
    """Why a shared prompt would not be exact for this model; nothing where it is."""
    if isinstance(model, PeftModel) and any(c.is_prompt_learning for c in model.peft_config.values()):
        yield "the adapter puts tokens of its own before the prompt"
    base = causal_lm(model)
    if isinstance(model, PeftModel) and any(invoked_later(c) for c in model.peft_config.values()):
        yield "the adapter begins to act at a token of each completion"
    config = base.config
    if len(set(getattr(base, "hf_device_map", {}).values())) > 1:
        yield "the model is spread over several devices"
    if config.is_encoder_decoder:
        yield "the model has an encoder"
    if config.get_text_config() is not config:
        yield "the model takes more than text"
        return
    if config._attn_implementation not in KNOWN_ATTENTION:
        yield f"attention implementation {config._attn_implementation!r} is not known to compute plain attention"
    if not getattr(base, "_supports_attention_backend", False):
        yield f"{type(base).__name__} does not take its attention from transformers' AttentionInterface"
    if getattr(config, "router_jitter_noise", 0):
        yield "the router is noisy in training"
    if getattr(base, "_is_stateful", False):
        yield "the model carries a recurrent state"
    yield from _foreign_layers(config)
    if not any(name.endswith("rotary_emb") for name, _ in base.named_modules()):
        yield "positions are not rotary"
    if growing := sorted(_rope_types(config) & set(GROWING_ROPE)):
        yield f"{growing[0]} rotary embeddings depend on the length of the batch"


def _foreign_layers(config: Any) -> Iterator[str]:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        yield f"the model has layers of {', '.join(sorted(kinds))}"
    elif not hasattr(config, "layer_types") and getattr(config, "sliding_window", None) is not None:
        yield f"attention is limited to a sliding window of {config.sliding_window} tokens"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        yield "attention scores are capped"
    if getattr(config, "kv_lora_rank", None) is not None:
        yield "keys and values are of different sizes"


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [parameters, *(p for p in parameters.values() if isinstance(p, dict))]
    return {str(p["rope_type"]) for p in parts if "rope_type" in p}
