"""OpenAI's chat completions: a request's body in, answers and errors out."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from grpo_ext.environments.endpoint.requests import VALUES, ChatRequest, Refused, Reply, call_of, text_of, thinking_of
from grpo_ext.environments.protocol import Message
from grpo_ext.safe_reading import parse_json

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
    *("parallel_tool_calls", "reasoning_effort", "reasoning", "thinking", "verbosity"),
)
"""Settings that would change the distribution and that agents set by habit: the log tells that the recipe holds."""
_ROLES = {"developer": "system", "function": "tool"}
_MOST_CHOICES = 64
_MOST_STOPS, _LONGEST_STOP = 64, 1000
_LONGEST_NAME = 200
"""Characters of the model's name, which each event repeats."""
_TEXT = {"type": "text"}
_NEEDS_STORE = ("previous_response_id", "conversation", "prompt", "background")
_REFUSED: dict[str, Callable[[Any], bool]] = {
    "response_format": lambda value: value != _TEXT,
    "text": lambda value: not isinstance(value, dict) or value.get("format", _TEXT) != _TEXT,
    "tool_choice": lambda value: _kind(value) not in ("auto", "none"),
    "top_logprobs": lambda value: value != 0,
    "logit_bias": lambda value: value != {},
    "functions": bool,
    "function_call": lambda value: value not in ("auto", "none"),
    "modalities": lambda value: value != ["text"],
    "audio": bool,
    "web_search_options": lambda value: True,
    "output_config": lambda value: not isinstance(value, dict) or bool(value.get("format")),
    "best_of": lambda value: value != 1,
    **dict.fromkeys(("output_format", "mcp_servers", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words"), bool),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), bool),
    **dict.fromkeys(("chat_template_kwargs", "chat_template", "continue_final_message"), bool),
    **dict.fromkeys(_NEEDS_STORE, bool),
}
"""Settings of all dialects with the test of a value that would change what is sampled, or needs stored responses."""


def _kind(value: object) -> object:
    return value.get("type") if isinstance(value, dict) else value


def settings_of(body: bytes) -> dict[str, Any]:
    """Return the settings in a request's body that are not null.

    Raises:
        Refused: it is not a JSON object, or a setting asks for what the policy's sampler cannot do.
    """
    try:
        parsed = parse_json(body.decode(), VALUES)
    except ValueError as error:
        raise Refused(f"the body is not JSON of at most {VALUES:,} values ({error})") from None
    if not isinstance(parsed, dict):
        raise Refused("the body is not a JSON object")
    settings = {name: value for name, value in parsed.items() if value is not None}
    for name in (name for name, refuses in _REFUSED.items() if name in settings and refuses(settings[name])):
        free = "the policy samples freely, as it is trained. Remove the setting."
        reason = "no response is stored. Send the whole conversation." if name in _NEEDS_STORE else free
        raise Refused(f"{name}={json.dumps(settings[name])[:100]} is not supported: {reason}", "unsupported_parameter")
    return settings


def parse(body: bytes) -> ChatRequest:
    """Return the request in a body.

    Raises:
        Refused: it is malformed, or asks for what the policy's sampler cannot do.
    """
    settings = settings_of(body)
    return request_of(
        settings,
        settings.get("messages"),
        "max_completion_tokens" if "max_completion_tokens" in settings else "max_tokens",
        choices=_count(settings, "n", _MOST_CHOICES) or 1,
        stop=stops_of(settings.get("stop")),
        logprobs=_flag(settings, "logprobs"),
        usage=isinstance(options := settings.get("stream_options"), dict) and options.get("include_usage") is True,
    )


def request_of(settings: Mapping[str, Any], messages: object, limit: str, **more: Any) -> ChatRequest:
    """Return a request of any dialect, whose `messages` are those of a chat; `limit` names the most tokens.

    Raises:
        Refused: it is malformed.
    """
    tools, left_out = _tools(settings.get("tools"))
    return ChatRequest(
        messages=_messages(messages),
        tools=None if _kind(settings.get("tool_choice")) == "none" else tools,
        left_out=left_out,
        limit=_count(settings, limit),
        stream=_flag(settings, "stream"),
        model=_name(settings),
        sampling={name: settings[name] for name in _SAMPLING if name in settings},
        **more,
    )


def _name(settings: Mapping[str, Any]) -> str:
    if not isinstance(name := settings.get("model", "policy"), str) or len(name) > _LONGEST_NAME:
        raise Refused(f"model={name!r:.100} is not a text of at most {_LONGEST_NAME} characters", "invalid_value")
    return name


def _count(settings: Mapping[str, Any], name: str, most: int = 2**31) -> int | None:
    value = settings.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most):
        return value
    raise Refused(f"{name}={value!r:.100} is not a whole number from 1 to {most}", "invalid_value")


def _flag(settings: Mapping[str, Any], name: str) -> bool:
    if not isinstance(value := settings.get(name, False), bool):
        raise Refused(f"{name}={value!r:.100} is neither true nor false", "invalid_value")
    return value


def stops_of(stop: object) -> tuple[str, ...]:
    """Return the texts that end an answer.

    Raises:
        Refused: they are not texts.
    """
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise Refused(f"stop={stop!r:.100} is neither text nor a list of texts", "invalid_value")
    if len(stops) > _MOST_STOPS or max(map(len, stops), default=0) > _LONGEST_STOP:
        most = f"{_MOST_STOPS} texts of {_LONGEST_STOP} characters"
        raise Refused(f"stop={stop!r:.100} has more than {most}", "invalid_value")
    return tuple(stops)


def _tools(tools: object) -> tuple[list[dict[str, Any]] | None, tuple[str, ...]]:
    """Return functions as a chat template takes them, and the types of tools that run at a provider."""
    tools = tools or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused("tools is not a list of tools", "invalid_value")
    functions = [_function(tool) for tool in tools if tool.get("type") == "function" or "input_schema" in tool]
    others = {str(tool.get("type")) for tool in tools if tool.get("type") != "function" and "input_schema" not in tool}
    return functions or None, tuple(sorted(others))


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(f"tools: {json.dumps(tool)[:100]} is not a function with a name", "invalid_value")
    named = {"name": "name", "description": "description", "parameters": "parameters", "input_schema": "parameters"}
    return {"type": "function", "function": {named[key]: value for key, value in function.items() if key in named}}


def _messages(messages: object) -> list[Message]:
    """Return messages as a chat template takes them."""
    if not isinstance(messages, list) or not messages:
        raise Refused("messages is missing or empty", "invalid_value")
    names: dict[str, str] = {}
    return [_message(message, f"messages[{i}]", names) for i, message in enumerate(messages)]


def _message(message: object, where: str, names: dict[str, str]) -> Message:
    """Return a message; `names` maps the ids of calls to their tools, which a tool's message lacks."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused(f"{where} has no role", "invalid_value")
    role = _ROLES.get(message["role"], message["role"])
    chat_message: Message = {"role": role, "content": text_of(message.get("content"), where)}
    if role == "tool" and (name := message.get("name") or names.get(str(message.get("tool_call_id")))):
        chat_message["name"] = str(name)
    if role == "assistant":
        if thinking := thinking_of(message):
            chat_message["reasoning_content"] = thinking
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or message.get("function_call"):
            raise Refused(f"{where} has calls that are not a list tool_calls", "invalid_value")
        if calls:
            chat_message["tool_calls"] = [_call(call, where, names) for call in calls]
    return chat_message


def _call(call: object, where: str, names: dict[str, str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(f"{where} has a call without a function", "invalid_value")
    names[str(call.get("id"))] = function["name"]
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
    message: dict[str, Any] = {"content": reply.text or (None if reply.calls else "")}
    if reply.thinking:
        message["reasoning_content"] = reply.thinking
    if reply.calls:
        functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in reply.calls]
        called = [(f"call_{number}_{i}", function) for i, function in enumerate(functions)]
        message["tool_calls"] = [{"id": name, "type": "function", "function": function} for name, function in called]
    return message


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
