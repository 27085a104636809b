"""Mixtures of experts: a tiny Qwen3-MoE, and gate weights of given experts written out for several families."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

from grpo_ext.packing.routes import routers_of
from support import tiny
from support.float64 import _norm, _rotary, float64_throughout


def model(seed: int = 0, dtype: torch.dtype = torch.float32, **overrides) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    settings = {
        "vocab_size": len(tiny.WORDS), "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 1,
        "initializer_range": 0.3, "tie_word_embeddings": False, "router_aux_loss_coef": 0.0, "norm_topk_prob": True,
    }  # fmt: skip
    network = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(settings | overrides))).to(dtype)
    if dtype == torch.float64:
        network.set_experts_implementation("eager")  # torch multiplies no groups in float64
    return network


@contextmanager
def in_float64() -> Iterator[None]:
    """Qwen3-MoE's norms, angles and gates compute in float32 whatever the model is; here they do not."""

    def route(self, hidden):
        logits = functional.linear(hidden, self.weight)
        values, indices = torch.topk(logits.softmax(dim=-1), self.top_k, dim=-1)
        return logits, values / values.sum(dim=-1, keepdim=True), indices

    with (
        float64_throughout(),
        patch.object(qwen.Qwen3MoeRMSNorm, "forward", _norm),
        patch.object(qwen.Qwen3MoeRotaryEmbedding, "forward", _rotary),
        patch.object(qwen.Qwen3MoeTopKRouter, "forward", route),
    ):
        yield


# The gates of other experts than the router's choice, by each model's paper; without any code of replay.


def _softmax_of_all(router, hidden: Tensor, experts: Tensor, normalised: bool) -> tuple[Tensor, Tensor]:
    logits = functional.linear(hidden, router.weight)
    kind = torch.float64 if logits.dtype == torch.float64 and router.__class__.forward.__module__ == __name__ else None
    chosen = logits.softmax(dim=-1, dtype=kind or torch.float32).gather(1, experts)
    weights = chosen / chosen.sum(dim=-1, keepdim=True) if normalised else chosen
    return logits, weights.to(logits.dtype)


def _softmax_of_chosen(router, hidden: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    logits = functional.linear(hidden, router.weight, router.bias)
    return logits, logits.gather(1, experts).softmax(dim=-1)


def _sigmoid(router, hidden: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    logits = functional.linear(hidden.float(), router.weight.float())
    chosen = logits.sigmoid().gather(1, experts)
    if router.norm_topk_prob:
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
    return logits, chosen * router.routed_scaling_factor


GATES = {
    "qwen2_moe": lambda r, h, e: _softmax_of_all(r, h, e, r.norm_topk_prob),
    "qwen3_moe": lambda r, h, e: _softmax_of_all(r, h, e, r.norm_topk_prob),
    "mixtral": lambda r, h, e: _softmax_of_all(r, h, e, True),
    "olmoe": lambda r, h, e: _softmax_of_all(r, h, e, r.norm_topk_prob),
    "gpt_oss": _softmax_of_chosen,
    "deepseek_v3": _sigmoid,
    "glm4_moe": _sigmoid,
    "dots1": _sigmoid,
}
"""Logits and gate weights of `experts` [tokens, chosen], by architecture."""


@contextmanager
def sent_to(network, family: str, experts: Tensor) -> Iterator[None]:
    """Send the tokens of plain forwards to `experts` [tokens, layers, chosen], by the formulas above."""
    routers = [router.module for router in routers_of(network)]
    try:
        for number, router in enumerate(routers):

            def forward(hidden, router=router, number=number):
                given = experts[:, number].long()
                logits, weights = GATES[family](router, hidden.reshape(-1, hidden.shape[-1]), given)
                return logits, weights, given

            router.forward = forward
        yield
    finally:
        for router in routers:
            vars(router).pop("forward", None)
