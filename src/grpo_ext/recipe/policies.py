"""What a policy's folder says before its weights are loaded: whether GRPO can train it, and as this recipe asks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from peft import PeftConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from trl import get_peft_config

from grpo_ext.config.adapters import base_of, is_adapter
from grpo_ext.config.mappings import as_mapping
from grpo_ext.config.vllm import leaves_packed, quantized_problem
from grpo_ext.errors import ConfigError
from grpo_ext.quickstart.model import LESSONS, build_model, build_tokenizer
from grpo_ext.recipe.lora import unmatched
from grpo_ext.recipe.model_folders import folder_problems
from grpo_ext.recipe.policy import load_tokenizer_of
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.models.loaded_model import own_weights

_TRAINABLE = "Name a model that generates text, such as Qwen/Qwen2.5-0.5B-Instruct"


@dataclass
class Policy:
    """What is known of a policy without its weights."""

    empty: Any = None
    """The model on the meta device, with its adapter where there is one."""
    tokenizer: Any = None
    parameters: int = 0
    trained: int = 0
    context: int | None = None
    """Tokens that prompt and completion may have together."""
    unknown: str = ""
    """Why nothing is known."""


def look_at(model: Any, training: Any) -> tuple[Policy, list[str]]:
    """The policy that a recipe's parts name, and all that is wrong with it; an unreachable hub is no fault."""
    policy, problems = Policy(), list(folder_problems(str(model.model_name_or_path)))
    if problems:
        policy.unknown = "see above"
        return policy, problems
    with own_weights():  # ZeRO-3 would partition the model over processes, and it has no data
        if model.model_name_or_path in LESSONS:
            policy.tokenizer = build_tokenizer(LESSONS[model.model_name_or_path].words)
            policy.empty = build_model(policy.tokenizer)  # the warm one takes a short training
        else:
            problems += _load(policy, model, training)
        if policy.empty is not None:
            policy.context = _context(policy.empty.config)
            problems += _asked_of(policy, model, training)
    return policy, problems


# The model's configuration, its class and its tokenizer.


def _load(policy: Policy, model: Any, training: Any) -> Iterator[str]:
    name, trust = str(Path(model.model_name_or_path).expanduser()), bool(training.trust_remote_code)
    given: Any = {"revision": model.model_revision, "trust_remote_code": trust}
    try:
        whole, revision = base_of(name, model.model_revision) or (name, model.model_revision)
    except ConfigError:  # an adapter without a base, which the checks tell
        policy.unknown = "see above"
        return
    except OSError:
        whole, revision = name, model.model_revision
    try:
        config = AutoConfig.from_pretrained(whole, revision=revision, trust_remote_code=trust)
    except Exception as error:  # whatever is raised there would be raised in training
        yield from _not_loaded(policy, model.model_name_or_path, error)
        return
    if faults := list(_class_problems(model.model_name_or_path, config)):
        yield from faults
        policy.unknown = "see above"
        return
    yield from _init_kwargs(as_mapping(training.model_init_kwargs), config)
    yield from _build(policy, model.model_name_or_path, config, trust)
    if not any(_may_have_tokenizer(place) for place in (name, whole)):
        yield (
            f"model_name_or_path={model.model_name_or_path!r}: there is no tokenizer in this folder. Save it there: "
            "AutoTokenizer.from_pretrained(BASE).save_pretrained(FOLDER)."
        )
        return
    try:
        policy.tokenizer = load_tokenizer_of(name, **given)
    except Exception as error:
        if Path(name).is_dir():
            yield (
                f"model_name_or_path={model.model_name_or_path!r}: no tokenizer can be loaded from it "
                f"({_first_line(error)}). Save it there: AutoTokenizer.from_pretrained(BASE).save_pretrained(FOLDER)."
            )


_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"),
    *("spiece.model", "sentencepiece.bpe.model", "processor_config.json"),
)


def _may_have_tokenizer(name: str) -> bool:
    """Whether it is on the hub, or a folder with a tokenizer's file; without one transformers makes an empty one."""
    folder = Path(name)
    return not folder.is_dir() or any((folder / file).is_file() for file in _TOKENIZER_FILES)


