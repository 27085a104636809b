"""Content parts, [{"type": "text", "text": ...}, ...]. Environments carry their text; images and sound are refused."""

from typing import Any

MEDIA = ("image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url")
"""Types of parts that are not text."""
TEXT_ONLY_CURE = "Use text only."


def is_parts(content: object) -> bool:
    """Return whether a value is a list of content parts."""
    return isinstance(content, list) and bool(content) and all(map(_is_part, content))


def _is_part(part: object) -> bool:
    if not isinstance(part, dict):
        return False
    return part.get("type") in MEDIA or (part.get("type") == "text" and isinstance(part.get("text"), str))


def medium(content: Any) -> str | None:
    """Return the type of the first part that is not text; None if there is no such part, or no part at all."""
    return next((part["type"] for part in content if part["type"] != "text"), None) if is_parts(content) else None


def parts_text(parts: list[dict[str, Any]]) -> str:
    """Return the text of content parts, concatenated as chat templates do."""
    return "".join(part["text"] for part in parts)
