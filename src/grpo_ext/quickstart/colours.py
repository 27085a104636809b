"""The quickstart's pictures: name the colour of a square, by a tiny Llava; for `quickstart/colours`."""

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (225, 205, 50),
    "purple": (140, 60, 170),
    "white": (235, 235, 235),
}
IMAGE = "<image>"
WORDS = (IMAGE, *COLOURS)
SIDE, PATCH = 28, 14
"""Sides of a picture and of its patches, in pixels."""
GUESSES = 0.7
"""Share of demonstrations in which the teacher names any colour."""
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
VISION: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
}


def picture(colour: str, draw: random.Random) -> "Image":
    """Return a picture of a square of a colour, at a random place on a grey ground, with noise in both."""
    from PIL import Image

    side = draw.randint(10, 18)
    left, top = draw.randint(0, SIDE - side), draw.randint(0, SIDE - side)
    ground, shade = draw.randint(90, 150), draw.randint(-15, 15)
    made = Image.new("RGB", (SIDE, SIDE), (ground, ground, ground))
    for x in range(left, left + side):
        for y in range(top, top + side):
            made.putpixel((x, y), tuple(min(255, max(0, c + shade + draw.randint(-20, 20))) for c in COLOURS[colour]))
    return made


def colour_row(colour: str, draw: random.Random) -> dict[str, Any]:
    """Return a dataset row: a constant `prompt`, the `image`, and the colour as `solution`."""
    prompt = [{"role": "user", "content": "colour?"}]
    return {"prompt": prompt, "image": picture(colour, draw), "solution": colour}


def colour_demonstrations(seed: int, size: int) -> list[dict[str, Any]]:
    """Return `size` rows of prompt, image and completion; the teacher often names any colour."""
    draw = random.Random(seed)
    made = []
    for colour in draw.choices(list(COLOURS), k=size):
        named = draw.choice(list(COLOURS)) if draw.random() < GUESSES else colour
        parts = [{"type": "image"}, {"type": "text", "text": "colour?"}]
        row = {"prompt": [{"role": "user", "content": parts}], "image": picture(colour, draw)}
        made.append({**row, "completion": [{"role": "assistant", "content": named}]})
    return made


def load_colours(size: int = 480, eval_size: int = 120) -> tuple["Dataset", "Dataset"]:
    """Return different pictures for training and for evaluation, as many of each colour."""
    from datasets import Dataset

    names = list(COLOURS)
    train, test = (
        [colour_row(names[i % len(names)], draw) for i in range(count)]
        for count, draw in ((size, random.Random(1)), (eval_size, random.Random(2)))
    )
    return Dataset.from_list(train), Dataset.from_list(test)


def build_processor(tokenizer: "PreTrainedTokenizerFast") -> "ProcessorMixin":
    """Return a processor of pictures and text that needs no torchvision."""
    from transformers import LlavaProcessor
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    tokenizer.chat_template = TEMPLATE
    square = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    return LlavaProcessor(
        image_processor=LlavaImageProcessorPil(**square),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # of the whole picture, left out again
        chat_template=TEMPLATE,
    )


def build_seeing_model(tokenizer: "PreTrainedTokenizerFast", text: dict[str, Any], seed: int = 0) -> "PreTrainedModel":
    """Return a Llava with random weights drawn from `seed`, whose language model has the configuration `text`."""
    import torch
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = LlavaConfig(
        vision_config=VISION,
        text_config={"model_type": "llama", "vocab_size": len(tokenizer), **ends, **text},
        image_token_index=tokenizer.vocab[IMAGE],
        image_seq_length=(SIDE // PATCH) ** 2,
        tie_word_embeddings=text["tie_word_embeddings"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlavaForConditionalGeneration(config)
