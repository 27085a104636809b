"""The machine that is to run: whether it has a GPU, its CPU else, and how its processes meet."""

import logging
from datetime import timedelta

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.launch import elsewhere, planning, rank, world_size

logger = logging.getLogger(__name__)

OF_THE_GPU = ("bf16", "bf16_full_eval", "tf32")
"""Settings that transformers refuses on a machine without the GPU for them."""


def choose_cpu(config: GRPOExtArguments) -> None:
    """Choose the CPU and float32 on a machine without a GPU, where the settings leave both open."""
    set_already = config.use_cpu or config.bf16 or config.fp16 or config.bf16 is False
    if set_already or planning() or torch.accelerator.is_available() or is_torch_xla_available():
        return
    config.use_cpu, config.bf16 = True, False
    if rank() == 0:
        logger.warning("This machine has no GPU: training on its CPU in float32 (use_cpu: true, bf16: false).")


def is_for_another(config: GRPOExtArguments) -> bool:
    """Return whether another machine is to run it: so planned, or planned for a GPU that is not here."""
    if elsewhere() or not planning() or config.use_cpu:
        return elsewhere()
    bf16 = not config.fp16 if config.bf16 is None else config.bf16
    here = is_torch_bf16_gpu_available() or is_torch_xla_available()
    return bool(bf16 or config.bf16_full_eval) and not here


def meet_within(config: GRPOExtArguments) -> None:
    """On a CPU, join the other processes with `ddp_timeout`, which transformers passes on for GPUs only."""
    on_cpu = config.use_cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
    fresh = not PartialState._shared_state and not torch.distributed.is_initialized()
    if on_cpu and fresh and world_size() > 1 and not planning() and not config.deepspeed:
        PartialState(cpu=True, backend=config.ddp_backend, timeout=timedelta(seconds=config.ddp_timeout))
