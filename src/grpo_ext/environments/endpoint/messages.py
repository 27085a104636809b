"""Anthropic's messages: a request's body in, answers and errors out."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_ext.environments.endpoint.chat import request_of, settings_of, stops_of
from grpo_ext.environments.endpoint.requests import ChatRequest, Refused, Reply
from grpo_ext.environments.protocol import Message

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_THINKING = ("thinking", "redacted_thinking")


def parse(body: bytes) -> ChatRequest:
    """Return the request in a body.

    Raises:
        Refused: it is malformed, or asks for what the policy's sampler cannot do.
    """
    settings = settings_of(body)
    turns = settings.get("messages")
    turns = list(enumerate(turns)) if isinstance(turns, list) else []
    chat = [message for i, turn in turns for message in _turns(turn, f"messages[{i}]")]
    if chat and chat[-1]["role"] == "assistant":
        raise Refused("the last message is the model's, and no answer continues one", "unsupported_content")
    system = [{"role": "system", "content": text}] if chat and (text := settings.get("system")) else []
    return request_of(settings, [*system, *chat], "max_tokens", stop=stops_of(settings.get("stop_sequences")))


def _turns(message: object, where: str) -> Iterator[Message]:
    """Yield a message as chats have it; results of tools become messages of their own, before its text."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise Refused(f"{where} has no role of user or assistant", "invalid_value")
    content, role = message.get("content"), message["role"]
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if not all(isinstance(block, dict) for block in blocks):
        raise Refused(f"{where} has content that is not blocks", "invalid_value")
    for block in blocks:
        if block.get("type") == "tool_result":
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
    calls = [_call(block, where) for block in blocks if block.get("type") == "tool_use"]
    thinking = "".join(str(block.get("thinking", "")) for block in blocks if block.get("type") in _THINKING)
    others = [block for block in blocks if block.get("type") not in ("tool_result", "tool_use", *_THINKING)]
    if role == "assistant" or others:
        yield {"role": role, "content": others, "reasoning_content": thinking, "tool_calls": calls}


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
        raise Refused(f"{where} has a tool_use without name and input", "invalid_value")
    return {"id": block.get("id"), "function": {"name": block["name"], "arguments": block["input"]}}


# Answers.


def document(request: ChatRequest, replies: Sequence[Reply], number: int) -> dict[str, Any]:
    """Return the answer of HTTP; `number` is the request's, for its ids."""
    [reply] = replies
    return {
        **_head(request, reply, number),
        "content": _blocks(reply, number),
        **_ended(reply),
        "usage": {"input_tokens": reply.read, "output_tokens": reply.written},
    }


def events(request: ChatRequest, replies: Sequence[Reply], number: int) -> Iterator[str]:
    """Yield the answer as server-sent events."""
    [reply] = replies
    usage = {"input_tokens": reply.read, "output_tokens": 0}
    yield _event("message_start", message={**_head(request, reply, number), "content": [], "usage": usage})
    for i, block in enumerate(_blocks(reply, number)):
        empty, delta = _empty(block)
        yield _event("content_block_start", index=i, content_block=empty)
        yield _event("content_block_delta", index=i, delta=delta)
        yield _event("content_block_stop", index=i)
    yield _event("message_delta", delta=_ended(reply), usage={"output_tokens": reply.written})
    yield _event("message_stop")


def error(refused: Refused) -> dict[str, Any]:
    """Return the body of a refusal."""
    kind = "authentication_error" if refused.status == 401 else "invalid_request_error"
    return {"type": "error", "error": {"type": kind, "message": f"{refused} ({refused.code})"}}


def _head(request: ChatRequest, reply: Reply, number: int) -> dict[str, Any]:
    fixed = {"type": "message", "role": "assistant", "stop_reason": None, "stop_sequence": None}
    return {"id": f"msg_{number}", **fixed, "model": request.model}


def _ended(reply: Reply) -> dict[str, Any]:
    by_text = reply.stopped_by is not None and reply.finish == "stop"
    return {
        "stop_reason": "stop_sequence" if by_text else _STOPS[reply.finish],
        "stop_sequence": reply.stopped_by if by_text else None,
    }


def _blocks(reply: Reply, number: int) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.thinking:
        blocks.append({"type": "thinking", "thinking": reply.thinking, "signature": ""})
    if reply.text or not reply.calls:
        blocks.append({"type": "text", "text": reply.text})
    for i, (name, arguments) in enumerate(reply.calls):
        tool_input = arguments if isinstance(arguments, dict) else {"": arguments}
        blocks.append({"type": "tool_use", "id": f"toolu_{number}_{i}", "name": name, "input": tool_input})
    return blocks


def _empty(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a block without its content, and the delta that brings it."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    kind = block["type"]
    return {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}


def _event(kind: str, **more: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n"
