"""The wire format of the agents' endpoint, and the match of a request to a finished turn, by hand."""

import contextlib
import json
import socket
import time
from types import SimpleNamespace

import httpx
import pytest

from grpo_ext.environments.agents import stop_at
from grpo_ext.environments.endpoint import chat, messages, responses, server
from grpo_ext.environments.endpoint.history import Finished, continued, key_of
from grpo_ext.environments.endpoint.requests import ChatRequest, Refused, Reply
from grpo_ext.environments.library.command import filled
from support.processes import PATIENCE

USER = {"role": "user", "content": "add 1 and 2"}
CALL = {"id": "call_9", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": 1}'}}
PLUS = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


def parsed(**body):
    return chat.parse(json.dumps({"messages": [USER], **body}).encode())


def test_a_request_as_a_template_takes_it():
    given = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "tool_call_id": "call_9", "content": "3"},
    ]
    function = {"name": "add", "parameters": {}}
    options = {"stream_options": {"include_usage": True}, "tool_choice": "auto", "temperature": 0.5, "seed": None}
    found = parsed(
        messages=given, tools=[{"type": "function", "function": function}], n=2, max_tokens=7, stop="x", **options
    )
    assert found == ChatRequest(
        messages=[
            {"role": "system", "content": "be brief"},
            USER,
            {"role": "assistant", "content": "", "tool_calls": [PLUS]},
            {"role": "tool", "content": "3", "name": "add"},
        ],
        tools=[{"type": "function", "function": function}],
        choices=2,
        limit=7,
        stop=("x",),
        usage=True,
        sampling={"temperature": 0.5},
    )
    assert parsed(tools=[{"type": "function", "function": function}], tool_choice="none").tools is None
    assert parsed(max_tokens=7, max_completion_tokens=5).limit == 5


@pytest.mark.parametrize(
    "body",
    [
        {"messages": None},
        {"messages": "hello"},
        {"messages": [{"content": "a"}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        {"n": 0},
        {"n": True},
        {"max_tokens": -1},
        {"max_tokens": 1.5},
        {"stop": [""]},
        {"stop": {"a": 1}},
        {"tools": [{"type": "function"}]},
        {"tools": "add"},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"response_format": {"type": "json_schema"}},
        {"top_logprobs": 2},
        {"logit_bias": {"7": 1}},
        {"functions": [{"name": "a"}]},
        {"modalities": ["audio"]},
    ],
)
def test_what_is_malformed_or_cannot_be_obeyed_is_refused(body):
    with pytest.raises(Refused) as refused:
        parsed(**body)
    assert refused.value.status == 400
    error = chat.error(refused.value)["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"


REPLIES = [
    Reply("", "", [("add", {"a": 1, "b": 2})], "tool_calls", 11, 5),
    Reply("3", "1+2", [], "stop", 11, 2, [("3", -0.5), ("<eos>", None)]),
]


def test_an_answer_in_the_form_of_openai():
    found = chat.document(ChatRequest([USER], model="m"), REPLIES, 4)
    assert {**found, "created": 0} == {
        "id": "chatcmpl-4",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "call_4_0_0",
                            "type": "function",
                            "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
                        }
                    ],
                    "refusal": None,
                },
                "finish_reason": "tool_calls",
                "logprobs": None,
            },
            {
                "index": 1,
                "message": {"role": "assistant", "content": "3", "reasoning_content": "1+2", "refusal": None},
                "finish_reason": "stop",
                "logprobs": {
                    "content": [
                        {"token": "3", "bytes": [51], "logprob": -0.5, "top_logprobs": []},
                        {"token": "<eos>", "bytes": [60, 101, 111, 115, 62], "logprob": -9999.0, "top_logprobs": []},
                    ],
                    "refusal": None,
                },
            },
        ],
        "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18},
    }


def test_a_stream_in_the_form_of_openai():
    events = list(chat.events(ChatRequest([USER], usage=True), REPLIES[:1], 4))
    assert events[-1] == "data: [DONE]\n\n"
    first, last, usage = (json.loads(event.removeprefix("data: ")) for event in events[:-1])
    [call] = first["choices"][0]["delta"]["tool_calls"]
    assert (call["index"], call["function"]["name"]) == (0, "add")
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 16)
    assert first["object"] == "chat.completion.chunk"


