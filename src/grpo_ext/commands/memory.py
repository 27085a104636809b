"""An estimate of a device's memory, from a model's configuration and the sizes of a recipe's micro-batch."""

import copy
import os
from bisect import bisect_right

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel
from trl import ModelConfig

from grpo_ext.commands.peaks import FLOAT, Shape, autocasts, micro_batch, peak, rollout_held
from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.batches import PIECE_RULES
from grpo_ext.config.launch import world_size
from grpo_ext.config.machine import is_for_another
from grpo_ext.config.process_engine import samples_in_process
from grpo_ext.errors import ABSENT, Problem
from grpo_ext.recipe.launching import ONE_COPY, Engine
from grpo_ext.recipe.model_checks import InspectedPolicy
from grpo_ext.recipe.parts import Recipe
from grpo_ext.rollout.blocked_weights import WORTH, can_block


def _width(dtype: str | None) -> int:
    return 2 if dtype in ("bfloat16", "float16") else FLOAT


def estimate(
    training: GRPOExtArguments,
    dtype: str | None,
    parameters: int,
    trained: int,
    shape: Shape | None,
    prompt: int,
    packed: int = 0,
    taught: int = 0,
) -> dict[str, int]:
    """Return the bytes of each part of a training process's memory, without sharding; their sum is its peak.

    With the part of a process that samples beside it on its device.

    Args:
        training: the training settings.
        dtype: of the policy's weights; None is float32.
        parameters: number of parameters of the policy.
        trained: number of them that are trained.
        shape: of the policy; None leaves activations out.
        prompt: tokens of the longest prompt.
        packed: bytes that quantized weights are smaller than they were.
        taught: number of parameters of teachers that are models of their own.
    """
    each, computes = _width(dtype), 2 if autocasts(training) else _width(dtype)
    own = each if trained == parameters else FLOAT  # PEFT keeps adapters in float32
    parts = {
        "weights": parameters * each - packed,
        "gradients": trained * own,
        "Adam": 2 * trained * own,
        "reference": parameters * each if training.beta and trained == parameters else 0,
        "teachers": taught * each,
        "autocast": parameters * computes if computes < each else 0,
    }
    if shape is not None:
        copies, kept = parts["autocast"], parts["gradients"]
        if training.gradient_checkpointing and copies:  # those of the head, and of the layer that is computed again
            layer = max(0, parameters - shape.head) // shape.layers
            parts["autocast"] = min(copies, (shape.head + layer) * computes)
        batch = micro_batch(training, shape, prompt, each, computes)
        parts["activations"] = peak(shape, batch, kept, parts["autocast"]) - kept - parts["autocast"]
        if computes == each < FLOAT:
            copies = 2 * blocks(training, shape, dtype, parameters)
        sampling = rollout_held(training, shape, prompt, computes, copies)
        if not samples_in_process(training):
            parts["rollout"] = max(0, sampling - kept - parts["autocast"] - parts["activations"])
        elif training.use_cpu or training.rollout_device is None:
            parts["sampler"] = parameters * each + sampling
    if training.use_vllm and training.vllm_mode == "colocate":
        parts["engine"] = _engine(training, parameters * computes)
    return parts


def blocks(training: GRPOExtArguments, shape: Shape, dtype: str | None, parameters: int) -> int:
    """Return how many weights a rollout on a CPU multiplies in blocks: those of linear layers in bfloat16."""
    grouped = training.rollout_engine_resolved != "generate" and not training.use_transformers_continuous_batching
    long = int(training.max_completion_length or 0) >= WORTH
    used = training.use_cpu and grouped and long and dtype == "bfloat16" and (is_for_another(training) or can_block())
    return parameters - (0 if shape.tied else shape.head) if used else 0


def _engine(training: GRPOExtArguments, weights: int) -> int:
    """Return the bytes of a colocated engine while the policy trains."""
    if training.vllm_enable_sleep_mode:
        return 0
    device = device_memory(training)
    if training.use_cpu or device is None:
        cache_space = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
        return weights + (int(cache_space) if cache_space.isdecimal() else 1) * 2**30
    return int(training.vllm_gpu_memory_utilization * device)


def device_memory(training: GRPOExtArguments) -> int | None:
    """Return the bytes of the device that trains; None if the run is planned for another machine."""
    if is_for_another(training):
        return None
    if training.use_cpu or not torch.cuda.is_available():
        return int(psutil.virtual_memory().total)
    return int(torch.cuda.get_device_properties(0).total_memory)


