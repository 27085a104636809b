"""Content parts, [{"type": "text", "text": ...}, ...]: their text is carried, images and sound are refused."""

from typing import Any

MEDIA = ("image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url")
"""Types of the parts that are not text."""
COLUMNS = ("image", "images")
"""Dataset columns in which TRL finds a prompt's images."""
CURE = (
    "Use text only, or train in Python with the class as environment_factory, which keeps TRL's own loop and its "
    "images."
)


def is_parts(content: Any) -> bool:
    """Whether a value is a list of content parts."""
    return isinstance(content, list) and bool(content) and all(map(_is_part, content))


def _is_part(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind in MEDIA or (kind == "text" and isinstance(part.get("text"), str))


def medium(content: Any) -> str | None:
    """Type of the first part that is not text; None where all are text, or `content` is not a list of parts."""
    return next((part["type"] for part in content if part["type"] != "text"), None) if is_parts(content) else None


def text_of(parts: list[dict[str, Any]]) -> str:
    """Text of content parts, one directly behind the other, as chat templates render them."""
    return "".join(part["text"] for part in parts)
