"""Tiny models of images and text, their processors, and prompts with pictures: no download, no torchvision."""

import json
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from datasets import Dataset
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from trl.trainer import utils

from grpo_ext import GRPOExtTrainer
from grpo_ext.data.images import with_images
from grpo_ext.packing.lm_head import LabelledLogProbs

MARKS = {
    "image_token": "<image>",
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    "vision": "<|image_pad|>",
    "video": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}
IDEFICS = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
WORDS = ["<pad>", "<eos>", "<unk>", *MARKS.values(), *IDEFICS, *"abcdefghijklmnopqrstuvwxyz0123456789 +=.:?\n"]
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}IMAGE{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}{{ c['function']['arguments'] | tojson }}"
    "{% endfor %}"
    "{{ '<eos>' if m['role'] == 'assistant' else '=' }}{% endfor %}"
)
CALLS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "=",
    "fields": {
        "tool_calls": {
            **{"open_pattern": "[a-y0-9]", "close_pattern": "<eos>|$", "repeats": True, "content": "text"},
            "transform": {"type": "function", "function": {"name": "look", "arguments": {}}},
        },
        "content": {"close_pattern": "<eos>|(?=[a-y0-9])", "content": "text"},
    },
}
"""Reads a call of `look` in whatever has one of the letters a to y, or a digit."""
IMAGE_OF = {
    "gemma3": "<boi>",
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl"), "<|vision_start|><|image_pad|><|vision_end|>"),
}
FAMILIES = ("gemma3", "idefics3", "llava", "llava_next", "qwen2_5_vl", "qwen3_vl")


class NoVideos(transformers.BaseVideoProcessor):
    """Stands in for the processors of videos, which need torchvision."""

    def __init__(self, **_: object) -> None:
        pass


class Watched(GRPOExtTrainer):
    """Keeps the rollouts and the columns of its generations."""

    def _generate(self, prompts):
        self.generated = super()._generate(prompts)
        return self.generated

    def _generate_and_score_completions(self, inputs):
        self.batch = super()._generate_and_score_completions(inputs)
        return self.batch


def tokenizer(family: str) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(word, normalized=False) for word in (*MARKS.values(), *IDEFICS)])
    extra = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"} if family == "gemma3" else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        extra_special_tokens=extra,
        chat_template=TEMPLATE.replace("IMAGE", IMAGE_OF.get(family, "<image>")),
    )


def processor(family: str) -> ProcessorMixin:
    words = tokenizer(family)
    common: dict[str, Any] = {"tokenizer": words, "chat_template": words.chat_template}
    llava = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    square = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    if family == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
        return transformers.Gemma3Processor(image_processor=images, image_seq_length=4, **common)
    if family == "idefics3":
        images = Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
        return transformers.Idefics3Processor(image_processor=images, image_seq_len=1, **common)
    if family == "llava":
        return transformers.LlavaProcessor(image_processor=LlavaImageProcessorPil(**square), **llava, **common)
    if family == "llava_next":
        images = LlavaNextImageProcessorPil(**square, image_grid_pinpoints=[[56, 28], [28, 56]])
        return transformers.LlavaNextProcessor(image_processor=images, **llava, **common)
    patch = 14 if family == "qwen2_5_vl" else 16
    images = Qwen2VLImageProcessorPil(patch_size=patch, min_pixels=28 * 28, max_pixels=84 * 84)
    kind = transformers.Qwen2_5_VLProcessor if family == "qwen2_5_vl" else transformers.Qwen3VLProcessor
    return kind(image_processor=images, video_processor=NoVideos(), **common)


