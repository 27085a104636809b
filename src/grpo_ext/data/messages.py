"""Messages of a prompt as chat templates take them."""

from typing import Any

from grpo_ext.safe_reading import parse_json


def arguments_of(call: object) -> object:
    """Return the arguments of a call, as they are written; None where it has none."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return function.get("arguments") if isinstance(function, dict) else None


def read_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call that are written as JSON text, as OpenAI's are; None if they are no object."""
    try:
        read = parse_json(text) if text.strip() else {}
    except ValueError:
        return None
    return read if isinstance(read, dict) else None


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
    size = getattr(part.get("image"), "size", None)
    return str(part.get("text", part)) if size is None else f"[image {size[0]}x{size[1]}]"


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose text is a content part, as templates of models that take images want it."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def without_gaps(prompt: Any) -> Any:
    """Return a prompt as chat templates take it.

    Keys that Arrow fills with None, where only some messages or calls have them, are left out. A message without
    content, such as one with a tool call, has the empty text: templates render None as "None". Arguments of calls that
    are JSON text become the object that templates write as JSON, or by each argument.
    """
    if not isinstance(prompt, list):
        return prompt
    messages = [{"content": "", **without_none(message)} for message in prompt]
    for message in messages:
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = [_with_object(call) for call in calls]
    return messages


def _with_object(call: Any) -> Any:
    arguments = arguments_of(call)
    if not isinstance(arguments, str) or (read := read_arguments(arguments)) is None:
        return call
    if "function" not in call:
        return {**call, "arguments": read}
    return {**call, "function": {**call["function"], "arguments": read}}


def without_none(value: Any) -> Any:
    """Return a value without the keys that are None, at any depth."""
    if isinstance(value, dict):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list) else value