def of_recipe(
    recipe: Recipe, policy: InspectedPolicy, prompt: int | None, training: GRPOExtArguments | None = None
) -> dict[str, int]:
    """Return the estimate of a recipe, or of one with other `training` settings.

    A longest prompt that is not known counts as `max_prompt_length`, or 0.
    """
    shape = Shape.of(policy.empty.config) if policy.empty is not None else None
    shape = shape.with_adapter(policy.empty) if shape is not None and policy.empty is not None else None
    longest, settings = prompt or recipe.data.max_prompt_length or 0, training or recipe.training
    model, packed = recipe.model, packed_bytes(recipe.model, policy.empty)
    return estimate(settings, model.dtype, policy.parameters, policy.trained, shape, longest, packed, policy.taught)


def packed_bytes(model: ModelConfig, empty: PreTrainedModel | None) -> int:
    """Return the bytes by which `load_in_4bit` or `load_in_8bit` makes frozen linear layers smaller.

    In 4 bits, 64 weights share a scale in float32, or in 8 bits with `use_bnb_nested_quant`. The head stays.
    """
    if empty is None or not model.use_peft or not (model.load_in_4bit or model.load_in_8bit):
        return 0
    scale = (1 if model.use_bnb_nested_quant else FLOAT) / 64
    each = 0.5 + scale if model.load_in_4bit else 1.0
    head = empty.get_output_embeddings()
    linear = (module.weight for module in empty.modules() if isinstance(module, nn.Linear) and module is not head)
    weights = sum(weight.numel() for weight in linear if not weight.requires_grad)
    return int(weights * (_width(model.dtype) - each))


def shares(parts: dict[str, int], engine: Engine) -> tuple[dict[str, int], int]:
    """Return a process's part of each size, without what its engine keeps in main memory, and the sum of that."""
    own = {name: size // (world_size() if name in engine.split else 1) for name, size in parts.items()}
    hosted = sum(own.pop(name, 0) for name in engine.hosted)
    return own, hosted


def fitting(recipe: Recipe, policy: InspectedPolicy, prompt: int | None, engine: Engine = ONE_COPY) -> int | None:
    """Return the largest `micro_batch_tokens` by which the estimate does not exceed the device.

    None if there is none, if micro-batches fit as they are, or if another setting excludes it.
    """
    device, training = device_memory(recipe.training), copy.copy(recipe.training)

    def total(tokens: int | None) -> int:
        training.micro_batch_tokens = tokens
        return sum(shares(of_recipe(recipe, policy, prompt, training), engine)[0].values())

    longest = (prompt or recipe.data.max_prompt_length or 0) + int(training.max_completion_length or 0)
    most = longest * training.per_device_train_batch_size
    if device is None or not longest or total(None) <= device or total(longest) > device:
        return None
    if any(problem for rule in PIECE_RULES for problem in rule(training)):
        return None
    return bisect_right(range(longest, most), device, key=total) + longest - 1


def too_large(recipe: Recipe, parts: dict[str, int], fit: int | None = None) -> Problem | None:
    """Return a warning if the estimate exceeds the device, unless its weights are sharded.

    `fit` is what `fitting` returns.
    """
    device, total = device_memory(recipe.training), sum(parts.values())
    if device is None or total <= device or recipe.training.deepspeed or recipe.training.fsdp:
        return None
    largest = max(parts, key=lambda name: parts[name])
    reason = f"by the estimate it is {gib(total)}, most of it for {largest}, and the device has {gib(device)}"
    pieces = f"Set micro_batch_tokens: {fit}, the most by which it fits; the gradient stays the same."
    halves = "Halve per_device_train_batch_size and double gradient_accumulation_steps."
    cures = {
        "activations": halves if fit is None else pieces,
        "rollout": "Lower max_completion_length, or steps_per_generation, by which fewer are sampled at a time.",
        "engine": "Lower vllm_gpu_memory_utilization, or set vllm_mode: server.",
    }
    return Problem("memory", ABSENT, reason, cures.get(largest, "Shard it (--accelerate_config fsdp2), or use_peft."))


def copies(recipe: Recipe, policy: InspectedPolicy) -> int:
    """Return the bytes of main memory for the versions of the weights that a process beside the trainer samples by."""
    if not samples_in_process(recipe.training):
        return 0
    return max(1, recipe.training.rollout_ahead) * policy.parameters * _width(recipe.model.dtype)


def too_many(recipe: Recipe, size: int) -> Problem | None:
    """Return a warning if copies of the weights exceed the main memory."""
    memory = int(psutil.virtual_memory().total)
    if size <= memory or is_for_another(recipe.training):
        return None
    reason = f"{gib(size)} of copies of the weights are more than the main memory, {gib(memory)}"
    return Problem("rollout_ahead", recipe.training.rollout_ahead, reason, "Lower it, or sample by a vLLM server.")


def gib(size: float) -> str:
    """Return a number of bytes in GiB."""
    return f"{size / 2**30:.2f} GiB"