def model(family: str, seed: int = 0, dtype: torch.dtype = torch.float64, **sizes: Any) -> PreTrainedModel:
    """Return a model whose parameters are all away from their initial zeros and ones; `sizes` of its decoder."""
    ids = {word: i for i, word in enumerate(WORDS)}
    text = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    } | sizes
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "initializer_range": 0.3,
    }
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    own: dict[str, dict[str, Any]] = {
        "gemma3": {
            "text_config": text | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            "vision_config": vision,
            "mm_tokens_per_image": 4,
            "image_token_index": ids["<image>"],
            "boi_token_index": ids["<boi>"],
            "eoi_token_index": ids["<eoi>"],
        },
        "idefics3": {
            "text_config": text | {"model_type": "llama"},
            "vision_config": vision,
            "image_token_id": ids["<image>"],
            "scale_factor": 2,
            "pad_token_id": 0,
        },
        "llava": {
            "text_config": text | {"model_type": "llama"},
            "vision_config": vision | {"model_type": "clip_vision_model"},
            "image_token_id": ids["<image>"],
            "image_seq_length": 4,
        },
        "llava_next": {
            "text_config": text | {"model_type": "llama"},
            "vision_config": vision | {"model_type": "clip_vision_model"},
            "image_token_id": ids["<image>"],
            "image_grid_pinpoints": [[56, 28], [28, 56]],
        },
        "qwen2_5_vl": {
            "text_config": text | rope,
            "vision_config": {
                "depth": 2,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "out_hidden_size": 32,
                "patch_size": 14,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
        },
        "qwen3_vl": {
            "text_config": text | rope,
            "vision_config": {
                "depth": 2,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "out_hidden_size": 32,
                "patch_size": 16,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
        },
    }
    marks = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    settings = own[family] | (marks if family.startswith("qwen") else {}) | {"tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(family, **settings)
    torch.manual_seed(seed)
    made = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made.to(dtype).eval()


def prefer(policy: PreTrainedModel, token: int, weight: float) -> None:
    """Let a model sample a token often, or never: by a part of its states that nothing but the head reads."""
    head = policy.get_output_embeddings().weight.data
    policy.get_input_embeddings().weight.data[:, 0], head[:, 0] = 4.0, 0.0
    head[token, 0] = weight
    for name, parameter in policy.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data[0] = 0.0


def save(folder: Path, *, ends: float = 0.0, **sizes: Any) -> str:
    """Write a model and its processor as vLLM loads them without torchvision: by code that comes with the model.

    The model does not sample the image's token by itself, so that vLLM, where it is left out, has the same logits.
    The higher `ends`, the shorter its turns.
    """
    made = model("idefics3", dtype=torch.float32, **sizes)
    prefer(made, made.config.image_token_id, -30.0)
    made.get_output_embeddings().weight.data[made.config.text_config.eos_token_id, 0] = ends
    made.save_pretrained(folder)
    processor("idefics3").save_pretrained(folder)
    (folder / "pictures.py").write_text(
        "from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil\n\n\n"
        "class Pictures(Idefics3ImageProcessorPil):\n    pass\n"
    )
    settings = json.loads((folder / "processor_config.json").read_text())
    settings["image_processor"]["auto_map"] = {"AutoImageProcessor": "pictures.Pictures"}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return str(folder)


def coloured(count: int, column: str = "image") -> Dataset:
    """Return prompts that differ in their pictures only, red ones and blue ones, each with the letters to answer."""
    made = []
    for i in range(count):
        one = Image.new("RGB", (28, 28), ("red", "blue")[i % 2])
        one.putpixel((i % 28, i // 28), (0, 255, 0))
        prompt = [{"role": "user", "content": "what is it?"}]
        made.append(
            {
                "prompt": prompt,
                column: [one] if column == "images" else one,
                "solution": ("abcdefghijklm", "nopqrstuvwxyz")[i % 2],
            }
        )
    return Dataset.from_list(made)


def named(completions: list[Any], solution: list[str], **_: object) -> list[float]:
    """A reward: the share of characters that are letters of the picture."""
    texts = [completion[-1]["content"] for completion in completions]
    return [sum(one in letters for one in text) / 8 for text, letters in zip(texts, solution, strict=True)]


def picture(seed: int, width: int = 56, height: int = 56) -> Image.Image:
    noise = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(noise.to(torch.uint8).numpy(), "RGB")


SIZES = ((56, 56), (84, 56), (56, 84), (28, 56))


def rows(counts: Sequence[int], column: str = "images") -> Dataset:
    """Return different prompts with so many pictures each, of different sizes."""
    made, seed = [], 0
    for i, count in enumerate(counts):
        pictures = [picture(seed + n, *SIZES[(seed + n) % len(SIZES)]) for n in range(count)]
        seed += count
        prompt = [{"role": "user", "content": f"{'abcdefgh'[: 2 + i % 5]}{i}:"}]
        made.append({"prompt": prompt, column: pictures if column == "images" else next(iter(pictures), None)})
    return Dataset.from_list(made)


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Norms, attention and TRL's LM head compute in float32 whatever the model is; here they do not."""
    pickle.dumps(torch.zeros(1))  # torch makes its table of dtypes once
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
        patch.object(utils, "_ChunkedLogProbFunction", LabelledLogProbs),
    ):
        yield


def ids_of(family: str, row: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what a processor makes of one row's prompt."""
    prompt = with_images(row)
    return processor(family).apply_chat_template(
        [prompt], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )


def logits(family: str, policy: PreTrainedModel, row: dict[str, Any], completion: Sequence[int]) -> torch.Tensor:
    """Return the model's own logits of a completion's tokens: one row, no padding, nothing shared."""
    inputs = dict(ids_of(family, row))
    end = torch.tensor([list(completion)])
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            inputs[name] = torch.cat([inputs[name], torch.zeros_like(end)], dim=1)
    inputs["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones_like(end)], dim=1)
    inputs["input_ids"] = torch.cat([inputs["input_ids"], end], dim=1)
    return nn.Module.__call__(policy, **inputs).logits[0, -len(completion) - 1 : -1]


def alone(family: str, policy: PreTrainedModel, row: dict[str, Any], completion: Sequence[int]) -> torch.Tensor:
    """Return the log-probabilities of a completion by `logits`."""
    log_p = logits(family, policy, row, completion).log_softmax(-1)
    return log_p.gather(-1, torch.tensor(completion)[:, None])[:, 0]


def scored_row(family: str, policy: PreTrainedModel, ids: list[int], images: Sequence[Any]) -> torch.Tensor:
    """The model's own logits of each next token of a row with these images."""
    inputs = {}
    if images:
        message = [{"role": "user", "content": [{"type": "image", "image": one} for one in images]}]
        inputs = dict(
            processor(family).apply_chat_template([message], tokenize=True, return_dict=True, return_tensors="pt")
        )
    seen = torch.tensor([ids])
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            inputs[name] = (seen == policy.config.image_token_id).long()
    return nn.Module.__call__(policy, **{**inputs, "input_ids": seen, "attention_mask": torch.ones_like(seen)}).logits[
        0
    ]


def of(scores: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """The log-probabilities of tokens."""
    return scores.log_softmax(-1)[range(len(ids)), ids]
