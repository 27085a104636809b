"""OpenAI's chat completions: a request's body in, answers and errors out."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from grpo_ext.bounded import parse_json
from grpo_ext.environments.endpoint.requests import ChatRequest, Refused, Reply, call_of, text_of, thinking_of
from grpo_ext.environments.protocol import Message

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Settings that would change the distribution: those of the recipe hold."""
_ROLES = {"developer": "system", "function": "tool"}
_MOST_CHOICES = 64
_NOT_OBEYED = {
    "response_format": lambda value: not (isinstance(value, dict) and value.get("type") == "text"),
    "tool_choice": lambda value: value not in ("auto", "none"),
    "top_logprobs": lambda value: value != 0,
    "logit_bias": lambda value: value != {},
    "functions": bool,
    "function_call": lambda value: value not in ("auto", "none"),
    "modalities": lambda value: value != ["text"],
    "audio": bool,
    "web_search_options": lambda value: True,
}
"""Settings with the test of a value that would constrain or change what is sampled."""


def mapping_of(body: bytes) -> dict[str, Any]:
    """Return a request's body.

    Raises:
        Refused: it is not a JSON object.
    """
    try:
        found = parse_json(body.decode())
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise Refused("the body is not a JSON object")
    return {key: value for key, value in found.items() if value is not None}


def parse(body: bytes) -> ChatRequest:
    """Return the request in a body.

    Raises:
        Refused: it is malformed, or asks for what the policy's sampler cannot do.
    """
    given = mapping_of(body)
    require_free(given, _NOT_OBEYED)
    return ChatRequest(
        messages=messages_of(given.get("messages")),
        tools=tools_of(given.get("tools")) if given.get("tool_choice") != "none" else None,
        choices=count(given, "n", 1, _MOST_CHOICES) or 1,
        limit=count(given, "max_completion_tokens") or count(given, "max_tokens"),
        stop=stops_of(given.get("stop") or []),
        logprobs=given.get("logprobs") is True,
        stream=given.get("stream") is True,
        usage=isinstance(options := given.get("stream_options"), dict) and options.get("include_usage") is True,
        model=str(given.get("model", "policy")),
        sampling={name: given[name] for name in SAMPLING if name in given},
    )


def require_free(given: Mapping[str, Any], tests: Mapping[str, Callable[[Any], bool]]) -> None:
    """Check that a request leaves the policy free to sample as it is trained.

    Raises:
        Refused: one of the tests is true of a setting.
    """
    for name, refuses in tests.items():
        if name in given and refuses(given[name]):
            reason = "the policy samples freely, as it is trained. Remove the setting."
            value = json.dumps(given[name])[:100]
            raise Refused(f"{name}={value} is not supported: {reason}", "unsupported_parameter")


def count(given: dict[str, Any], name: str, least: int = 1, most: int = 2**31) -> int | None:
    """Return a whole number of a request.

    Raises:
        Refused: it is another value.
    """
    value = given.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and least <= value <= most):
        return value
    raise Refused(f"{name}={value!r:.100} is not a whole number from {least} to {most}", "invalid_value")


def stops_of(stop: object) -> tuple[str, ...]:
    """Return the texts that end an answer.

    Raises:
        Refused: they are not texts.
    """
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise Refused(f"stop={stop!r:.100} is neither text nor a list of texts", "invalid_value")
    return tuple(stops)


def tools_of(tools: object) -> list[dict[str, Any]] | None:
    """Return tools as a chat template takes them.

    Raises:
        Refused: one is not a function with a name.
    """
    if not tools:
        return None
    found = (
        [tool.get("function") if isinstance(tool, dict) else None for tool in tools] if isinstance(tools, list) else []
    )
    if not found or not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in found):
        raise Refused("tools is not a list of functions with a name", "invalid_value")
    return [{"type": "function", "function": function} for function in found]


def messages_of(messages: object) -> list[Message]:
    """Return messages as a chat template takes them.

    Raises:
        Refused: they are not messages, or hold more than text.
    """
    if not isinstance(messages, list) or not messages:
        raise Refused("messages is missing or empty", "invalid_value")
    names: dict[str, str] = {}
    return [_message(message, f"messages[{i}]", names) for i, message in enumerate(messages)]


