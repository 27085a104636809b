"""Check the LoRA settings of a recipe, and the modules that they name against those of the model."""

from collections.abc import Collection, Iterator

import torch
from transformers import PreTrainedModel
from trl import ModelConfig

from grpo_ext.config.adapters import is_adapter
from grpo_ext.errors import ABSENT, Problem
from grpo_ext.registry import did_you_mean

_KEYS = ("lora_", "use_rslora", "use_dora")


def ignored(written: Collection[str], model: ModelConfig) -> Iterator[Problem]:
    """Yield LoRA settings, with any value, in a recipe that trains no new adapter; `use_peft: false` allows them."""
    names = (key for key in written if str(key).startswith(_KEYS))  # a key of YAML may be no text
    keys = sorted(key for key in names if getattr(model, key, None) not in (None, False))
    if not keys or model.use_peft or "use_peft" in written:
        return
    value, beside = getattr(model, keys[0]), {key: getattr(model, key) for key in keys[1:]}
    them = "it" if len(keys) == 1 else "them"
    if is_adapter(model.model_name_or_path):
        reason = f"no effect: model_name_or_path={model.model_name_or_path!r} is an adapter and keeps its own shape"
        yield Problem(keys[0], value, reason, f"Remove {them}.", beside)
    else:
        reason = "no effect without use_peft, and all weights would be trained"
        yield Problem(keys[0], value, reason, f"Set use_peft: true, or remove {them}.", beside)


def unmatched(empty: PreTrainedModel, model: ModelConfig) -> Iterator[Problem]:
    """Yield names in a list that match no module of the model: PEFT trains the others."""
    modules = dict(empty.named_modules())
    linear = sorted({n.rpartition(".")[2] for n, m in modules.items() if isinstance(m, torch.nn.Linear)})
    head = next((n for n, m in modules.items() if m is empty.get_output_embeddings()), None)
    layers = [name for name in linear if name != head]
    every = sorted({name.rpartition(".")[2] for name in modules if name})
    parameters = [name for name, _ in empty.named_parameters()]
    tails = sorted({".".join(name.split(".")[-2:]) for name in parameters})
    for setting, kind, names, known in (
        ("lora_target_modules", "module", modules, [*layers, "all-linear"]),
        ("lora_modules_to_save", "module", modules, every),
        ("lora_target_parameters", "parameter", parameters, tails),
    ):
        given = getattr(model, setting)
        for target in given or () if not isinstance(given, str) else ():  # PEFT refuses a text that fits nothing
            if not any(name == target or name.endswith(f".{target}") for name in names):
                reason = f"no {kind} of {type(empty).__name__} has the name {target!r}"
                yield Problem(setting, ABSENT, reason, did_you_mean(str(target), known))
    if head is not None and head in (model.lora_target_modules or ()):
        reason = (
            f"TRL takes log-probabilities from the weight of {head!r} directly, and would not train an adapter on it"
        )
        yield Problem("lora_target_modules", model.lora_target_modules, reason, "Remove it.")
