"""Anthropic's messages: a request's body in, answers and errors out."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_ext.environments.endpoint.chat import (
    SAMPLING,
    count,
    mapping_of,
    messages_of,
    require_free,
    stops_of,
    tools_of,
)
from grpo_ext.environments.endpoint.requests import ChatRequest, Refused, Reply, call_of, thinking_of
from grpo_ext.environments.protocol import Message

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_NO_TOOLS = {"type": "none"}
_NOT_OBEYED = {"tool_choice": lambda value: not isinstance(value, dict) or value.get("type") not in ("auto", "none")}
_THINKING = ("thinking", "redacted_thinking")


def parse(body: bytes) -> ChatRequest:
    """Return the request in a body.

    Raises:
        Refused: it is malformed, or asks for what the policy's sampler cannot do.
    """
    given = mapping_of(body)
    require_free(given, _NOT_OBEYED)
    turns = given.get("messages")
    if not isinstance(turns, list) or not turns:
        raise Refused("messages is missing or empty", "invalid_value")
    system = [{"role": "system", "content": text}] if (text := given.get("system")) else []
    messages = [message for i, turn in enumerate(turns) for message in _turns(turn, f"messages[{i}]")]
    tools, left_out = _tools(given.get("tools"))
    return ChatRequest(
        messages=messages_of([*system, *messages]),
        tools=None if given.get("tool_choice") == _NO_TOOLS else tools,
        left_out=left_out,
        limit=count(given, "max_tokens"),
        stop=stops_of(given.get("stop_sequences") or []),
        stream=given.get("stream") is True,
        model=str(given.get("model", "policy")),
        sampling={name: given[name] for name in SAMPLING if name in given},
    )


def _tools(tools: object) -> tuple[list[dict[str, Any]] | None, tuple[str, ...]]:
    """Return tools as a chat template takes them, and the types of those that only Anthropic can run."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return tools_of(tools), ()
    own = [tool for tool in tools if tool.get("type", "custom") == "custom"]
    functions = [
        {
            "name": tool.get("name"),
            "description": tool.get("description", ""),
            "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
        }
        for tool in own
    ]
    others = {str(tool["type"]) for tool in tools if tool not in own}
    return tools_of([{"function": function} for function in functions]), tuple(sorted(others))


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
        "stop_reason": _STOPS[reply.finish],
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
    ended = {"stop_reason": _STOPS[reply.finish], "stop_sequence": None}
    yield _event("message_delta", delta=ended, usage={"output_tokens": reply.written})
    yield _event("message_stop")


def error(refused: Refused) -> dict[str, Any]:
    """Return the body of a refusal."""
    kind = "authentication_error" if refused.status == 401 else "invalid_request_error"
    return {"type": "error", "error": {"type": kind, "message": f"{refused} ({refused.code})"}}


def _head(request: ChatRequest, reply: Reply, number: int) -> dict[str, Any]:
    fixed = {"type": "message", "role": "assistant", "stop_reason": None, "stop_sequence": None}
    return {"id": f"msg_{number}", **fixed, "model": request.model}


def _blocks(reply: Reply, number: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if thinking := thinking_of(reply.message):
        found.append({"type": "thinking", "thinking": thinking, "signature": ""})
    calls = [call.get("function", call) for call in reply.message.get("tool_calls") or []]
    if (text := reply.message.get("content")) or not calls:
        found.append({"type": "text", "text": text or ""})
    for i, call in enumerate(calls):
        arguments = call_of("", call.get("arguments") or {})["function"]["arguments"]
        given = arguments if isinstance(arguments, dict) else {"": arguments}
        found.append({"type": "tool_use", "id": f"toolu_{number}_{i}", "name": str(call.get("name")), "input": given})
    return found


def _empty(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a block without its content, and the delta that brings it."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    kind = block["type"]
    return {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}


def _event(kind: str, **more: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n"
