"""Messages between a trainer and the process that samples for it. Both sides pickle them.

The trainer sends a `SampleRequest`. The process answers with a list of `Sampled`, one for each context, or with a
`Failure`; before that, while it decodes, with empty lists.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class ModelSpec:
    """How the process builds the policy without adapters."""

    kind: type[PreTrainedModel]
    config: PreTrainedConfig
    generation_config: GenerationConfig
    """The model's own, without the options that the trainer's settings alone decide on."""
    autocast: torch.dtype | None
    """dtype of mixed precision, if the forward computes in it."""
    embedding_dtype: torch.dtype | None
    """dtype that embeddings return where the LM head was cast to float32; None where it was not."""


@dataclass(frozen=True)
class Decoding:
    """How the process decodes."""

    config: GenerationConfig
    ends: frozenset[int]
    """Tokens that end a completion."""
    pad: int
    multiple: int | None
    """Prompts are padded to a multiple of this number of tokens."""
    with_support: bool
    """Whether to return the sets that a truncated sampler drew from."""


@dataclass(frozen=True)
class Machine:
    """Where the process computes, and how torch does."""

    device: torch.device
    threads: int
    matmul_precision: str
    deterministic: bool


class Start(NamedTuple):
    """Everything that a new process needs."""

    model: ModelSpec
    decoding: Decoding
    machine: Machine


class Place(NamedTuple):
    """Where a file has a weight or buffer."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int


Table: TypeAlias = tuple[Place, ...]


class SampleRequest(NamedTuple):
    """Completions to sample."""

    start: Start | None
    """Given to a new process only."""
    weights: Table | None
    """Given where the weights differ from those of the request before; the descriptor of their file follows."""
    contexts: list[list[int]]
    limits: list[int]
    uniforms: np.ndarray
    """Numbers in [0, 1), [rows, tokens], by which tokens are sampled."""


class Failure(NamedTuple):
    """The answer to a request that failed."""

    reason: str
    unsupported: bool
    """Whether the model or a setting cannot be decoded exactly, so that asking again is of no use."""
