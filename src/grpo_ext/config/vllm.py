"""The rules of settings for vLLM."""

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from accelerate.utils import parse_flag_from_env

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.engine_options import ENGINE_OPTION_RULES
from grpo_ext.config.mappings import as_mapping
from grpo_ext.config.rules import Conflict, Rule
from grpo_ext.errors import ABSENT, Problem


def missing(config: GRPOExtArguments) -> Iterator[Problem]:
    """Yield that vLLM is not here: this package imports it before TRL looks for it."""
    if config.use_vllm and find_spec("vllm") is None:
        cure = "Install it (pip install 'grpo-ext[vllm]'), or set use_vllm: false, so that transformers generates."
        yield Problem("use_vllm", True, "it needs vllm, which is not installed", cure)


def quantized_problem(setting: str, value: object) -> Problem:
    """Return the problem of quantized weights that are not unpacked for vLLM."""
    return Problem(
        setting,
        value,
        "vLLM would get the packed weights of the quantized layers instead of their values, and sample from another "
        "model; only what bitsandbytes packs while it loads a model is unpacked for vLLM",
        "Name the model before it was quantized and set load_in_4bit: true and use_peft: true, or set "
        "use_vllm: false.",
        {"use_vllm": True},
    )


def sharded_problem(setting: str, value: object) -> Problem:
    """Return the problem of quantized weights that are split over processes."""
    reason = "a weight is unpacked for vLLM by a process that has all of it, which FSDP and DeepSpeed ZeRO-3 split"
    cure = "Launch by --accelerate_config ddp or zero2, or set use_vllm: false."
    return Problem(setting, value, reason, cure, {"use_vllm": True})


def adapter_problem(reason: str) -> Problem:
    """Return the problem of an adapter that vLLM cannot hold."""
    return Problem("vllm_push", "adapter", reason, "Set vllm_push: auto, which then pushes merged weights.")


def whole_weights(config: GRPOExtArguments) -> str | None:
    """Return the setting that needs whole weights in each push; None: none does."""
    if config.vllm_push == "merged":
        return "vllm_push: merged"
    if config.vllm_mode == "colocate":
        return "vllm_enable_sleep_mode drops the base between rollouts" if config.vllm_enable_sleep_mode else None
    return "vllm_weight_transfer: nccl sends whole weights" if config.vllm_weight_transfer == "nccl" else None


def tool_problems(config: GRPOExtArguments, rollouts: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the problem of tools where processes share an engine: their rows have other numbers of turns."""
    shared = config.use_vllm and config.vllm_mode == "colocate" and config.vllm_tensor_parallel_size > 1
    for name in (name for name in ("tools", "environment_factory") if shared and rollouts[name]):
        reason = "TRL's loop would take the completions of other processes, whose rows have other numbers of turns"
        cure = "Set vllm_tensor_parallel_size: 1, or vllm_mode: server, or list the tools in environments."
        yield Problem(name, ABSENT, reason, cure, {"vllm_tensor_parallel_size": config.vllm_tensor_parallel_size})


def splits_weights() -> bool:
    """Return whether `accelerate launch` has asked for FSDP or ZeRO-3."""
    zero3 = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
    return parse_flag_from_env("ACCELERATE_USE_FSDP") or (parse_flag_from_env("ACCELERATE_USE_DEEPSPEED") and zero3)


def leaves_packed(quantization: object) -> bool:
    """Return whether a quantization config, a mapping or an object, leaves the weights of a loaded model packed."""
    return quantization is not None and not _options(quantization).get("dequantize")


def packs_while_loading(quantization: object) -> bool:
    """Return whether a quantization config is bitsandbytes', whose weights are unpacked for vLLM."""
    options = _options(quantization)
    method = options.get("quant_method")
    names = ("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit")
    return getattr(method, "value", method) == "bitsandbytes" or any(options.get(name) for name in names)


def _options(quantization: object) -> Mapping[str, Any]:
    return as_mapping(quantization) or getattr(quantization, "__dict__", {})


def _quantized(config: GRPOExtArguments) -> Iterator[Problem]:
    quantization = as_mapping(config.model_init_kwargs).get("quantization_config")
    if config.use_vllm and leaves_packed(quantization) and not packs_while_loading(quantization):
        yield quantized_problem("model_init_kwargs.quantization_config", f"{quantization!r:.80}")


VLLM_RULES: tuple[Rule, ...] = (
    *(_quantized, *ENGINE_OPTION_RULES),
    Conflict(
        "vllm_max_model_length",
        lambda c: (
            c.use_vllm
            and c.vllm_mode == "colocate"
            and c.vllm_max_model_length
            and c.vllm_max_model_length <= (c.max_completion_length or 0)
        ),
        "it is the length of prompt and completion together, and max_completion_length={c.max_completion_length} "
        "fills it",
        "Set it above {c.max_completion_length}, by the length of the longest prompt.",
    ),
    Conflict(
        "vllm_weight_transfer use_cpu",
        lambda c: c.use_cpu and c.use_vllm and c.vllm_mode == "server" and c.vllm_weight_transfer == "nccl",
        "NCCL needs a GPU on the trainer's side too",
        "Set 'auto' or 'gloo'.",
    ),
)
"""Settings of colocated engines and of a server."""
