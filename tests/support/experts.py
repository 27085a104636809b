"""Mixtures of experts: a tiny Qwen3-MoE."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

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
