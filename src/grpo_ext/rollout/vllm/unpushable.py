"""Policies that a sampler cannot be given: adapters without a sum, heads that adapters untie, packed weights."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from peft import PeftModel, PeftType
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.variants import DoraLinearVariant, MiCAEmbeddingVariant, MiCALinearVariant
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from grpo_ext.errors import ABSENT, Problem
from grpo_ext.rollout.vllm.weights import PACKED, base_model, is_quantised, places

SUMMED = frozenset(
    PeftType[name]
    for name in (
        *("LORA", "ADALORA", "BOFT", "C3A", "DELORA", "FOURIERFT", "HRA", "IA3", "LOHA", "LOKR", "MISS", "OFT"),
        *("RANDLORA", "SHIRA", "TRAINABLE_TOKENS", "VERA", "WAVEFT"),
    )
)
"""Types of adapters that can be added to the weights they adapt, with the network's output unchanged."""
VARIANTS = (DoraLinearVariant, MiCALinearVariant, MiCAEmbeddingVariant)
"""The same of LoRA's variants; DoRA's class is the base of those of other layers."""


class Engine(NamedTuple):
    """The sampler, as a problem names it."""

    setting: Mapping[str, object]
    """The setting that chooses it."""
    instead: str
    """The setting that chooses another sampler, as text."""


VLLM = Engine({"use_vllm": True}, "use_vllm: false")
PROCESS = Engine({"rollout_engine": "process"}, "rollout_engine: auto")


def unpushable(model: nn.Module, engine: Engine = VLLM, *, on_cpu: bool = False) -> Iterator[Problem]:
    """Yield why a sampler that gets the weights of `model`, perhaps on a CPU, would compute another distribution."""
    if isinstance(model, PeftModel):
        yield from _types(model, engine)
        yield from dict.fromkeys(_layers(model, engine))
    yield from _heads(base_model(model), engine)
    yield from dict.fromkeys(_packed(model, engine))
    if on_cpu and any(".experts." in name for name, _ in model.named_parameters()):
        reason = "vLLM's CPU build rearranges the weights of experts, so that pushed ones are read in the wrong order"
        yield Problem("use_vllm", True, reason, "Set use_vllm: false, or train on a GPU.")


def _types(model: PeftModel, engine: Engine) -> Iterator[Problem]:
    for name in model.active_adapters:
        kind = PeftType(model.peft_config[name].peft_type)
        if kind not in SUMMED:
            reason = (
                "the sampler has one weight per layer, to which adapters of this type have not been shown to add up"
            )
            cure = f"Train a LoRA (use_peft: true), or set {engine.instead}."
            yield Problem("peft_type", kind.value, reason, cure, engine.setting)


def _layers(model: PeftModel, engine: Engine) -> Iterator[Problem]:
    packed = is_quantised(model)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for variant in layer.lora_variant.values():
                if not isinstance(variant, VARIANTS):
                    reason = "this variant of LoRA has not been shown to add up to one weight, which the sampler needs"
                    yield Problem("lora", type(variant).__name__, reason, f"Set {engine.instead}.", engine.setting)
        elif packed and isinstance(layer, BaseTunerLayer) and not hasattr(layer, "trainable_tokens_delta"):
            reason = "on a quantized base only a LoRA is added to the unpacked weight"
            yield Problem("peft_type", type(layer).__name__, reason, "Train a LoRA (use_peft: true).", engine.setting)


def _heads(base: nn.Module, engine: Engine) -> Iterator[Problem]:
    """Refuse an adapter on one of two weights that are tied: the sampler has one weight for both."""
    model = cast(Any, base)
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if None in ends or _storage(_own(ends[0]).weight) != _storage(_own(ends[1]).weight):
        return
    if len({_storages_in_use(end) for end in ends}) > 1:
        reason = "the embedding and the LM head share a weight, and the adapter changes one of them only"
        cure = (
            "Leave both out of lora_target_modules and lora_modules_to_save, or give a LoraConfig with "
            "modules_to_save=['embed_tokens'] and ensure_weight_tying=True."  # TRL refuses a LoRA on the head
        )
        yield Problem("tie_word_embeddings", True, reason, cure, engine.setting)


def _own(module: Any) -> Any:
    """Return the module of the base model inside PEFT's."""
    while isinstance(module, AuxiliaryTrainingWrapper | BaseTunerLayer):
        module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module.original_module
    return module


def _storages_in_use(end: nn.Module) -> frozenset[int]:
    return frozenset(
        _storage(parameter)
        for _, layers, module in places(end)
        for parameter in cast(nn.Module, layers[0] if layers else module).parameters()
    )


def _storage(parameter: nn.Parameter) -> int:
    return int(parameter.untyped_storage()._cdata)  # also of a view, and without data


def _packed(model: nn.Module, engine: Engine) -> Iterator[Problem]:
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() and type(parameter).__name__ not in PACKED:
            reason = f"weights of {parameter.dtype}, such as {name}, are sent to the sampler in their packed form"
            cure = "Name the model before it was quantized, and set load_in_4bit: true to train a LoRA on it."
            yield Problem("model", ABSENT, reason, cure, engine.setting)
            return