def test_a_request_in_the_form_of_anthropic():
    blocks = [
        {"type": "thinking", "thinking": "1+2", "signature": ""},
        {"type": "text", "text": "I add"},
        {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": 2}},
    ]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "3"}]}
    body = {
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            USER,
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [{"type": "text", "text": "so?"}, result]},
        ],
        "max_tokens": 9,
        "stop_sequences": ["x"],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "a"}],
    }
    assert messages.parse(json.dumps(body).encode()) == ChatRequest(
        messages=[
            {"role": "system", "content": "be brief"},
            USER,
            {"role": "assistant", "content": "I add", "reasoning_content": "1+2", "tool_calls": [PLUS]},
            {"role": "tool", "content": "3", "name": "add"},
            {"role": "user", "content": "so?"},
        ],
        tools=[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        left_out=("web_search_20250305",),
        limit=9,
        stop=("x",),
    )


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [{"role": "tool", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]},
        {"tool_choice": {"type": "any"}},
        {"tools": [{"input_schema": {}}]},
        {"tools": "add"},
    ],
)
def test_what_anthropics_form_may_not_ask_is_refused(body):
    with pytest.raises(Refused) as refused:
        messages.parse(json.dumps({"messages": [USER], **body}).encode())
    assert messages.error(refused.value)["error"]["type"] == "invalid_request_error"


def test_a_request_in_the_form_of_responses():
    call = {"type": "function_call", "call_id": "call_1", "name": "add"}
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "1+2"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add"}]},
        {**call, "arguments": '{"b": 2, "a": 1}'},
        {**call, "call_id": "call_2", "name": "sub", "arguments": "x"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "no"}]},
        {"type": "function_call_output", "call_id": "call_1", "output": "3"},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "so 3"}]},
        {"type": "message", "role": "assistant", "content": "3"},
        {"type": "message", "role": "assistant", "content": "4"},
    ]
    add = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
    body = {
        "instructions": "be good",
        "input": items,
        "tools": [{"type": "function", "strict": False, **add}, {"type": "web_search"}],
        "max_output_tokens": 9,
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "text": {"verbosity": "low"},
        "store": False,
        "previous_response_id": None,
    }
    minus = {"type": "function", "function": {"name": "sub", "arguments": {"": "x"}}}
    assert responses.parse(json.dumps(body).encode()) == ChatRequest(
        messages=[
            {"role": "system", "content": "be good"},
            {"role": "system", "content": "be brief"},
            USER,
            {"role": "assistant", "content": "I add", "reasoning_content": "1+2", "tool_calls": [PLUS, minus]},
            {"role": "tool", "content": "no", "name": "sub"},
            {"role": "tool", "content": "3", "name": "add"},
            {"role": "assistant", "content": "3", "reasoning_content": "so 3"},
            {"role": "assistant", "content": "4"},
        ],
        tools=[{"type": "function", "function": add}],
        left_out=("web_search",),
        limit=9,
        logprobs=True,
    )
    assert responses.parse(b'{"input": "add 1 and 2"}').messages == [USER]