def _not_loaded(policy: Policy, name: str, error: Exception) -> Iterator[str]:
    setting, text = f"model_name_or_path={name!r}", str(error)
    causes = list(_causes(error))
    policy.unknown = _first_line(error)
    if "trust_remote_code" in text:
        yield f"{setting}: it brings code of its own. Read that, and set trust_remote_code: true if you trust it."
    elif "does not recognize this architecture" in text or isinstance(error, KeyError):
        yield (
            f"{setting}: its model_type is unknown to transformers {transformers.__version__}. Name another model, or "
            "install a newer transformers."
        )
    elif any(isinstance(cause, GatedRepoError) for cause in causes):
        yield f"{setting}: gated. Ask for access at https://huggingface.co/{name}, then log in: hf auth login."
    elif any(isinstance(cause, RevisionNotFoundError) for cause in causes):
        yield f"{setting}: it has no such model_revision. Set model_revision: main."
    elif any(isinstance(cause, (RepositoryNotFoundError, HFValidationError)) for cause in causes):
        yield f"{setting}: neither a folder (from the working directory) nor a model on the hub. Correct it."
    elif Path(name).expanduser().is_dir() and not any(isinstance(cause, LocalEntryNotFoundError) for cause in causes):
        yield f"{setting}: config.json cannot be used ({_first_line(error)}). Correct it."


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _class_problems(name: str, config: Any) -> Iterator[str]:
    """Whether the class that TRL takes, the first of `architectures`, generates text."""
    setting, architectures = f"model_name_or_path={name!r}", config.architectures or []
    if not architectures:
        yield (
            f"{setting}: its config.json names no architectures, by which TRL finds the class. Write "
            '"architectures": ["..."] into it, such as "LlamaForCausalLM".'
        )
        return
    found = getattr(transformers, architectures[0], None)
    if found is None and not getattr(config, "auto_map", None):
        yield f"{setting}: {architectures[0]} is no class of transformers {transformers.__version__}. {_TRAINABLE}."
    elif config.is_encoder_decoder:
        yield f"{setting}: a {architectures[0]}, encoder and decoder; GRPO in TRL is for decoders alone. {_TRAINABLE}."
    elif found is not None and not found.can_generate():
        yield f"{setting}: a {architectures[0]} (an encoder, embedding model or classifier) has no text. {_TRAINABLE}."


_OF_LOADING = frozenset(
    [
        "attn_implementation",
        "cache_dir",
        "code_revision",
        "config",
        "device_map",
        "device_mesh",
        "dtype",
        "experts_implementation",
        "force_download",
        "generation_config",
        "gguf_file",
        "ignore_mismatched_sizes",
        "kernel_config",
        "key_mapping",
        "local_files_only",
        "low_cpu_mem_usage",
        "max_memory",
        "offload_buffers",
        "offload_folder",
        "offload_state_dict",
        "output_loading_info",
        "proxies",
        "quantization_config",
        "revision",
        "state_dict",
        "subfolder",
        "token",
        "torch_dtype",
        "tp_plan",
        "tp_size",
        "trust_remote_code",
        "use_kernels",
        "use_safetensors",
        "variant",
        "weights_only",
        "adapter_kwargs",
        "adapter_name",
        "distributed_config",
    ]
)
"""What `from_pretrained` takes beside the fields of a model's configuration."""


def _init_kwargs(given: Mapping[str, Any], config: Any) -> Iterator[str]:
    for key, value in given.items():
        if key not in _OF_LOADING and not hasattr(config, key):
            known = [*_OF_LOADING, *config.to_dict()]
            close = did_you_mean(key, known)
            cure = close if close.startswith("Did") else "Remove it."
            if "flash" in key:
                cure = "Remove it, and set attn_implementation: flash_attention_2."
            yield f"model_init_kwargs.{key}={value!r}: neither from_pretrained nor the model's config has it. {cure}"


def _build(policy: Policy, name: str, config: Any, trust: bool) -> Iterator[str]:
    found = getattr(transformers, config.architectures[0], None)
    try:
        with torch.device("meta"):
            if found is None:
                policy.empty = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
            else:
                policy.empty = found._from_config(config)
    except Exception as error:
        policy.unknown = _first_line(error)
        yield f"model_name_or_path={name!r}: no model can be made of its config.json ({policy.unknown}). Correct it."


# What the recipe asks of it.


