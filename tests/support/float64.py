"""Training in float64 throughout, so that a comparison of trained weights measures no rounding."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralRMSNorm, MistralRotaryEmbedding
from trl.trainer import utils

from grpo_ext.packing.lm_head import LabelledLogProbs

FLOAT64 = {"model_init_kwargs": {"dtype": torch.float64}}
"""Settings of a trainer whose model is loaded in float64."""


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Let norms and rotary angles of Llama and Mistral, and TRL's LM head, compute in the dtype of the model."""
    with (
        patch.object(LlamaRMSNorm, "forward", _norm),
        patch.object(LlamaRotaryEmbedding, "forward", _rotary),
        patch.object(MistralRMSNorm, "forward", _norm),
        patch.object(MistralRotaryEmbedding, "forward", _rotary),
        patch.object(utils, "_ChunkedLogProbFunction", LabelledLogProbs),
    ):
        yield


class _Wide(ModuleType):
    """torch, whose float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


@contextmanager
def float64_in(model: nn.Module) -> Iterator[None]:
    """Norms, rotary angles, routers, decays and states of any model of transformers compute in float64 too."""
    sources = {sys.modules[type(module).__module__] for module in model.modules()}
    with ExitStack() as patches:
        patches.enter_context(patch.object(Tensor, "float", Tensor.double))
        for source in sources:
            if source.__name__.startswith("transformers.models.") and hasattr(source, "torch"):
                patches.enter_context(patch.object(source, "torch", _Wide("torch")))
        yield


def _norm(self, hidden):
    return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], self.weight, self.variance_epsilon)


def _rotary(self, hidden, position_ids):
    angles = (position_ids[..., None].to(hidden.dtype) * self.inv_freq.to(hidden.dtype)).repeat(1, 1, 2)
    return angles.cos(), angles.sin()
