"""Modules that an adapter is for, as a recipe names them, against those that the model has."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from grpo_ext.config.adapters import is_adapter
from grpo_ext.registry import did_you_mean

_KEYS = ("lora_", "use_rslora", "use_dora")


def ignored(written: Collection[str], model: Any) -> Iterator[str]:
    """LoRA settings in a recipe that trains no new adapter, whatever their value; `use_peft: false` means it so."""
    keys = sorted(key for key in written if key.startswith(_KEYS) and getattr(model, key, None) not in (None, False))
    if not keys or model.use_peft or "use_peft" in written:
        return
    given = ", ".join(f"{key}={getattr(model, key)!r}" for key in keys)
    this, have = ("it", "it has") if len(keys) == 1 else ("them", "they have")
    if is_adapter(model.model_name_or_path):
        yield (
            f"{given}: model_name_or_path={model.model_name_or_path!r} is an adapter and keeps its own "
            f"shape, so {have} no effect. Remove {this}."
        )
    else:
        yield (
            f"{given}: without use_peft {have} no effect, and all weights would be trained. Set "
            f"use_peft: true, or remove {this}."
        )


def unmatched(empty: Any, model: Any) -> Iterator[str]:
    """Names, and regular expressions of whole paths, that no module has."""
    modules = dict(empty.named_modules())
    linear = sorted({n.rpartition(".")[2] for n, m in modules.items() if isinstance(m, torch.nn.Linear)})
    head = next((n for n, m in modules.items() if m is empty.get_output_embeddings()), None)
    layers = [name for name in linear if name != head]
    every = sorted({name.rpartition(".")[2] for name in modules if name})
    for setting, known in (("lora_target_modules", [*layers, "all-linear"]), ("lora_modules_to_save", every)):
        given = getattr(model, setting)
        if isinstance(given, str):
            yield from _unmatched_pattern(setting, given, modules, known)
            continue
        for target in given or ():
            if not any(name == target or name.endswith(f".{target}") for name in modules):
                yield (
                    f"{setting} has {target!r}, which no module of {type(empty).__name__} is called. "
                    f"{did_you_mean(str(target), known)}"
                )
    if head is not None and head in (model.lora_target_modules or ()):
        yield (
            f"lora_target_modules has {head!r}: TRL takes log-probabilities from its weight directly, and would never "
            "train an adapter on it. Remove it."
        )


def _unmatched_pattern(setting: str, given: str, modules: Mapping[str, Any], known: list[str]) -> Iterator[str]:
    if "," in given and "(" not in given:
        names = ", ".join(name.strip() for name in given.split(","))
        yield f"{setting}={given!r}: text where a list is expected. Write {setting}: [{names}]."
        return
    try:
        fits = given == "all-linear" or any(re.fullmatch(given, name) for name in modules)
    except re.error as error:
        yield f"{setting}={given!r} is no regular expression ({error}). Set {setting}: all-linear, or a list of names."
        return
    if not fits:
        hint = did_you_mean(given, known)
        yield f"{setting}={given!r}: no module fits that as a regular expression of its whole path. {hint}"
