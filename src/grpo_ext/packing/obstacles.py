"""Obstacles to sharing the forward of a prompt between rows, in the loss, in rollouts or in both."""

import inspect
import math
from collections.abc import Iterator
from enum import Enum
from typing import Any, TypeAlias, cast

from peft import PeftModel
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.packing.dropout import active_dropout
from grpo_ext.packing.recurrent import LAYER_TYPES, is_recurrent
from grpo_ext.packing.rotary import growing

Policy: TypeAlias = PreTrainedModel | PeftModel
KNOWN_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Implementations of transformers that differ only in rounding, so that ours may replace them."""
NORM_AFTER_ROTARY = ("HunYuanDenseV1Attention", "HunYuanMoEV1Attention", "HunYuanVLDenseV1Attention")
"""Attention of transformers whose scores depend on more than differences of positions, once its norms are trained."""
KNOWN_LAYERS = ("chunked_attention", "full_attention", "sliding_attention")
"""Kinds of layers whose tokens see their own path only, or the last tokens of it."""


class Forward(Enum):
    """The forward that is shared."""

    LOSS = "loss"
    """All completions of a prompt in one row, through our attention."""
    ROLLOUT = "rollout"
    """The prompt's keys and values copied for its completions, through the model's own attention."""
    ELSEWHERE = "elsewhere"
    """The same in another process, which gets whole weights and never trains."""


def causal_lm(model: Policy) -> PreTrainedModel:
    """Return the causal language model inside adapters."""
    return cast(PreTrainedModel, model.get_base_model()) if isinstance(model, PeftModel) else model


def name_body(base: PreTrainedModel) -> None:
    """Let TRL's LM head find the body of a model whose `base_model_prefix` names a part that it does not have.

    That is a language model written as a part of a greater one, such as `Llama4ForCausalLM`.
    """
    text = base.config.get_text_config(decoder=True) is base.config
    if text and base.base_model is base and isinstance(getattr(base, "model", None), PreTrainedModel):
        base.base_model_prefix = "model"


def takes_positions(base: PreTrainedModel) -> bool:
    """Return whether the body of a model takes positions, and does not count them by itself only."""
    return "position_ids" in inspect.signature(type(base.base_model).forward).parameters


def text_model(base: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a causal language model that computes text: of one that also takes images, its decoder."""
    return base if base.config.get_text_config(decoder=True) is base.config else base.get_decoder()


def scale_of_trl_only(base: PreTrainedModel) -> float | None:
    """Return the factor by which TRL's LM head multiplies logits and the model itself does not, or None.

    TRL reads it from the config of the text model; Aya Vision and Cohere 2 Vision use that model without its head.
    """
    scale = getattr(base.config.get_text_config(decoder=True), "logit_scale", None)
    scaled = scale is None or text_model(base) is base or hasattr(base, "logit_scale")
    return None if scaled or scale == 1.0 else scale


def forward_obstacle(args: GRPOExtConfig) -> str | None:
    """Return why a run cannot share prompts, in the loss or in rollouts, independent of its model."""
    parallel = args.parallelism_config
    if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
        return "sequences are spread over processes"
    if args.replay_routes:
        return "completions have routes of their own in the prompt"
    return "torch_compile compiles the plain forward" if args.torch_compile else None


def obstacles(model: Policy, use: Forward = Forward.LOSS) -> Iterator[str]:
    """Yield why a shared prompt would not be exact for this model."""
    adapters = model.peft_config.values() if isinstance(model, PeftModel) else ()
    if adds_tokens(model):
        yield "the adapter adds tokens before the prompt"
    if any(getattr(adapter, "alora_invocation_tokens", None) is not None for adapter in adapters):  # arXiv:2504.12397
        yield "the adapter begins to act at a token of each completion"
    if use is Forward.LOSS or (use is Forward.ROLLOUT and model.training):  # evaluation rolls out without noise
        yield from _of_noise(model)
    base = causal_lm(model)
    yield from _of_states(base, use)
    yield from _of_architecture(base)
    if use is Forward.LOSS:
        yield from _of_the_loss(base)
    elif use is Forward.ROLLOUT and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(base)):
        yield "the weights are sharded over processes"  # which decode different numbers of tokens


# In the loss and in rollouts.


def adds_tokens(model: Policy) -> bool:
    """Return whether an adapter adds tokens before the prompt."""
    return isinstance(model, PeftModel) and any(a.is_prompt_learning for a in model.peft_config.values())


