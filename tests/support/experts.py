"""Mixtures of experts: a tiny Qwen3-MoE, and gate weights of given experts written out for several families."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_ext.packing.routes import mixtures_of, routed
from support import tiny


def model(seed: int = 0) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    settings = {
        "vocab_size": len(tiny.WORDS), "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 1,
        "initializer_range": 0.3, "tie_word_embeddings": False, "router_aux_loss_coef": 0.0, "norm_topk_prob": True,
    }  # fmt: skip
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings))


# The gates of other experts than the router's choice, by each model's paper; without any code of replay.


def _softmax_of_all(router, hidden: Tensor, experts: Tensor, normalised: bool) -> tuple[Tensor, Tensor]:
    logits = functional.linear(hidden, router.weight)
    chosen = logits.softmax(dim=-1).gather(1, experts)
    return logits, chosen / chosen.sum(dim=-1, keepdim=True) if normalised else chosen


def _softmax_of_chosen(router, hidden: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    logits = functional.linear(hidden, router.weight, router.bias)
    return logits, logits.gather(1, experts).softmax(dim=-1)


def _sigmoid(router, hidden: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    logits = functional.linear(hidden, router.weight)
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
}
"""Logits and gate weights of `experts` [tokens, chosen], by architecture."""


@contextmanager
def sent_to(network, family: str, experts: Tensor) -> Iterator[None]:
    """Send the tokens of plain forwards to `experts` [tokens, layers, chosen], by the formulas above."""
    routers = {n: getattr(block, "gate", getattr(block, "router", None)) for n, block in mixtures_of(network).items()}
    try:
        for number, router in routers.items():

            def forward(hidden, router=router, number=number):
                given = experts[:, number].long()
                logits, weights = GATES[family](router, hidden.reshape(-1, hidden.shape[-1]), given)
                return logits, weights, given

            router.forward = forward
        yield
    finally:
        for router in routers.values():
            vars(router).pop("forward", None)


@torch.no_grad()
def chosen(network, ids: list[int]) -> Tensor:
    """The experts to which a model sends the tokens of a row, but the last, as vLLM returns them."""
    found = torch.zeros(len(ids), len(network.model.layers), network.config.num_experts_per_tok, dtype=torch.uint8)

    def noted(layer, own):
        found[:, layer] = own
        return own

    with routed(network, noted):
        network(input_ids=torch.tensor([ids]))
    return found[:-1]
