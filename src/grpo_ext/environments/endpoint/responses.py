"""OpenAI's responses: a request's body in, answers and errors out. No response is stored."""

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_ext.environments.endpoint.chat import error, logprobs_of, message_of, request_of, settings_of
from grpo_ext.environments.endpoint.requests import ChatRequest, Refused, Reply
from grpo_ext.environments.protocol import Message

__all__ = ["document", "error", "events", "parse"]

_PARTS_OF_AN_ANSWER = ("reasoning_content", "content", "tool_calls")
"""Keys of the model's message, in the order in which an answer has their items."""


def parse(body: bytes) -> ChatRequest:
    """Return the request in a body.

    Raises:
        Refused: it is malformed, or asks for what the policy's sampler cannot do.
    """
    settings = settings_of(body)
    logprobs = "message.output_text.logprobs" in str(settings.get("include"))
    return request_of(settings, _conversation(settings), "max_output_tokens", logprobs=logprobs)


def _conversation(settings: Mapping[str, Any]) -> list[Message]:
    """Return instructions and input as messages of a chat."""
    items = settings.get("input")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    if not isinstance(items, list) or not items:
        raise Refused("input is missing or empty", "invalid_value")
    messages: list[Message] = []
    if instructions := settings.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    for i, item in enumerate(items):
        _add(messages, item, f"input[{i}]")
    return messages


def _add(messages: list[Message], item: object, where: str) -> None:
    """Add an item to the messages; items of one answer become one message, as the chat template made them."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if not isinstance(item, dict) or kind not in ("message", "reasoning", "function_call", "function_call_output"):
        raise Refused(f"{where} has the type {kind!r:.100}, which is not supported", "unsupported_content")
    if kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    elif kind == "message" and item.get("role") != "assistant":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    else:
        key, value = _part(item, kind)
        last = messages[-1] if messages else {}
        following = _PARTS_OF_AN_ANSWER[_PARTS_OF_AN_ANSWER.index(key) :]
        if last.get("role") != "assistant" or (key != "tool_calls" and any(last.get(k) for k in following)):
            messages.append(last := {"role": "assistant"})
        last[key] = [*last.get(key, []), *value] if key == "tool_calls" else value


def _part(item: Mapping[str, Any], kind: str) -> tuple[str, Any]:
    """Return the key and value of an item in the model's message."""
    if kind == "message":
        return "content", item.get("content")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return "tool_calls", [{"id": item.get("call_id"), "function": function}]
    parts = item.get("content") or item.get("summary")
    texts = [str(part.get("text")) for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "reasoning_content", "".join(texts) or item.get("encrypted_content")


# Answers.


def document(request: ChatRequest, replies: Sequence[Reply], number: int) -> dict[str, Any]:
    """Return the answer of HTTP; `number` is the request's, for its ids."""
    [reply] = replies
    cut = reply.finish == "length"
    fixed: dict[str, Any] = {"error": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True}
    return {
        **{"id": f"resp_{number}", "object": "response", "created_at": int(time.time()), "model": request.model},
        **{**fixed, "tools": [], "tool_choice": "auto", "temperature": None, "top_p": None},
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(reply, number),
        "usage": {
            "input_tokens": reply.read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.read + reply.written,
        },
    }


def events(request: ChatRequest, replies: Sequence[Reply], number: int) -> Iterator[str]:
    """Yield the answer as server-sent events."""
    whole, serial = document(request, replies, number), itertools.count()
    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    items = (step for index, item in enumerate(whole["output"]) for step in _steps(item, index))
    ends = [("created", {"response": begun}), (whole["status"], {"response": whole})]
    for name, fields in itertools.chain(ends[:1], items, ends[1:]):
        data = {"type": f"response.{name}", "sequence_number": next(serial), **fields}
        yield f"event: response.{name}\ndata: {json.dumps(data)}\n\n"


def _items(reply: Reply, number: int) -> list[dict[str, Any]]:
    """Return thinking, text and calls of an answer. Clients that keep no thinking send back `encrypted_content`."""
    message, items = message_of(reply, str(number)), list[dict[str, Any]]()
    if thinking := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thinking}]
        items.append({"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": content})
        items[-1] |= {"encrypted_content": thinking, "status": "completed"}
    if (text := message["content"]) is not None:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs_of(reply)}
        items.append({"id": f"msg_{number}", "type": "message", "role": "assistant", "content": [part]})
        items[-1]["status"] = "incomplete" if reply.finish == "length" else "completed"
    for call in message.get("tool_calls", []):
        place = {"id": call["id"].replace("call", "fc", 1), "call_id": call["id"], "status": "completed"}
        items.append({"type": "function_call", **place, **call["function"]})
    return items


def _steps(item: dict[str, Any], index: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and fields of the events that send an item."""
    at = {"item_id": item["id"], "output_index": index}
    call = item["type"] == "function_call"
    empty: dict[str, Any] = {"arguments": ""} if call else {"content": []}
    yield "output_item.added", {"output_index": index, "item": {**item, **empty, "status": "in_progress"}}
    if call:
        yield "function_call_arguments.delta", {**at, "delta": item["arguments"]}
        yield "function_call_arguments.done", {**at, "arguments": item["arguments"], "name": item["name"]}
    else:
        [part] = item["content"]
        at |= {"content_index": 0}
        more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield "content_part.added", {**at, "part": {**part, "text": ""}}
        yield f"{part['type']}.delta", {**at, "delta": part["text"], **more}
        yield f"{part['type']}.done", {**at, "text": part["text"], **more}
        yield "content_part.done", {**at, "part": part}
    yield "output_item.done", {"output_index": index, "item": item}
