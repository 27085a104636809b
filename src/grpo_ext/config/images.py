"""Conversations with images, and the settings that are not shown to be right for them: refused where there are any."""

import hashlib
from collections.abc import Iterator
from typing import Any

from PIL.Image import Image

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.process_engine import samples_in_process
from grpo_ext.config.routes import rollout_problems as route_problems
from grpo_ext.config.rules import columns_of_images
from grpo_ext.config.vllm import splits_weights
from grpo_ext.errors import ABSENT, Problem


def images_in(prompt: object) -> list[Any]:
    """Return the images in the content parts of a conversation."""
    messages = prompt if isinstance(prompt, list) else []
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part.get("image") for part in parts if isinstance(part, dict) and part.get("type") == "image"]


def described(prompt: Any) -> Any:
    """Return a conversation with content parts as one text, in which an image is its size: a column of a table."""
    messages = prompt if isinstance(prompt, list) else []
    if not any(isinstance(message.get("content"), list) for message in messages):
        return prompt
    return [{**message, "content": _as_text(message.get("content"))} for message in messages]


def _as_text(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return "".join(_shown(part) if isinstance(part, dict) else str(part) for part in content)


def _shown(part: dict[str, Any]) -> str:
    image = part.get("image")
    return sized(image) if isinstance(image, Image) else str(part.get("text", part))


def sized(value: object) -> str:
    """Return an image as its size, another value as text."""
    return f"[image {value.width}x{value.height}]" if isinstance(value, Image) else str(value)


def fingerprint(value: object) -> str:
    """Return what tells an image from others, by its pixels and not its place in memory; another value as text."""
    if not isinstance(value, Image):
        return str(value)
    pixels = value.convert("RGBA") if value.mode == "P" else value
    return f"{sized(value)} {hashlib.sha256(pixels.tobytes()).hexdigest()}"


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose text is a content part, as templates of models that take images want it."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def image_problems(config: GRPOExtArguments, columns: object) -> Iterator[Problem]:
    """Yield the problems of a dataset whose `columns` hold images."""
    found = columns_of_images(columns)
    if len(found) > 1:
        yield Problem("column 'image'", ABSENT, "TRL reads 'images' where both are given", "Keep one of them.")
    if not found:
        return
    yield from route_problems(config, {found[0]: True})
    if samples_in_process(config):
        yield Problem(
            "rollout_engine", "process", "the decoder of the process reads text only", "Set rollout_engine: auto."
        )
    if config.micro_batch_tokens is not None:
        reason, cure = "rows with images are not cut by tokens yet", "Unset it, and lower per_device_train_batch_size."
        yield Problem("micro_batch_tokens", config.micro_batch_tokens, reason, cure)
    if splits_weights():
        reason = "gradients of weights that are split over processes are untested where prompts have images"
        yield Problem("the launch", ABSENT, reason, "Launch with --accelerate_config ddp, or ZeRO 1 or 2.")


def rollout_problems(rollout_func: object) -> Iterator[Problem]:
    """Yield the problem of rollouts by a function beside prompts with images."""
    if rollout_func:
        reason = "it returns tokens, and not where the images are among them"
        yield Problem("rollout_func", ABSENT, reason, "Remove rollout_func, or use prompts of text.")