def _message(given: object, where: str, names: dict[str, str]) -> Message:
    """Return a message; `names` maps the ids of calls to their tools, which a tool's message lacks."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise Refused(f"{where} has no role", "invalid_value")
    role = _ROLES.get(given["role"], given["role"])
    found: Message = {"role": role, "content": text_of(given.get("content"), where)}
    if role == "tool" and (name := given.get("name") or names.get(str(given.get("tool_call_id")))):
        found["name"] = str(name)
    if role == "assistant":
        if thinking := thinking_of(given):
            found["reasoning_content"] = thinking
        if calls := given.get("tool_calls"):
            found["tool_calls"] = [_call(call, where, names) for call in calls] if isinstance(calls, list) else []
    return found


def _call(given: object, where: str, names: dict[str, str]) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(f"{where} has a call without a function", "invalid_value")
    names[str(given.get("id"))] = function["name"]
    return call_of(function["name"], function.get("arguments") or {})


# Answers.


def document(request: ChatRequest, replies: Sequence[Reply], number: int) -> dict[str, Any]:
    """Return the answer of HTTP; `number` is the request's, for its ids."""
    choices = [
        {
            "index": i,
            "message": {"role": "assistant", **message_of(reply, f"{number}_{i}"), "refusal": None},
            "finish_reason": reply.finish,
            "logprobs": _logprobs(reply),
        }
        for i, reply in enumerate(replies)
    ]
    return {**_head(request, number, "chat.completion"), "choices": choices, "usage": _usage(replies)}


def events(request: ChatRequest, replies: Sequence[Reply], number: int) -> Iterator[str]:
    """Yield the answer as server-sent events."""
    head = _head(request, number, "chat.completion.chunk")
    for i, reply in enumerate(replies):
        message = {"role": "assistant", **message_of(reply, f"{number}_{i}")}
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{"index": k, **call} for k, call in enumerate(calls)]
        choice = {"index": i, "delta": message, "logprobs": _logprobs(reply), "finish_reason": None}
        yield _event({**head, "choices": [choice]})
        yield _event({**head, "choices": [{"index": i, "delta": {}, "finish_reason": reply.finish}]})
    if request.usage:
        yield _event({**head, "choices": [], "usage": _usage(replies)})
    yield "data: [DONE]\n\n"


def error(refused: Refused) -> dict[str, Any]:
    """Return the body of a refusal."""
    kind = "authentication_error" if refused.status == 401 else "invalid_request_error"
    return {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}}


def _head(request: ChatRequest, number: int, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": int(time.time()), "model": request.model}


def message_of(reply: Reply, number: str) -> dict[str, Any]:
    """Return an answer as a message; `number` makes the ids of its calls."""
    calls = reply.message.get("tool_calls") or []
    found: dict[str, Any] = {"content": reply.message.get("content") or (None if calls else "")}
    if thinking := thinking_of(reply.message):
        found["reasoning_content"] = thinking
    if calls:
        functions = [call.get("function", call) for call in calls]
        found["tool_calls"] = [
            {"id": f"call_{number}_{i}", "type": "function", "function": _function(function)}
            for i, function in enumerate(functions)
        ]
    return found


def _function(function: dict[str, Any]) -> dict[str, str]:
    arguments = function.get("arguments") or {}
    return {
        "name": str(function.get("name")),
        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
    }


def _logprobs(reply: Reply) -> dict[str, Any] | None:
    return None if reply.logprobs is None else {"content": logprobs_of(reply), "refusal": None}


def logprobs_of(reply: Reply) -> list[dict[str, Any]]:
    """Return the log-probabilities of an answer's tokens."""
    return [
        {
            "token": text,
            "bytes": list(text.encode()),
            "logprob": -9999.0 if value is None else value,
            "top_logprobs": [],
        }
        for text, value in reply.logprobs or ()
    ]


def _usage(replies: Sequence[Reply]) -> dict[str, int]:
    read, written = replies[0].read, sum(reply.written for reply in replies)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"