def _of_noise(model: Policy) -> Iterator[str]:
    if dropout := active_dropout(model):
        yield f"dropout is active in {dropout[0]}, and completions of a prompt would see the same one"
    settings = (item for part in (causal_lm(model).config, *model.modules()) for item in vars(part).items())
    if any("jitter" in name and isinstance(value, float) and value > 0 for name, value in settings):
        yield "the router is noisy in training"


def _of_states(base: PreTrainedModel, use: Forward) -> Iterator[str]:
    """Yield a state beside keys and values that is not carried from a prompt to its completions."""
    kinds = _layer_types(base) & LAYER_TYPES
    if not (kinds or getattr(base, "_is_stateful", False)):
        return
    if not any(map(is_recurrent, base.modules())) and (use is Forward.LOSS or not kinds):
        yield "the model carries a recurrent state"  # in rollouts it lies in the cache, which checks its layers
    biased = (name for name, module in base.named_modules() if getattr(module, "bias", None) is not None)
    if padded := next((name for name in biased if name.endswith(".in_proj")), None):
        yield f"the bias of {padded} lets padding into its convolution: a padded row differs from the row by itself"


def _layer_types(base: PreTrainedModel) -> set[str]:
    return set(getattr(base.config.get_text_config(decoder=True), "layer_types", None) or ())


def _of_architecture(base: PreTrainedModel) -> Iterator[str]:
    config: Any = base.config.get_text_config(decoder=True)
    if len(set(getattr(base, "hf_device_map", {}).values())) > 1:
        yield "the model is spread over several devices"
    if base.config.is_encoder_decoder:
        yield "the model has an encoder"
    if kinds := _layer_types(base) - {*KNOWN_LAYERS} - LAYER_TYPES:
        yield f"the model has layers of {', '.join(sorted(kinds))}"
    if kind := growing(config):
        yield f"{kind} rotary embeddings depend on the length of the batch"
    sees = "vision_config" in base.config.sub_configs
    if sees and not _is_rotary(text_model(base)):  # GIT and Kosmos count positions by themselves
        yield "positions are not rotary"


# Only in the loss: our attention replaces the model's, and completions lie side by side.


def _of_the_loss(base: PreTrainedModel) -> Iterator[str]:
    text = text_model(base)
    config: Any = base.config.get_text_config(decoder=True)
    if config._attn_implementation not in KNOWN_ATTENTION:
        yield f"attention implementation {config._attn_implementation!r} is not known to compute plain attention"
    if base.base_model is base:
        yield f"{type(base).__name__} has no base model apart from its head"
    recurrent = any(map(is_recurrent, text.modules()))
    if not getattr(text, "_supports_attention_backend", False) and not recurrent:
        yield f"{type(text).__name__} does not take its attention from transformers' AttentionInterface"
    if any(getattr(module, "is_causal", True) is False for module in text.modules()):
        yield "attention looks ahead"
    if not _is_rotary(text) and not recurrent:
        yield "positions are not rotary"
    if any(type(module).__name__ in NORM_AFTER_ROTARY for module in text.modules()):
        yield "queries and keys are normalised after their rotation, so padding before a prompt changes its scores"
    if (scale := scale_of_trl_only(base)) is not None:
        yield f"TRL's LM head multiplies logits by {scale:g}, which {type(base).__name__} does not"
    if base.base_model is not base and _beside_the_head(base):
        yield f"the head of {type(base).__name__} computes more than its output embeddings"


def _beside_the_head(base: PreTrainedModel) -> bool:
    """Return whether a model has parameters beside its base model's and its output embeddings'."""
    parts = base.base_model, base.get_output_embeddings()
    known = {id(p) for part in parts if part is not None for p in part.parameters()}
    return any(id(p) not in known for p in base.parameters())


def most_tokens(base: PreTrainedModel) -> float:
    """Return the most tokens of a packed row.

    Llama 4 scales queries by their place in the row, not by their position; the scale is 1 below `floor_scale`.
    """
    scaled: Iterator[Any] = (m for m in text_model(base).modules() if getattr(m, "attn_temperature_tuning", False))
    return min((int(m.floor_scale) - 1 for m in scaled if not getattr(m, "use_rope", False)), default=math.inf)


def _is_rotary(text: PreTrainedModel) -> bool:
    return any(name.endswith("rotary_emb") for name, _ in text.named_modules())
