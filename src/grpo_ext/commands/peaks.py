"""Bytes of the moments at which a training process needs most memory: its forward, its backward, its rollout."""

from dataclasses import dataclass, replace
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedConfig, PreTrainedModel
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.truncation import scores_over_support
from grpo_ext.packing.lm_head import BLOCK, CPU_BLOCK, chunk_size
from grpo_ext.rollout.prompt_cache import ROOM

FLOAT = 4
"""Bytes of a float32."""
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
        tied: whether the LM head is the embedding.
    """

    layers: int
    hidden: int
    inner: int
    queries: int
    keys: int
    vocabulary: int
    adapted: int = 0
    tied: bool = False

    @property
    def head(self) -> int:
        """Number of weights of the LM head."""
        return self.vocabulary * self.hidden

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
            sizes = int(text.num_hidden_layers), hidden, inner, heads * each, keys, int(text.vocab_size)
            return cls(*sizes, tied=bool(getattr(text, "tie_word_embeddings", False)))
        except (AttributeError, TypeError):
            return None

    def with_adapter(self, model: PreTrainedModel) -> "Shape":
        """Return the shape of a model with the adapter that it has, if any."""
        adapters = (module for module in model.modules() if isinstance(module, BaseTunerLayer))
        return replace(self, adapted=sum(int(getattr(a, "in_features", 0)) for a in adapters) // self.layers)

    def layer(self, width: int, *, merged: bool = False, adapter: int = 0) -> int:
        """Return the bytes that one token leaves in one layer for the backward, at `width` bytes a number.

        Two norms keep their input in float32 and their product, the projections their inputs, the MLP four times its
        inner width. Attention keeps queries, keys and values for each query head, and its output twice; if prompts are
        shared (`merged`), keys and values for each key head, and its output once. Beside adapters norms are frozen and
        keep no product; where adapters copy their inputs, at `adapter` bytes a number, the projections keep none.
        """
        attention = 2 * (self.queries + self.keys) if merged else 5 * self.queries
        kept = 4 * self.hidden + attention + 4 * self.inner
        if self.adapted:
            kept -= 2 * self.hidden + (2 * self.hidden + self.inner if adapter else 0)
        return width * kept + 2 * FLOAT * self.hidden + self.adapted * adapter

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
        stream: bytes of a number between layers.
        merged: whether prompts are shared.
        adapter: bytes of a number in the copies of their inputs that adapters make; 0 without copies.
        checkpointed: whether layers are computed again for the backward.
        logits: bytes that the LM head holds at a time, beside its gradient.
        accumulated: whether an earlier micro-batch has left gradients.
    """

    tokens: int
    labels: int
    width: int
    stream: int
    merged: bool
    adapter: int
    checkpointed: bool
    logits: int
    accumulated: bool


def peak(shape: Shape, batch: MicroBatch, gradients: int, casts: int = 0) -> int:
    """Return the most bytes that gradients, activations and autocast's copies take together in a forward and backward.

    Four moments compete: the backward of the LM head, when every layer still keeps what it needs; that of the last
    layer, which gradient checkpointing computes again from its input; that of the first layer, when all gradients
    are there; and that of a tied embedding, whose gradient is added to the head's when the copies are gone.
    """
    stream = batch.tokens * shape.hidden * batch.stream
    layer = batch.tokens * shape.layer(batch.width, merged=batch.merged, adapter=batch.adapter)
    backward = layer + batch.tokens * shape.gradients(batch.width)
    below = stream * shape.layers if batch.checkpointed else stream + layer * (shape.layers - 1)
    above = 0 if batch.checkpointed else layer
    before = gradients if batch.accumulated else 0
    head = min(FLOAT * shape.head, gradients)  # 0 or little where only an adapter is trained
    waits = head if shape.tied and batch.accumulated else 0  # the head's gradient, for the embedding's
    at_head = before + head + below + above + batch.logits + 2 * FLOAT * batch.labels * shape.hidden
    at_last = max(before, head) + waits + below + backward
    at_first = gradients + waits + backward
    return max(casts + max(at_head, at_last, at_first), gradients + waits + head * shape.tied)


def logits_held(training: GRPOExtArguments, shape: Shape, labels: int, width: int) -> int:
    """Return the bytes that the LM head holds at a time, beside its gradient.

    TRL's has one buffer. Ours, on a CPU with shared prompts and over sampling supports, has a chunk of logits, which
    become their gradient in place unless the forward has kept them, and blocks in float32 of log-probabilities, their
    gradient, and one more for an entropy bonus.
    """
    ours = (training.use_cpu and training.prefix_setting != "false") or scores_over_support(training)
    if not ours:
        return min(labels, TILE[0]) * TILE[1] * width
    rows = chunk_size(labels, shape.vocabulary, width)
    chunk = rows * shape.vocabulary
    held = chunk * width * (1 + (rows == labels))
    block = CPU_BLOCK if training.use_cpu else BLOCK
    return held + min(block, chunk) * FLOAT * (2 + bool(training.entropy_coef))


def rollout_held(training: GRPOExtArguments, shape: Shape, prompt: int, width: int, copies: int) -> int:
    """Return the bytes that transformers' sampler holds at the end of a rollout, beside the weights; 0 with vLLM.

    These are `copies` of the weights, in 16 bits or in blocks, keys and values of every row, and its logits: those of
    the model, the same in float32, as the settings change them, and their probabilities.
    """
    if training.use_vllm:
        return 0
    rows = training.per_device_train_batch_size * int(training.steps_per_generation or 1)
    length = prompt + int(training.max_completion_length or 0) + ROOM
    cache = rows * length * shape.layers * 2 * shape.keys * width
    return copies + cache + rows * shape.vocabulary * (width + 3 * FLOAT)


def autocasts(training: GRPOExtArguments) -> bool:
    """Return whether forwards compute in 16 bits whatever the weights have."""
    return bool(training.bf16 or training.fp16)


def micro_batch(training: GRPOExtArguments, shape: Shape, prompt: int, each: int, computes: int) -> MicroBatch:
    """Return the sizes of the largest micro-batch, of weights of `each` bytes that compute in `computes`."""
    rows, completion = training.per_device_train_batch_size, int(training.max_completion_length or 0)
    merged = training.prefix_setting != "false"
    prompts = -(-rows // int(training.num_generations or 1)) if merged else rows
    whole = prompts * prompt + rows * completion
    limit = training.micro_batch_tokens  # a piece has at least one row
    tokens = whole if limit is None else min(whole, max(prompt + completion, limit))
    labels = min(tokens, rows * completion)
    copied = FLOAT if each < FLOAT and not autocasts(training) else computes
    return MicroBatch(
        tokens=tokens,
        labels=labels,
        width=computes,
        stream=max(each, computes),
        merged=merged,
        adapter=0 if computes == FLOAT else copied,
        checkpointed=bool(training.gradient_checkpointing),
        logits=logits_held(training, shape, labels, computes),
        accumulated=training.gradient_accumulation_steps > 1 or tokens < whole,
    )
