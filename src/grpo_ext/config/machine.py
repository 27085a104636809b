"""What the machine that is to run has: a GPU that computes in bf16, the packages that settings ask for."""

import importlib.util
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from huggingface_hub import get_token, is_offline_mode
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

from grpo_ext.config.broken import as_far_as_sound
from grpo_ext.config.launch import elsewhere, planning, world_size
from grpo_ext.config.mappings import as_mapping

OF_THE_GPU = ("bf16", "bf16_full_eval", "tf32")
"""Settings that transformers refuses on a machine without the GPU for them."""


def hardware_problems(config: Any) -> Iterator[str]:
    """Precisions that this machine cannot compute in, unless the launch is only planned."""
    if not planning():
        yield from _precisions(config)


def _precisions(config: Any) -> Iterator[str]:
    if config.use_cpu:
        return
    if torch.backends.mps.is_available():
        yield (
            "use_cpu=False: this machine's accelerator is MPS, which has no float64, in which rewards become "
            "advantages. Set use_cpu: true and bf16: false."
        )
        return
    if is_torch_bf16_gpu_available() or is_torch_xla_available():
        return
    bf16 = not config.fp16 if config.bf16 is None else config.bf16
    for name, value in (("bf16", bf16), ("bf16_full_eval", config.bf16_full_eval)):
        if value:
            yield (
                f"{name}={value}: this machine has no GPU that computes in bf16. Run it where there is one, or set "
                f"use_cpu: true and {name}: false."
            )


def meet_within(config: Any) -> None:
    """On a CPU, join the other processes with `ddp_timeout`, which transformers hands on for GPUs alone."""
    on_cpu = config.use_cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
    fresh = not PartialState._shared_state and not torch.distributed.is_initialized()
    if on_cpu and fresh and world_size() > 1 and not planning() and not config.deepspeed:
        PartialState(cpu=True, backend=config.ddp_backend, timeout=timedelta(seconds=config.ddp_timeout))


# What is not installed.


def is_for_another(config: Any) -> bool:
    """Whether another machine is to run it: so planned, or planned for a GPU that is not here."""
    return elsewhere() or (planning() and any(_precisions(config)))


def machine_problems(training: Any, model: Any) -> Iterator[str]:
    """What is missing on this machine, if it is the one that is to run."""
    if not is_for_another(training):
        yield from missing(training, model)


def lacks(training: Any, model: Any) -> list[str]:
    """What this machine lacks of what another one, for which a launch is planned, is to have."""
    return [*_precisions(training), *missing(training, model)] if is_for_another(training) else []


_OF_OPTIMIZERS = {  # by words in their names, the first that fits
    "adamw_torch_8bit": "torchao",
    "adamw_torch_4bit": "torchao",
    "galore": "galore_torch",
    "apollo": "apollo_torch",
    "lomo": "lomo_optim",
    "grokadamw": "grokadamw",
    "schedule_free": "schedulefree",
    "stable_adamw": "optimi",
    "anyprecision": "torchdistx",
    **dict.fromkeys(("8bit", "32bit", "paged_", "_bnb", "ademamix"), "bitsandbytes"),
}
_INSTALLED_AS = {
    "optimi": "torch-optimi",
    "flash_attn": "flash-attn --no-build-isolation",
    "azure_ml": "azureml-mlflow",
}
_FLASH = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def is_installed(package: str) -> bool:
    """Whether Python finds it; nothing is imported."""
    return importlib.util.find_spec(package) is not None


def missing(training: Any, model: Any) -> Iterator[str]:
    """Settings whose package, or token, is not here."""
    for found in (_reporters(training), _packages(training, model), _token(training)):
        yield from as_far_as_sound(found)


def _reporters(training: Any) -> Iterator[str]:
    available = (*get_available_reporting_integrations(), "all", "none", "flyte")  # no package tells of flyte
    reporters = training.report_to if isinstance(training.report_to, list) else [training.report_to]
    for reporter in reporters:
        if reporter in INTEGRATION_TO_CALLBACK and reporter not in available:
            package = _INSTALLED_AS.get(reporter, reporter.replace("_", "-"))
            yield (
                f"report_to={reporter!r}: its package is not installed. Install it (pip install {package}), or set "
                "report_to: none."
            )


def _packages(training: Any, model: Any) -> Iterator[str]:
    for setting, package, cure in _wanted(training, model):
        if not is_installed(package):
            name = _INSTALLED_AS.get(package, package.replace("_", "-"))
            yield f"{setting} needs {package}, which is not installed. Install it (pip install {name}), or {cure}."


def _token(training: Any) -> Iterator[str]:
    if training.push_to_hub and not training.hub_token and get_token() is None:
        yield (
            "push_to_hub=True: there is no token for the hub, and the run would end before its first step. Log in "
            "(hf auth login), set HF_TOKEN, or set push_to_hub: false."
        )
    elif training.push_to_hub and is_offline_mode():
        yield (
            "push_to_hub=True with HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE: nothing can be pushed, and the run would "
            "end before its first step. Unset them, or set push_to_hub: false and run `hf upload` afterwards."
        )


def _wanted(training: Any, model: Any) -> Iterator[tuple[str, str, str]]:
    """Settings, each with the module that it needs and how to do without."""
    if training.use_vllm:
        yield "use_vllm=True", "vllm", "set use_vllm: false, by which transformers generates"
    optim = str(getattr(training.optim, "value", training.optim))
    package = next((package for word, package in _OF_OPTIMIZERS.items() if word in optim), None)
    if package:
        yield f"optim={optim!r}", package, "set optim: adamw_torch_fused"
    if training.use_liger_kernel:
        yield "use_liger_kernel=True", "liger_kernel", "set use_liger_kernel: false"
    if model is None:
        return
    for name in ("load_in_4bit", "load_in_8bit"):
        if getattr(model, name) and model.use_peft:
            yield f"{name}=True", "bitsandbytes", f"set {name}: false"
    attention = str(model.attn_implementation or as_mapping(training.model_init_kwargs).get("attn_implementation"))
    kernels = is_installed("kernels")  # whose kernels transformers takes instead
    if attention in _FLASH and not kernels and not training.use_cpu:
        yield f"attn_implementation={attention!r}", _FLASH[attention], "set attn_implementation: sdpa"
    if "/" in attention:
        yield f"attn_implementation={attention!r}", "kernels", "set attn_implementation: sdpa"