def _asked_of(policy: Policy, model: Any, training: Any) -> Iterator[str]:
    config = policy.empty.config
    policy.parameters = policy.trained = sum(p.numel() for p in policy.empty.parameters())
    yield from _context_problems(policy.context, training)
    quantised = getattr(config, "quantization_config", None)
    adapter = is_adapter(model.model_name_or_path)
    if quantised is not None and not (model.use_peft or adapter):
        kind = as_mapping(quantised).get("quant_method") or getattr(quantised, "quant_method", "quantized")
        yield (
            f"model_name_or_path={model.model_name_or_path!r}: its weights are quantized "
            f"({getattr(kind, 'value', kind)}), and only an adapter on them can be trained. Set use_peft: true, or "
            "name the model before it was quantized."
        )
    given = as_mapping(training.model_init_kwargs).get("quantization_config")
    if training.use_vllm and given is None and leaves_packed(quantised):
        yield str(quantized_problem("model_name_or_path", model.model_name_or_path))
    if training.router_aux_loss_coef and not hasattr(config.get_text_config(), "output_router_logits"):
        yield (
            f"router_aux_loss_coef={training.router_aux_loss_coef}: {type(policy.empty).__name__} has no experts to "
            "balance. Remove it."
        )
    yield from _tokenizer_problems(policy, model, config)
    if adapter:
        yield from _count_adapter(policy, model.model_name_or_path)
    elif model.use_peft:
        yield from _adapter_problems(policy, model)


def _count_adapter(policy: Policy, name: str) -> Iterator[str]:
    """An adapter that is trained further; `policy` has it afterwards."""
    try:
        config: Any = PeftConfig.from_pretrained(str(Path(name).expanduser()))
        config.inference_mode, config.base_model_name_or_path = False, None  # PEFT would warn of its new name
        adapted: Any = get_peft_model(policy.empty, config)
    except Exception as error:
        yield f"model_name_or_path={name!r}: PEFT cannot put this adapter on its base ({_first_line(error)})."
        return
    policy.trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def _tokenizer_problems(policy: Policy, model: Any, config: Any) -> Iterator[str]:
    tokenizer, size = policy.tokenizer, getattr(config.get_text_config(), "vocab_size", None)
    if tokenizer is None:
        return
    setting = f"model_name_or_path={model.model_name_or_path!r}"
    if tokenizer.eos_token_id is None:
        yield f"{setting}: its tokenizer has no eos_token, so that no completion could end. Set one and save it there."
    if size is not None and len(tokenizer) > size and not is_adapter(model.model_name_or_path):  # its base grows
        yield (
            f"{setting}: its tokenizer has {len(tokenizer)} tokens, its embedding {size} rows. Call "
            "model.resize_token_embeddings(len(tokenizer)), and save both."
        )


def _context(config: Any) -> int | None:
    """As many positions as the model has, also those that a scaling of its rotary embedding adds."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    rope = as_mapping(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None))
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if isinstance(positions, int) and isinstance(factor, int | float):
        return max(positions, int(factor * (original or positions)))
    return positions if isinstance(positions, int) else None


def _context_problems(context: int | None, training: Any) -> Iterator[str]:
    longest = training.max_completion_length
    if {"max_position_embeddings", "rope_scaling", "rope_parameters"} & as_mapping(training.model_init_kwargs).keys():
        return
    if context is not None and longest >= context:
        yield (
            f"max_completion_length={longest}: the model has {context} positions, for prompt and completion together. "
            f"Set max_completion_length: {context // 2}, or what the prompts leave."
        )


def _adapter_problems(policy: Policy, model: Any) -> Iterator[str]:
    """Whether PEFT finds what the adapter is for; `policy` has the adapter afterwards."""
    found = [*unmatched(policy.empty, model)]
    yield from found
    if found:
        return
    config: Any = get_peft_config(model)
    try:
        adapted: Any = get_peft_model(policy.empty, config)
    except Exception as error:
        if model.lora_target_modules is None and model.lora_target_parameters is None:
            reason = f"PEFT has no default for model_type {policy.empty.config.model_type!r}"
            yield f"lora_target_modules=None: {reason}. Set lora_target_modules: all-linear."
        else:
            reason = _first_line(error).partition("(")[0].replace("Target module", "PEFT has no adapter for a")
            yield (
                f"lora_target_modules={model.lora_target_modules!r}: {reason}. Set lora_target_modules: all-linear, "
                "or names of linear layers."
            )
        return
    policy.trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
