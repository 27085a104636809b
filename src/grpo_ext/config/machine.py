"""Requirements on the machine that is to run: a GPU that computes in bf16, the packages that settings need."""

import importlib.util
import logging
from collections.abc import Iterator
from datetime import timedelta

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from huggingface_hub import get_token, is_offline_mode
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available
from trl import ModelConfig

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.launch import elsewhere, planning, rank, world_size
from grpo_ext.config.mappings import as_mapping
from grpo_ext.config.rules import as_far_as_sound
from grpo_ext.errors import Problem

logger = logging.getLogger(__name__)

OF_THE_GPU = ("bf16", "bf16_full_eval", "tf32")
"""Settings that transformers refuses on a machine without the GPU for them."""


def hardware_problems(config: GRPOExtArguments) -> Iterator[Problem]:
    """Yield precisions that this machine cannot compute in, unless the launch is only planned."""
    if not planning():
        yield from _precisions(config)


def choose_cpu(config: GRPOExtArguments) -> None:
    """Choose the CPU and float32 on a machine without a GPU, where the settings leave both open."""
    set_already = config.use_cpu or config.bf16 or config.fp16 or config.bf16 is False
    if set_already or planning() or torch.accelerator.is_available() or is_torch_xla_available():
        return
    config.use_cpu, config.bf16 = True, False
    if rank() == 0:
        logger.warning("This machine has no GPU: training on its CPU in float32 (use_cpu: true, bf16: false).")


def _precisions(config: GRPOExtArguments) -> Iterator[Problem]:
    if config.use_cpu:
        return
    apple = torch.backends.mps.is_available()
    if apple and world_size() > 1:
        reason = f"Apple's GPU (MPS) trains in one process, and these are {world_size()}"
        yield Problem("use_cpu", False, reason, "Launch one process, or set use_cpu: true and bf16: false.")
    if is_torch_bf16_gpu_available() or is_torch_xla_available():
        return
    bf16 = not config.fp16 if config.bf16 is None else config.bf16
    for name, value in (("bf16", bf16), ("bf16_full_eval", config.bf16_full_eval)):
        if value:
            instead = "" if apple else "fp16: true and " if torch.cuda.is_available() else "use_cpu: true and "
            cure = f"Run it where there is one, or set {instead}{name}: false."
            yield Problem(name, value, "this machine has no GPU that computes in bf16", cure)


def meet_within(config: GRPOExtArguments) -> None:
    """On a CPU, join the other processes with `ddp_timeout`, which transformers passes on for GPUs only."""
    on_cpu = config.use_cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
    fresh = not PartialState._shared_state and not torch.distributed.is_initialized()
    if on_cpu and fresh and world_size() > 1 and not planning() and not config.deepspeed:
        PartialState(cpu=True, backend=config.ddp_backend, timeout=timedelta(seconds=config.ddp_timeout))


# Packages that are not installed.


def is_for_another(config: GRPOExtArguments) -> bool:
    """Return whether another machine is to run it: so planned, or planned for a GPU that is not here."""
    return elsewhere() or (planning() and any(_precisions(config)))


def machine_problems(training: GRPOExtArguments, model: ModelConfig | None) -> Iterator[Problem]:
    """Yield what is missing on this machine, if it is the one that is to run."""
    if not is_for_another(training):
        yield from missing(training, model)


def lacks(training: GRPOExtArguments, model: ModelConfig | None) -> list[Problem]:
    """Return the requirements that this machine lacks, if the launch is planned for another one."""
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
    """Return whether Python finds a package, without importing it."""
    return importlib.util.find_spec(package) is not None


def missing(training: GRPOExtArguments, model: ModelConfig | None) -> Iterator[Problem]:
    """Yield settings whose package, or token, is not here."""
    for rule in (_reporters(training), _packages(training, model), _token(training)):
        yield from as_far_as_sound(rule)


def _not_installed(setting: str, value: object, package: str, instead: str) -> Problem:
    name = _INSTALLED_AS.get(package, package.replace("_", "-"))
    cure = f"Install it (pip install {name}), or set {instead}."
    return Problem(setting, value, f"it needs {package}, which is not installed", cure)


def _reporters(training: GRPOExtArguments) -> Iterator[Problem]:
    available = (*get_available_reporting_integrations(), "all", "none", "flyte")  # flyte has no package
    reporters = training.report_to if isinstance(training.report_to, list) else [training.report_to]
    for reporter in reporters:
        if reporter in INTEGRATION_TO_CALLBACK and reporter not in available:
            yield _not_installed("report_to", reporter, str(reporter), "report_to: none")


def _token(training: GRPOExtArguments) -> Iterator[Problem]:
    if training.push_to_hub and not training.hub_token and get_token() is None:
        reason = "a token for the hub is missing, and the run would end before its first step"
        cure = "Log in (hf auth login), set HF_TOKEN, or set push_to_hub: false."
        yield Problem("push_to_hub", True, reason, cure)
    elif training.push_to_hub and is_offline_mode():
        reason = "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, and the run would end before its first step"
        cure = "Unset them, or set push_to_hub: false and run `hf upload` afterwards."
        yield Problem("push_to_hub", True, reason, cure)


def _packages(training: GRPOExtArguments, model: ModelConfig | None) -> Iterator[Problem]:
    for setting, value, package, instead in _needed(training, model):
        if not is_installed(package):
            yield _not_installed(setting, value, package, instead)


def _needed(training: GRPOExtArguments, model: ModelConfig | None) -> Iterator[tuple[str, object, str, str]]:
    """Yield settings with their values, the package that each needs, and the setting that needs none."""
    if training.use_vllm:
        yield "use_vllm", True, "vllm", "use_vllm: false, so that transformers generates"
    optim = str(getattr(training.optim, "value", training.optim))
    package = next((package for word, package in _OF_OPTIMIZERS.items() if word in optim), None)
    if package:
        yield "optim", optim, package, "optim: adamw_torch_fused"
    if training.use_liger_kernel:
        yield "use_liger_kernel", True, "liger_kernel", "use_liger_kernel: false"
    if model is None:
        return
    for name in ("load_in_4bit", "load_in_8bit"):
        if getattr(model, name) and model.use_peft:
            yield name, True, "bitsandbytes", f"{name}: false"
    attention = str(model.attn_implementation or as_mapping(training.model_init_kwargs).get("attn_implementation"))
    kernels = is_installed("kernels")  # transformers uses its kernels instead
    if attention in _FLASH and not kernels and not training.use_cpu:
        yield "attn_implementation", attention, _FLASH[attention], "attn_implementation: sdpa"
    if "/" in attention:
        yield "attn_implementation", attention, "kernels", "attn_implementation: sdpa"
