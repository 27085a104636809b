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