@pytest.mark.parametrize(
    "body",
    [
        {"input": []},
        {"input": 7},
        {"input": ["a"]},
        {"input": [{"type": "computer_call"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"input": [{"type": "function_call", "call_id": "a", "arguments": "{}"}]},
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"background": True},
        {"tool_choice": "required"},
        {"tools": [{"type": "function"}]},
        {"text": {"format": {"type": "json_schema"}}},
        {"max_output_tokens": 0},
        {"instructions": 7},
    ],
)
def test_what_a_response_may_not_ask_is_refused(body):
    with pytest.raises(Refused):
        responses.parse(json.dumps({"input": "go", **body}).encode())


def test_a_response_and_its_stream():
    replies = [Reply("I add", "1+2", [("add", {"a": 1, "b": 2})], "tool_calls", 11, 5, [("I add", -0.5)])]
    found = responses.document(ChatRequest([USER], model="m"), replies, 4)
    thinking, text, call = found["output"]
    assert (found["id"], found["status"], found["model"]) == ("resp_4", "completed", "m")
    assert thinking["content"] == [{"type": "reasoning_text", "text": "1+2"}]
    assert (text["role"], text["content"][0]["text"]) == ("assistant", "I add")
    assert [one["logprob"] for one in text["content"][0]["logprobs"]] == [-0.5]
    assert (call["name"], call["call_id"], call["arguments"]) == ("add", "call_4_0", '{"a": 1, "b": 2}')
    usage = found["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (11, 5, 16)
    sent = [event.split("\n") for event in responses.events(ChatRequest([USER], model="m"), replies, 4)]
    data = [json.loads(lines[1].removeprefix("data: ")) for lines in sent]
    assert [one["sequence_number"] for one in data] == list(range(len(sent)))
    assert [lines[0].removeprefix("event: ") for lines in sent] == [one["type"] for one in data]
    parts = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    item, arguments = ("output_item.added", "output_item.done"), ["delta", "done"]
    kinds = ["created"]
    for kind in ("reasoning_text", "output_text"):
        kinds += [item[0], *(part.format(kind) for part in parts), item[1]]
    kinds += [item[0], *(f"function_call_arguments.{part}" for part in arguments), item[1], "completed"]
    assert [one["type"].removeprefix("response.") for one in data] == kinds
    assert {**data[-1]["response"], "created_at": 0} == {**found, "created_at": 0}
    assert [one["item"] for one in data if one["type"].endswith("item.done")] == found["output"]
    assert data[0]["response"]["output"] == []


def test_a_response_that_is_cut():
    reply = Reply("3", "", [], "length", 11, 5)
    found = responses.document(ChatRequest([USER]), [reply], 4)
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert list(responses.events(ChatRequest([USER]), [reply], 4))[-1].startswith("event: response.incomplete\n")


# The match.


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"content": "a"}, {"content": " a\n"}, True),
        ({"content": None, "tool_calls": [CALL]}, {"content": "", "tool_calls": [PLUS]}, True),
        ({"content": "a", "thinking": "b"}, {"content": "a", "reasoning_content": "b"}, True),
        ({"content": "a", "thinking": "b"}, {"content": "a"}, False),
        ({"content": "a"}, {"content": "b"}, False),
        ({"content": "", "tool_calls": [PLUS]}, {"content": ""}, False),
    ],
)
def test_when_two_messages_are_the_same(one, other, same):
    role = {"role": "assistant"}
    assert (key_of({**role, **one}) == key_of({**role, **other})) is same
    assert key_of({**role, **one}) != key_of({"role": "user", **one})


def test_a_request_continues_the_longest_turn_that_is_its_beginning():
    def turn(*keys):
        return Finished(list(keys), [], SimpleNamespace(), [], {}, None)

    first, second, branch, again = turn("a", "x"), turn("a", "x", "b", "y"), turn("a", "z"), turn("a", "x")
    finished = [first, second, branch, again]
    assert continued(["a", "x", "b", "y", "c"], finished) is second
    assert continued(["a", "x", "c"], finished) is again
    assert continued(["a", "z", "b", "y"], finished) is branch
    assert continued(["a", "x", "b", "y"], finished) is second
    assert continued(["a"], finished) is None
    assert continued(["b", "a", "x"], finished) is None


def test_where_a_text_stops():
    texts = ["a", "bc", "d", "e"]

    def decode(ids):
        return "".join(texts[i] for i in ids)

    assert stop_at([0, 1, 2, 3], ["cd"], decode) == 3
    assert stop_at([0, 1, 2, 3], ["e", "b"], decode) == 2
    assert stop_at([0, 1, 2, 3], ["f"], decode) is None
    assert stop_at([0], ["a"], decode) == 1


def test_what_a_command_gets_of_the_row():
    row = {"prompt": [{"role": "system", "content": "no"}, {"role": "user", "content": "go"}], "n": 3}
    assert filled("{prompt} {n} {m} {{n}} {}", row) == "go 3 {m} {3} {}"


@pytest.mark.parametrize(
    ("path", "answer", "last"),
    [
        ("chat/completions", [Reply("hi", "", [], "stop", 1, 1)], "data: [DONE]"),
        ("messages", [Reply("hi", "", [], "stop", 1, 1)], 'event: message_stop\ndata: {"type": "message_stop"}'),
        ("chat/completions", Refused("no room", "context_length_exceeded"), "event: error\ndata: {"),
    ],
)
def test_a_stream_is_not_silent_while_it_waits(path, answer, last, monkeypatch):
    monkeypatch.setattr(server, "_SILENT_SECONDS", 0.01)
    endpoint, inbox = server.Endpoint({}), server.Inbox()
    stopped = []
    line = endpoint.open(inbox, lambda: stopped.append("the clock"))
    asked = {"messages": [USER], "stream": True, "max_tokens": 9}
    headers = {"Authorization": f"Bearer {line.key}"}
    try:
        with httpx.stream("POST", f"{line.url}/v1/{path}", json=asked, headers=headers, trust_env=False) as stream:
            [pending] = inbox.take()
            assert stopped == ["the clock"]
            lines = stream.iter_lines()
            assert [next(lines) for _ in range(4)] == [":", "", ":", ""]
            pending.done(answer)
            rest = "\n".join(text for text in lines if text != ":").strip()
    finally:
        endpoint.close()
    assert stream.status_code == 200
    assert last in rest.split("\n\n")[-1]
    assert ("hi" in rest) == isinstance(answer, list)
    assert ("no room" in rest) != isinstance(answer, list)


