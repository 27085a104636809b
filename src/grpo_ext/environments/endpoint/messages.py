"""Anthropic's messages: a request's body in, answers and errors out."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_ext.environments.endpoint.chat import SAMPLING, count, mapping_of, stops_of
from grpo_ext.environments.endpoint.requests import ChatRequest, Refused, Reply, call_of, text_of, thinking_of
from grpo_ext.environments.protocol import Message

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_THINKING = ("thinking", "redacted_thinking")


def parse(body: bytes) -> ChatRequest:
    """Return the request in a body.

    Raises:
        Refused: it is malformed, or asks for what the policy's sampler cannot do.
    """
    given = mapping_of(body)
    choice = given.get("tool_choice", {"type": "auto"})
    if not isinstance(choice, dict) or choice.get("type") not in ("auto", "none"):
        raise Refused(f"tool_choice={choice!r:.100} is not supported: the policy samples freely; remove the setting")
    system = text_of(_plain(given.get("system")), "system")
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages is missing or empty", "invalid_value")
    names: dict[str, str] = {}
    turns = [turn for i, message in enumerate(messages) for turn in _turns(message, f"messages[{i}]", names)]
    return ChatRequest(
        messages=[{"role": "system", "content": system}, *turns] if system else turns,
        tools=_tools(given.get("tools")) if choice["type"] == "auto" else None,
        limit=count(given, "max_tokens"),
        stop=stops_of(given.get("stop_sequences") or []),
        stream=given.get("stream") is True,
        model=str(given.get("model", "policy")),
        sampling={name: given[name] for name in SAMPLING if name in given},
    )


def _plain(content: object) -> object:
    """Return content without what only marks blocks, such as `cache_control`."""
    if not isinstance(content, list):
        return content
    keys = ("type", "text")
    return [{k: block[k] for k in keys if k in block} if isinstance(block, dict) else block for block in content]


def _tools(tools: object) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, dict) and isinstance(t.get("name"), str) for t in tools):
        raise Refused("tools is not a list of {name, description, input_schema}", "invalid_value")
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def _turns(message: object, where: str, names: dict[str, str]) -> Iterator[Message]:
    """Yield a message as a chat template takes it; results of tools become messages of their own, before its text."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise Refused(f"{where} has no role of user or assistant", "invalid_value")
    content, role = message.get("content"), message["role"]
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if not all(isinstance(block, dict) for block in blocks):
        raise Refused(f"{where} has content that is not blocks", "invalid_value")
    for block in blocks:
        if block.get("type") == "tool_result":
            name = names.get(str(block.get("tool_use_id")))
            text = text_of(_plain(block.get("content")), where)
            yield {"role": "tool", "content": text, **({"name": name} if name else {})}
    calls = [_call(block, where, names) for block in blocks if block.get("type") == "tool_use"]
    thinking = "".join(str(block.get("thinking", "")) for block in blocks if block.get("type") in _THINKING)
    others = [block for block in blocks if block.get("type") not in ("tool_result", "tool_use", *_THINKING)]
    text = text_of(_plain(others) if others else "", where)
    if role == "assistant" or others:
        found: Message = {"role": role, "content": text}
        yield found | ({"reasoning_content": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})


def _call(block: dict[str, Any], where: str, names: dict[str, str]) -> dict[str, Any]:
    if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
        raise Refused(f"{where} has a tool_use without name and input", "invalid_value")
    names[str(block.get("id"))] = block["name"]
    return call_of(block["name"], block["input"])


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
