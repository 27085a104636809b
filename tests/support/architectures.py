"""Every causal architecture of transformers, tiny, with random parameters."""

from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

CAUSAL = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 50
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
NAMES = {
    32: "hidden_size d_model n_embd emb_dim embedding_size embedding_dim input_embedding_size output_embedding_size "
    "attention_hidden_size pronunciation_embed_dim shape_embed_dim lru_width",
    48: "intermediate_size ffn_dim d_inner dff dim_ff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size",
    16: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size kv_lora_rank q_lora_rank "
    "mamba_d_head mamba_head_dim sliding_window attention_window_size attention_chunk_size index_topk window_size "
    "sliding_window_size mamba_chunk_size chunk_size",
    12: "qk_head_dim",
    8: "head_dim v_head_dim qk_nope_head_dim mamba_d_state state_size ssm_state_size linear_key_head_dim "
    "linear_value_head_dim linear_head_dim index_head_dim dim_head d_head",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_attention_heads n_head n_heads attention_heads decoder_attention_heads "
    "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads num_kv_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts mamba_n_heads mamba_num_heads linear_num_value_heads "
    "linear_num_heads index_n_heads qk_rope_head_dim rotary_dim",
    2: "num_key_value_heads num_experts_per_tok moe_topk moe_k mamba_expand linear_num_key_heads",
    1: "n_group topk_group n_shared_experts num_shared_experts mamba_n_groups n_groups",
    512: "max_position_embeddings n_positions max_seq_len n_ctx max_target_positions context_length",
    VOCABULARY: "vocab_size pronunciation_vocab_size shape_vocab_size vocab_size_per_layer_input",
}
SIZES = {name: size for size, names in NAMES.items() for name in names.split()}
FULL_EVERY_SECOND = ["sliding_attention", "full_attention"] * 2
LATENT = {"num_key_value_heads": 4, "head_dim": 4}
"""Attention over latent keys has as many key heads as query heads, and `head_dim` is its rotary part."""
OWN: dict[str, dict[str, Any]] = {
    "aria_text": {"moe_num_shared_experts": 1},
    "axk1": LATENT,
    "axk2": LATENT,
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": FULL_EVERY_SECOND,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]} for kind in FULL_EVERY_SECOND
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": LATENT | {"num_experts_per_tok": 2},
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "layer_types": FULL_EVERY_SECOND,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
    },
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hy_v4": LATENT,
    "inkling_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "d_rel": 4,
        "rel_extent": 32,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": LATENT | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": LATENT | {"num_layers": 2, "zero_expert_num": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "ministral": {"head_dim": 8},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "minicpm3": LATENT,
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_embed_dim": 16,
    },
    "xmod": {"default_language": "en_XX"},
    "youtu": LATENT,
    "zamba": {
        "num_hidden_layers": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 4,
        "adapter_rank": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""What the sizes alone leave wrong."""
RECURRENT = (
    "bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid", "qwen3_5",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba2",
)  # fmt: skip
"""Those with recurrent layers that share prompts in the loss and in rollouts."""
NOT_BUILT = {
    "blt": "transformers' own forward looks for a number of layers that its config does not have",
    **dict.fromkeys(
        ("fuyu", "gemma3", "gemma4", "gemma4_unified", "git", "got_ocr2", "phi4_multimodal"),
        "a model of images and text; its text model is a row of its own, or none of AutoModelForCausalLM's",
    ),
    "gemma3n": "needs the timm package",
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"), "drafts for another model, whose cache it reads"
    ),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "made of three models, and writes sound"),
    "reformer": "does not generate while it is in training",
    "xlstm": "its state has another shape than its recurrence expects, in transformers 5.17",
}
SINGLE = ("xglm", "xlnet", "granite_swa", "granitemoe_swa")
"""Those with a float32 constant in their forward, with which padding is NaN in float64."""


def config(model_type: str) -> transformers.PreTrainedConfig:
    """A tiny config; that of the text where the causal model is a part of a greater one."""
    cls = CONFIG_MAPPING[model_type]
    text = cls.sub_configs.get("text_config")
    if text is not None and _class(model_type).config_class is text:
        cls, model_type = text, text.model_type
    return cls(**TOKENS | _sizes(cls) | OWN.get(model_type, {}))


def _sizes(cls: type[transformers.PreTrainedConfig]) -> dict[str, Any]:
    """Of all `SIZES` those that this config has, one name for each of its fields."""
    defaults, fields = vars(cls()), {}
    for name in SIZES:
        field = cls.attribute_map.get(name, name)
        if defaults.get(field) is not None:
            fields[field] = name
    sizes: dict[str, Any] = {field: SIZES[name] for field, name in fields.items()}
    if defaults.get("is_decoder") is False:
        sizes["is_decoder"] = True
    return sizes


def _class(model_type: str) -> Any:
    return transformers.AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[model_type]]


def model(model_type: str, settings: transformers.PreTrainedConfig | None = None) -> Any:
    """A tiny model whose parameters are none of them at their initial values, in float64 where it can be."""
    torch.manual_seed(0)
    made = _class(model_type)._from_config(settings or config(model_type), experts_implementation="eager")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.25 * torch.randn_like(parameter))
    return made.eval() if model_type in SINGLE else made.double().eval()