def test_a_refusal_at_once_has_its_status_in_a_stream_too():
    endpoint, inbox = server.Endpoint({}), server.Inbox()
    line = endpoint.open(inbox, lambda: None)
    try:
        asked = {"messages": [USER], "stream": True}
        answered = httpx.post(f"{line.url}/v1/chat/completions", json=asked, trust_env=False)
    finally:
        endpoint.close()
    assert (answered.status_code, answered.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.fixture
def endpoint():
    opened = server.Endpoint({})
    inbox = server.Inbox()
    yield opened, inbox
    opened.close()
    inbox.close()


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def status(url, key, body=b"{"):
    return httpx.post(f"{url}/v1/chat/completions", headers=bearer(key), content=body, trust_env=False).status_code


def test_only_the_key_of_an_episode_shows_that_it_was_there(endpoint):
    opened, inbox = endpoint
    one, other = (opened.open(inbox, lambda: None) for _ in range(2))
    root = one.url.rpartition("/")[0]
    assert status(one.url, one.key) == 400
    opened.shut(one)
    assert status(one.url, one.key) == 410
    assert {status(f"{root}/{n}", other.key) for n in (1, 3, 0, 10**30)} == {401}
    assert status(one.url, "none") == 401
    assert status(other.url, one.key) == 401


def test_connections_are_bounded_and_none_stays_without_a_key(monkeypatch, caplog):
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 20)
    monkeypatch.setattr(server, "_STRANGE_SECONDS", 0.5)
    opened, inbox = server.Endpoint({}), server.Inbox()
    line = opened.open(inbox, lambda: None)
    strangers = [socket.create_connection(opened._socket.getsockname()) for _ in range(200)]
    try:
        for stranger in strangers:
            stranger.settimeout(PATIENCE)
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""
        with httpx.Client(trust_env=False) as client:
            headers = {"Authorization": f"Bearer {line.key}"}
            for _ in range(2):
                assert client.get(f"{line.url}/v1/models", headers=headers).status_code == 200
                time.sleep(0.8)
    finally:
        for stranger in strangers:
            stranger.close()
        opened.close()
        inbox.close()
    assert not caplog.records


def test_an_episode_has_a_share_of_the_connections_and_headers_have_a_limit(monkeypatch):
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 20)
    opened, inbox = server.Endpoint({}), server.Inbox()
    greedy, modest = (opened.open(inbox, lambda: None) for _ in range(2))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(trust_env=False)) for _ in range(40)]
        found = [client.get(f"{greedy.url}/v1/models", headers=bearer(greedy.key)).status_code for client in clients]
        assert found == [200] * 5 + [429] * 35
        assert clients[0].get(f"{greedy.url}/v1/models", headers=bearer(greedy.key)).status_code == 200
        assert httpx.get(f"{modest.url}/v1/models", headers=bearer(modest.key), trust_env=False).status_code == 200
        endless = stack.enter_context(socket.create_connection(opened._socket.getsockname()))
        with pytest.raises(ConnectionError):
            endless.sendall(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5_000_000)
    opened.close()
    inbox.close()


@pytest.mark.parametrize("messages", ['{"role":"user","content":"a"},' * 50_000, "[]," * 140_000])
def test_a_request_of_very_many_parts_is_refused_before_they_are_made(messages):
    with pytest.raises(Refused, match="values, more than 131,072"):
        chat.parse(f'{{"messages": [{messages[:-1]}]}}'.encode())


@pytest.mark.parametrize(
    "more", [{"model": "m" * 201}, {"model": {"a": 1}}, {"stop": ["a"] * 65}, {"stop": "a" * 1001}]
)
def test_what_an_answer_repeats_or_looks_for_is_bounded(more):
    body = {"messages": [{"role": "user", "content": "a"}], **more}
    with pytest.raises(Refused, match=r"at most|more than"):
        chat.parse(json.dumps(body).encode())
