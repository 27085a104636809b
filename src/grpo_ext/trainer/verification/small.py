"""A model of the same architecture, small enough to compute row by row on any machine."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from grpo_ext.errors import ConfigError, Problem

VOCABULARY = 48
LAYERS = 2
SIZES: tuple[tuple[int | float, str], ...] = (
    (32, "hidden_size d_model n_embd"),
    (48, "intermediate_size moe_intermediate_size shared_expert_intermediate_size ffn_dim n_inner"),
    (LAYERS, "num_hidden_layers n_layer max_window_layers"),
    (4, "num_attention_heads n_head num_experts num_local_experts n_routed_experts"),
    (2, "num_key_value_heads num_experts_per_tok"),
    (8, "head_dim"),
    (512, "max_position_embeddings n_positions"),
    (VOCABULARY, "vocab_size"),
    (0.0, "attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop"),
)
"""Sizes, under the names that architectures give them."""
SPREAD = 0.3
"""Initial spread of the weights, at which probabilities and gradients differ between tokens."""


def small_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration with small sizes."""
    settings = config.get_text_config().to_dict()
    small: dict[str, Any] = {
        name: size for size, names in SIZES for name in names.split() if settings.get(name) is not None
    }
    small |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "initializer_range": SPREAD}
    if settings.get("layer_types"):
        small["layer_types"] = settings["layer_types"][:LAYERS]
    if settings.get("num_attention_heads") == settings.get("num_key_value_heads"):
        small["num_key_value_heads"] = small.get("num_attention_heads")
    kept = {
        k: v for k, v in settings.items() if k not in ("quantization_config", "torch_dtype", "dtype", "_name_or_path")
    }
    return type(config.get_text_config())(**kept | small)


def save_small(source: str, folder: Path, *, trust_remote_code: bool = False) -> None:
    """Write a small random model of the class of `source`, and a tokenizer for it, to `folder`.

    Raises:
        ConfigError: the class is unknown, or a small model cannot be built.
    """
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        cure = "Name a local folder, or let this machine reach the hub once."
        reason = f"its config.json cannot be read ({error})"
        raise ConfigError([Problem("model_name_or_path", source, reason, cure)]) from error
    try:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small_config(config), trust_remote_code=trust_remote_code)
    except Exception as error:  # an architecture may raise anything for sizes that it does not expect
        reason = f"a small {config.model_type} cannot be built ({error}), so this architecture is not verified"
        cure = "Verify the recipe with --model_name_or_path of another."
        raise ConfigError([Problem("model_name_or_path", source, reason, cure)]) from error
    model.float().save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer with placeholder words."""
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, VOCABULARY))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", **names)


def load_small(folder: Path, dtype: torch.dtype, adapter: PeftConfig | None = None) -> PreTrainedModel | PeftModel:
    """Load the model of `folder` in one process, with a new adapter where the trainer has one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model if adapter is None else get_peft_model(model, adapter)
