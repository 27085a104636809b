"""What the machine that is to run has: a GPU that computes in bf16, the packages that settings ask for."""

import importlib.util
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

from grpo_ext.config.launch import planning, world_size

OF_THE_GPU = ("bf16", "bf16_full_eval", "tf32")
"""Settings that transformers refuses on a machine without the GPU for them."""


def hardware_problems(config: Any) -> Iterator[str]:
    """Precisions that this machine cannot compute in, unless the launch is only planned."""
    if config.use_cpu or planning():
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


_OF_BITSANDBYTES = ("8bit", "paged_", "_bnb", "ademamix")


def missing_packages(training: Any, model: Any) -> Iterator[str]:
    """Settings whose package is not installed here."""
    available = (*get_available_reporting_integrations(), "all", "none", "flyte")  # no package tells of flyte
    reporters = training.report_to if isinstance(training.report_to, list) else [training.report_to]
    for reporter in reporters:
        if reporter in INTEGRATION_TO_CALLBACK and reporter not in available:
            yield (
                f"report_to={reporter!r}: its package is not installed. Install it (pip install "
                f"{reporter.replace('_', '-')}), or set report_to: none."
            )
    optim = str(getattr(training.optim, "value", training.optim))
    for name, asked, package in (
        ("load_in_4bit=True", model is not None and model.use_peft and model.load_in_4bit, "bitsandbytes"),
        ("load_in_8bit=True", model is not None and model.use_peft and model.load_in_8bit, "bitsandbytes"),
        (
            f"optim={optim!r}",
            optim != "adamw_torch_8bit" and any(w in optim for w in _OF_BITSANDBYTES),
            "bitsandbytes",
        ),
        ("use_liger_kernel=True", training.use_liger_kernel, "liger_kernel"),
    ):
        if asked and importlib.util.find_spec(package) is None:
            command = f"pip install {package.replace('_', '-')}"
            yield f"{name} needs {package}, which is not installed. Install it ({command})."
