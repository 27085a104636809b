"""Every architecture of transformers for images and text, tiny, with random parameters."""

from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from support import architectures

IMAGE_TEXT = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
TOWER = {"depth": 1, "image_size": 32}
"""Sizes of the parts that see, with `LARGEST` for every other; no forward of text runs them."""
LARGEST = 32
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
"""Rotary embeddings over time, height and width, for heads of 8 dimensions."""
TWO_AXES = {"rope_parameters": AXES["rope_parameters"] | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}}
OWN: dict[str, dict[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": 49}},
    "cohere2_vision": {"alignment_intermediate_size": 64},
    "cosmos3_edge_text": AXES,
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"] * 2, "num_experts_per_tok": 2},
    "emu3": {"vocabulary_map": {"<|extra_200|>": 49}},
    "ernie4_5_vl_moe_text": AXES | {"moe_intermediate_size": [16, 16]},
    "glm4v_text": AXES,
    "granite4_vision": {"deepstack_layer_map": [], "spatial_target_layers": [], "downsample_rate": "4/8"},
    "glm4v_moe_text": TWO_AXES,
    "glm5_next_text": {"num_key_value_heads": 4, "qk_rope_head_dim": 0},
    "glm_ocr_text": AXES,
    "hunyuan_vl_text": AXES | {"head_dim": 8},
    "mistral4": {"num_key_value_heads": 4},
    "muse_glimmer": {"out_hidden_size": 64, "projector_hidden_size": 64},
    "paddleocr_vl_text": AXES,
    "qwen2_5_omni_thinker": {"vision_start_token_id": 48},
    "qwen2_5_omni_text": AXES,
    "qwen2_5_vl_text": AXES,
    "qwen2_vl_text": AXES,
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 48},
    "step3p5": {"sliding_window": 16},
}
"""What the sizes alone leave wrong."""
NOT_BUILT = {
    **dict.fromkeys(
        ("blip", "blip-2", "idefics", "instructblip", "instructblipvideo", "kosmos-2", "udop"),
        "does not write without a picture",
    ),
    **dict.fromkeys(("pix2struct", "pp_formulanet"), "reads a picture in place of a prompt"),
    **dict.fromkeys(("diffusion_gemma", "pi0"), "does not write token after token"),
    **dict.fromkeys(("fast_vlm", "gemma3n", "perception_lm"), "needs the timm package"),
    "vision-encoder-decoder": "made of two models",
}


def _small(size: Any) -> Any:
    """A size of a part that sees, or sizes, at most `LARGEST`."""
    if isinstance(size, list | tuple):
        return [_small(one) for one in size]
    return min(size, LARGEST) if type(size) is int else size


def _settings(cls: type[transformers.PreTrainedConfig], name: str = "") -> dict[str, Any]:
    """A config's tiny sizes, and those of its parts."""
    settings, default = architectures._sizes(cls), cls()
    for part in cls.sub_configs:
        if getattr(default, part, None) is not None:
            kind = type(getattr(default, part))
            if part == "text_config" and (text := f"{cls.model_type}_text") in CONFIG_MAPPING:
                kind = CONFIG_MAPPING[text]
            settings[part] = _settings(kind, part)
    if "text" in name or not name:
        own = architectures.OWN | OWN
        settings = architectures.TOKENS | settings | own.get(cls.model_type, {})
    else:
        given = {field: TOWER.get(field, _small(size)) for field, size in default.to_dict().items()}
        settings = {field: size for field, size in given.items() if size != getattr(default, field, None)} | settings
    return settings | ({"model_type": cls.model_type} if name else {})


def sees(model: Any) -> bool:
    """Whether a model takes more than text."""
    return model.config.get_text_config(decoder=True) is not model.config


def config(model_type: str) -> transformers.PreTrainedConfig:
    """A tiny config."""
    cls = CONFIG_MAPPING[model_type]
    return cls(**_settings(cls))


def model(model_type: str) -> Any:
    """A tiny model whose parameters are none of them at their initial values, in float64."""
    torch.manual_seed(0)
    kind = transformers.AutoModelForImageTextToText._model_mapping[CONFIG_MAPPING[model_type]]
    made = kind._from_config(config(model_type), experts_implementation="eager")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.25 * torch.randn_like(parameter))
    return made.double().eval()
