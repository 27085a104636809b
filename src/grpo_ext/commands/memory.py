"""An estimate of a device's memory, from a model's configuration and the sizes of a recipe's micro-batch."""

import copy
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedConfig, PreTrainedModel
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.batches import PIECE_RULES
from grpo_ext.config.machine import is_for_another
from grpo_ext.config.process_engine import samples_in_process
from grpo_ext.config.truncation import scores_kept_sets
from grpo_ext.errors import ABSENT, Problem
from grpo_ext.packing.lm_head import BLOCK, CPU_BLOCK, chunk_size
from grpo_ext.recipe.parts import Recipe
from grpo_ext.recipe.policies import InspectedPolicy

FLOAT = 4
"""Bytes of a float32."""
CPU_CACHE = 2**30
"""Bytes of vLLM's cache on a CPU, unless VLLM_CPU_KVCACHE_SPACE sets another size."""
TILE = (TOKEN_CHUNK_SIZE, _CHUNKED_LOGPROB_CHUNK_SIZE)
"""Tokens and words of the one buffer of logits that TRL's LM head has."""


@dataclass(frozen=True)
class Shape:
    """Widths of a decoder's layer.

    Args:
        layers: number of layers.
        hidden: width of the residual stream.
        inner: width of the MLP; of a mixture of experts, that of all experts of a token together.
        queries: width of all query heads together.
        keys: width of all key heads together.
        vocabulary: rows of the LM head.
        adapted: width of the inputs of a layer's adapters together.
    """

    layers: int
    hidden: int
    inner: int
    queries: int
    keys: int
    vocabulary: int
    adapted: int = 0

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Shape | None":
        """Read a configuration; None where it does not name its sizes as decoders do."""
        text: Any = config.get_text_config()
        try:
            hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
            inner = int(getattr(text, "intermediate_size", None) or 4 * hidden)
            if experts := getattr(text, "num_experts_per_tok", None):
                inner = int(experts) * int(getattr(text, "moe_intermediate_size", None) or inner)
            each = int(getattr(text, "head_dim", None) or hidden // heads)
            keys = each * int(getattr(text, "num_key_value_heads", None) or heads)
            return cls(int(text.num_hidden_layers), hidden, inner, heads * each, keys, int(text.vocab_size))
        except (AttributeError, TypeError):
            return None

    def with_adapter(self, model: PreTrainedModel) -> "Shape":
        """Return the shape of a model with the adapter that it has, if any."""
        adapters = (module for module in model.modules() if isinstance(module, BaseTunerLayer))
        return replace(self, adapted=sum(int(getattr(a, "in_features", 0)) for a in adapters) // self.layers)

    def layer(self, width: int, *, merged: bool = False) -> int:
        """Return the bytes that one token leaves in one layer for the backward, at `width` bytes a number.

        Two norms keep their input in float32 and their product, the projections their inputs, the MLP four times its
        inner width. Attention keeps queries, keys and values for each query head, and its output twice; if prompts are
        shared (`merged`), keys and values for each key head, and its output once.
        """
        attention = 2 * (self.queries + self.keys) if merged else 5 * self.queries
        return width * (4 * self.hidden + attention + 4 * self.inner) + 2 * FLOAT * self.hidden

    def gradients(self, width: int) -> int:
        """Return the bytes per token that the backward of a layer adds at its peak.

        That is in the MLP: the gradients of both factors of its product, while the product itself is free again, and
        of the residual stream, before and after.
        """
        return width * 2 * (self.inner + self.hidden)


@dataclass(frozen=True)
class MicroBatch:
    """The sizes of a micro-batch.

    Args:
        tokens: those that are computed, shared prompts once.
        labels: those that the loss scores.
        width: bytes of a number that is computed.
        merged: whether prompts are shared.
        adapter: bytes of a number in the copies of their inputs that adapters make; 0 without copies.
        checkpointed: whether layers are computed again for the backward.
        logits: bytes of logits that the LM head holds at a time.
        accumulated: whether an earlier micro-batch has left gradients.
    """

    tokens: int
    labels: int
    width: int
    merged: bool
    adapter: int
    checkpointed: bool
    logits: int
    accumulated: bool


def peak(shape: Shape, batch: MicroBatch, gradients: int) -> int:
    """Return the most bytes that gradients and activations take together in a forward and backward.

    Three moments compete: the backward of the LM head, when every layer still keeps what it needs; that of the last
    layer, which gradient checkpointing computes again from its input; and that of the first layer, when all gradients
    are there.

    Args:
        shape: of the model.
        batch: of the step.
        gradients: bytes of all gradients.
    """
    stream = batch.tokens * shape.hidden * batch.width
    layer = batch.tokens * (shape.layer(batch.width, merged=batch.merged) + shape.adapted * batch.adapter)
    backward = layer + batch.tokens * shape.gradients(batch.width)
    below = stream * shape.layers if batch.checkpointed else stream + layer * (shape.layers - 1)
    above = 0 if batch.checkpointed else layer
    before = gradients if batch.accumulated else 0
    head = min(FLOAT * shape.vocabulary * shape.hidden, gradients)  # 0 or little where only an adapter is trained
    at_head = before + head + below + above + batch.logits + 2 * FLOAT * batch.labels * shape.hidden
    return max(at_head, max(before, head) + below + backward, gradients + backward)


def logits_held(training: GRPOExtArguments, vocabulary: int, labels: int, width: int) -> int:
    """Return the bytes of logits that the LM head holds at a time.

    TRL's has one buffer. Ours, on a CPU with shared prompts and over kept sets, has a chunk of logits, which become
    their gradient in place unless the forward has kept them, and blocks in float32 of log-probabilities, their
    gradient, and one more for an entropy bonus.
    """
    ours = (training.use_cpu and training.prefix_setting != "false") or scores_kept_sets(training)
    if not ours:
        return min(labels, TILE[0]) * TILE[1] * width
    positions = chunk_size(labels, vocabulary, width)
    chunk = positions * vocabulary
    held = chunk * width * (1 + (positions == labels))
    block = CPU_BLOCK if training.use_cpu else BLOCK
    return held + min(block, chunk) * FLOAT * (2 + bool(training.entropy_coef))


def _width(dtype: str | None) -> int:
    return 2 if dtype in ("bfloat16", "float16") else FLOAT


def _autocasts(training: GRPOExtArguments) -> bool:
    return bool(training.bf16 or training.fp16)


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
    each, computes = _width(dtype), 2 if _autocasts(training) else _width(dtype)
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
        whole = prompts * prompt + rows * completion
        limit = training.micro_batch_tokens  # a piece has at least one row
        tokens = whole if limit is None else min(whole, max(prompt + completion, limit))
        labels = min(tokens, rows * completion)
        batch = MicroBatch(
            tokens=tokens,
            labels=labels,
            width=computes,
            merged=training.prefix_setting != "false",
            adapter=0 if computes == FLOAT else FLOAT if each < FLOAT and not _autocasts(training) else computes,
            checkpointed=bool(training.gradient_checkpointing),
            logits=logits_held(training, shape.vocabulary, labels, computes),
            accumulated=training.gradient_accumulation_steps > 1 or tokens < whole,
        )
        parts["activations"] = peak(shape, batch, parts["gradients"]) - parts["gradients"]
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


def of_recipe(
    recipe: Recipe, policy: InspectedPolicy, prompt: int | None, training: GRPOExtArguments | None = None
) -> dict[str, int]:
    """Return the estimate of a recipe, or of one with other `training` settings.

    A longest prompt that is not known counts as `max_prompt_length`, or 0.
    """
    shape = Shape.of(policy.empty.config) if policy.empty is not None else None
    shape = shape.with_adapter(policy.empty) if shape is not None and policy.empty is not None else None
    longest, settings = prompt or recipe.data.max_prompt_length or 0, training or recipe.training
    return estimate(settings, recipe.model.dtype, policy.parameters, policy.trained, shape, longest)


def fitting(recipe: Recipe, policy: InspectedPolicy, prompt: int | None) -> int | None:
    """Return the largest `micro_batch_tokens` by which the estimate does not exceed the device.

    None if there is none, if micro-batches fit as they are, or if another setting excludes it.
    """
    device, training = device_memory(recipe.training), copy.copy(recipe.training)

    def total(tokens: int | None) -> int:
        training.micro_batch_tokens = tokens
        return sum(of_recipe(recipe, policy, prompt, training).values())

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
