"""An estimate of a device's memory, from a model's configuration and the sizes of a recipe's micro-batch."""

from dataclasses import dataclass
from typing import Any

import psutil
import torch
from transformers import PreTrainedConfig

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.machine import is_for_another
from grpo_ext.errors import ABSENT, Problem
from grpo_ext.packing.lm_head import CHUNK
from grpo_ext.recipe.parts import Recipe
from grpo_ext.recipe.policies import InspectedPolicy

FLOAT = 4
"""Bytes of a float32."""
CPU_CACHE = 2**30
"""Bytes of vLLM's cache on a CPU, unless VLLM_CPU_KVCACHE_SPACE sets another size."""
CHUNKS = 3
"""Chunks of logits that the LM head holds at a time: log-probabilities, their gradient, its product."""


@dataclass(frozen=True)
class Shape:
    """Widths of a decoder's layer.

    Args:
        layers: number of layers.
        hidden: width of the residual stream.
        inner: width of the MLP; of a mixture of experts, that of all experts of a token together.
        queries: width of all query heads together.
        vocabulary: rows of the LM head.
    """

    layers: int
    hidden: int
    inner: int
    queries: int
    vocabulary: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Shape | None":
        """Read a configuration; None where it does not name its sizes as decoders do."""
        text: Any = config.get_text_config()
        try:
            hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
            inner = int(getattr(text, "intermediate_size", None) or 4 * hidden)
            if experts := getattr(text, "num_experts_per_tok", None):
                inner = int(experts) * int(getattr(text, "moe_intermediate_size", None) or inner)
            queries = heads * int(getattr(text, "head_dim", None) or hidden // heads)
            return cls(int(text.num_hidden_layers), hidden, inner, queries, int(text.vocab_size))
        except (AttributeError, TypeError):
            return None

    def layer(self, width: int) -> int:
        """Return the bytes that one token leaves in one layer for the backward, at `width` bytes a number.

        Two norms keep their input in float32 and their product, the projections their inputs, attention its queries,
        keys and values for each head and its output, the MLP four times its inner width.
        """
        return width * (4 * self.hidden + 5 * self.queries + 4 * self.inner) + 2 * FLOAT * self.hidden


def activations(shape: Shape, tokens: int, labels: int, *, width: int, checkpointed: bool) -> int:
    """Return the bytes of a forward of `tokens` and the LM head at `labels` positions, kept for the backward.

    With gradient checkpointing each layer keeps its input, and one layer at a time is computed again. The gradients of
    one layer count as much as what it keeps.
    """
    one = tokens * shape.layer(width)
    body = shape.layers * tokens * shape.hidden * width + one if checkpointed else shape.layers * one
    body += one
    logits = min(labels * shape.vocabulary, CHUNK)
    return body + CHUNKS * FLOAT * logits + 2 * FLOAT * labels * shape.hidden


def _width(dtype: str | None) -> int:
    return 2 if dtype in ("bfloat16", "float16") else FLOAT


def estimate(
    training: GRPOExtArguments, dtype: str | None, parameters: int, trained: int, shape: Shape | None, prompt: int
) -> dict[str, int]:
    """Return the bytes of each part of a training process's memory, without sharding.

    Args:
        training: the training settings.
        dtype: of the policy's weights; None is float32.
        parameters: number of parameters of the policy.
        trained: number of them that are trained.
        shape: of the policy; None leaves activations out.
        prompt: tokens of the longest prompt.
    """
    each, computes = _width(dtype), 2 if training.bf16 or training.fp16 else _width(dtype)
    rows, completion = training.per_device_train_batch_size, int(training.max_completion_length or 0)
    prompts = rows if training.prefix_setting == "false" else -(-rows // int(training.num_generations or 1))
    parts = {
        "weights": parameters * each,
        "gradients": trained * each,
        "Adam": 2 * trained * each,
        "reference": parameters * each if training.beta and trained == parameters else 0,
        "autocast": parameters * computes if computes < each else 0,
    }
    if shape is not None:
        tokens, labels = prompts * prompt + rows * completion, rows * completion
        checkpointed = bool(training.gradient_checkpointing)
        parts["activations"] = activations(shape, tokens, labels, width=computes, checkpointed=checkpointed)
    if training.use_vllm and training.vllm_mode == "colocate":
        parts["engine"] = _engine(training, parameters * computes)
    return parts


def _engine(training: GRPOExtArguments, weights: int) -> int:
    """Return the bytes of a colocated engine while the policy trains."""
    if training.vllm_enable_sleep_mode:
        return 0
    device = device_memory(training)
    if training.use_cpu or device is None:
        return weights + CPU_CACHE
    return int(training.vllm_gpu_memory_utilization * device)


def device_memory(training: GRPOExtArguments) -> int | None:
    """Return the bytes of the device that trains; None if the run is planned for another machine."""
    if is_for_another(training):
        return None
    if training.use_cpu or not torch.cuda.is_available():
        return int(psutil.virtual_memory().total)
    return int(torch.cuda.get_device_properties(0).total_memory)


def of_recipe(recipe: Recipe, policy: InspectedPolicy, prompt: int | None) -> dict[str, int]:
    """Return the estimate of a recipe; a longest prompt that is not known counts as `max_prompt_length`, or 0."""
    shape = Shape.of(policy.empty.config) if policy.empty is not None else None
    prompt = prompt or recipe.data.max_prompt_length or 0
    return estimate(recipe.training, recipe.model.dtype, policy.parameters, policy.trained, shape, prompt)


def too_large(recipe: Recipe, parts: dict[str, int]) -> Problem | None:
    """Return a warning if the estimate exceeds the device, unless its weights are sharded."""
    device, total = device_memory(recipe.training), sum(parts.values())
    if device is None or total <= device or recipe.training.deepspeed or recipe.training.fsdp:
        return None
    largest = max(parts, key=lambda name: parts[name])
    reason = f"by the estimate it is {gib(total)}, most of it for {largest}, and the device has {gib(device)}"
    cures = {
        "activations": "Halve per_device_train_batch_size and double gradient_accumulation_steps.",
        "engine": "Lower vllm_gpu_memory_utilization, or set vllm_mode: server.",
    }
    return Problem("memory", ABSENT, reason, cures.get(largest, "Shard it (--accelerate_config fsdp2), or use_peft."))


def gib(size: float) -> str:
    """Return a number of bytes in GiB."""
    return f"{size / 2**30:.2f} GiB"
