"""The policy of a trainer as the process that samples gets it, or why it cannot."""

import copy
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from trl.distributed import DistributedBackend

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.process_engine import samples_in_process
from grpo_ext.config.truncation import scores_over_support
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.packing.obstacles import Forward, Policy, causal_lm, obstacles
from grpo_ext.rollout.process.messages import Decoding, Machine, ModelSpec, Start
from grpo_ext.rollout.process.sampler import ProcessSampler
from grpo_ext.rollout.transformers_engine import only_settings, samples_mixed
from grpo_ext.rollout.vllm.lazy_import import GRPOTrainer
from grpo_ext.rollout.vllm.unpushable import PROCESS, unpushable
from grpo_ext.rollout.vllm.weights import (
    Gather,
    Rounding,
    base_model,
    effective_weights,
    is_quantised,
    places,
    policy_dtype,
)

_INSTEAD = "Set rollout_engine: auto."


def process_sampler(trainer: GRPOTrainer, args: GRPOExtConfig) -> ProcessSampler | None:
    """Return the sampler of `rollout_engine: process`, which starts when weights are published; else None.

    Args:
        trainer: with its model, before an engine has wrapped it.
        args: its settings.

    Raises:
        ConfigError: the process cannot sample from this policy.
    """
    if not samples_in_process(args):
        return None
    if problems := [*policy_problems(cast(Policy, trainer.model)), *_launch_problems(trainer, args)]:
        raise ConfigError(problems)
    base = causal_lm(cast(Policy, trainer.model))
    weights = partial(_weights, trainer)
    start = partial(_start, trainer, args, type(base))  # FSDP2 replaces the class
    return ProcessSampler(weights, start, float(args.ddp_timeout))


def policy_problems(model: Policy) -> Iterator[Problem]:
    """Yield why a process cannot sample from a policy."""
    base, chosen = causal_lm(model), {"rollout_engine": "process"}
    yield from unpushable(model, PROCESS)
    for reason in obstacles(model, Forward.ELSEWHERE):
        yield Problem("rollout_engine", "process", reason, _INSTEAD)
    try:
        pickle.dumps((type(base), base.config))
        importable = type(base).__module__ != "__main__"
    except (pickle.PicklingError, AttributeError, TypeError):
        importable = False
    if not importable:
        reason = f"another process cannot import the class {type(base).__name__} or what its config holds"
        yield Problem("model", ABSENT, reason, "Define them in a module, or set rollout_engine: auto.", chosen)


def _launch_problems(trainer: GRPOTrainer, args: GRPOExtConfig) -> Iterator[Problem]:
    backend = DistributedBackend(trainer.accelerator)
    if is_quantised(cast(nn.Module, trainer.model)) and (backend.is_fsdp or backend.is_zero3):
        reason = "packed weights that are split over processes cannot be unpacked for the process"
        yield Problem("rollout_engine", "process", reason, "Launch by --accelerate_config ddp or zero2.")
    if args.n_gpu > 1:
        reason = f"one process sees {args.n_gpu} GPUs, over which transformers would spread each batch (DataParallel)"
        cure = "Launch by torchrun --nproc_per_node 1, or show it one GPU by CUDA_VISIBLE_DEVICES."
        yield Problem("rollout_engine", "process", reason, cure)


def _weights(trainer: GRPOTrainer) -> Iterator[tuple[str, Tensor]]:
    """Yield the present weights and buffers of the policy, under the names of the model without adapters."""
    model, gather = _unwrapped(trainer), cast(Gather, DistributedBackend(trainer.accelerator).gather_params)
    yield from effective_weights(model, policy_dtype(model), Rounding(), gather, trainer.accelerator.device)
    for prefix, _, module in places(base_model(model)):
        for name, buffer in module.named_buffers(recurse=False):
            yield prefix + name, buffer


def _start(trainer: GRPOTrainer, args: GRPOExtConfig, kind: type) -> Start:
    model = _unwrapped(trainer)
    base = causal_lm(model)
    config = copy.deepcopy(base.config)
    if hasattr(config, "quantization_config"):  # it gets unpacked weights
        del config.quantization_config
    with only_settings(model, args):
        generation_config = copy.deepcopy(cast(Any, base).generation_config)
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.accelerator.mixed_precision)
    spec = ModelSpec(
        kind=kind,
        config=config,
        generation_config=generation_config,
        autocast=mixed if samples_mixed(model, trainer) else None,
        embedding_dtype=policy_dtype(model) if args.cast_lm_head_to_fp32 else None,
    )
    decoding = Decoding(
        config=copy.deepcopy(trainer.generation_config),
        ends=frozenset(trainer.eos_token_ids),
        pad=cast(int, trainer.generation_config.pad_token_id),
        multiple=cast(int | None, trainer.pad_to_multiple_of),
        with_support=scores_over_support(args),
    )
    return Start(spec, decoding, _machine(trainer, args.rollout_device))


def _machine(trainer: GRPOTrainer, name: str | None) -> Machine:
    device = trainer.accelerator.device if name is None else torch.device(name)
    if name is not None and device.index is not None:  # the first process's; each has its own
        device = torch.device(device.type, device.index + trainer.accelerator.local_process_index)
    return Machine(
        device=device,
        threads=torch.get_num_threads(),
        matmul_precision=torch.get_float32_matmul_precision(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _unwrapped(trainer: GRPOTrainer) -> Policy:
    return cast(Policy, trainer.accelerator.unwrap_model(trainer.model_wrapped))
