"""The remote reward against a real server on this machine that answers, fails, hangs and lies."""

import asyncio
import base64
import gzip
import json
import logging
import threading
import time
import tracemalloc
from collections import Counter
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.composition import parse_rewards
from grpo_ext.rewards.models import http_client
from grpo_ext.rewards.models.http_client import RemoteRewardError
from grpo_ext.rewards.runtime import Runtime

remote = rewards["remote"]

N = 10
TEXTS = [chr(ord("a") + i) * (i + 1) for i in range(N)]  # of N different lengths, 1 to N: the score of each
LENGTHS = [float(i + 1) for i in range(N)]
COLUMNS = {"prompts": ["q"] * N, "completions": TEXTS}


class Server(ThreadingHTTPServer):
    """Answers each POST by `self.answer(path, body, count)`: a JSON value, or (status, text, headers)."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.requests, self.headers, self.times = answer, [], [], []
        self.lock, self.running, self.most = threading.Lock(), 0, 0
        self.seen = Counter()
        self.released = threading.Event()

    def handle_error(self, request, client_address):
        pass  # a client that gave up

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one packet

    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        server = self.server
        with server.lock:
            server.running += 1
            server.most = max(server.most, server.running)
            server.requests.append(json.loads(text))
            server.headers.append(dict(self.headers))
            server.times.append(time.monotonic())
            server.seen[text] += 1
            count = server.seen[text]
        try:
            reply = server.answer(self.path, json.loads(text), count)
        finally:
            with server.lock:
                server.running -= 1
        if reply is None:  # a lost connection
            self.close_connection = True
            return
        if callable(reply):
            reply(self)
            return
        status, body, headers = reply if isinstance(reply, tuple) else (200, json.dumps(reply), {})
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body.encode()))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers = []

    def start(answer):
        server = Server(answer)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.released.set()
        server.shutdown()
        server.server_close()


def lengths_of(path, body, count):
    """vLLM's /score, the last first: the score of a pair is the length of its second text."""
    data = [{"index": i, "object": "score", "score": float(len(text))} for i, text in enumerate(body["text_2"])]
    return {"id": "score-1", "object": "list", "data": data[::-1], "usage": {}}


def score(server, **options):
    options = {"url": f"{server.url}/score", "protocol": "score", "backoff": 0.01} | options
    return asyncio.run(remote(**(COLUMNS | options)))


# What is sent and read


def test_score_sends_batches_of_pairs_and_keeps_the_order(serve):
    server = serve(lengths_of)
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}]}]
    columns = {"prompts": [prompt, *COLUMNS["prompts"][1:]], "completions": [[{"content": "a"}], *TEXTS[1:]]}
    options = {"batch_size": 4, "model": "m", "scale": 0.5, "extra_body": {"truncate_prompt_tokens": 9}}
    assert score(server, **columns, **options) == [length / 2 for length in LENGTHS]
    assert sorted(len(body["text_1"]) for body in server.requests) == [2, 4, 4]
    [first] = [body for body in server.requests if "a" in body["text_2"]]
    assert first == {
        "model": "m",
        "text_1": ["system: s\nuser: q", "q", "q", "q"],
        "text_2": TEXTS[:4],
        "truncate_prompt_tokens": 9,
    }
    assert all("Authorization" not in headers for headers in server.headers)


@pytest.mark.parametrize("protocol", ["classify", "pooling"])
def test_a_chat_goes_to_the_servers_own_template_one_per_request(serve, protocol):
    def answer(path, body, count):
        assert path == f"/{protocol}"
        value = float(len(body["messages"][-1]["content"]))
        item = (
            {"probs": [value], "label": "LABEL_0", "num_classes": 1} if protocol == "classify" else {"data": [value]}
        )
        return {"data": [{"index": 0, **item}]}

    server = serve(answer)
    prompt = [{"role": "user", "content": "q"}]
    columns = {"prompts": [prompt] * N, "completions": [[{"role": "assistant", "content": text}] for text in TEXTS]}
    assert score(server, **columns, url=f"{server.url}/{protocol}", protocol=protocol) == LENGTHS
    messages = [*prompt, {"role": "assistant", "content": "a"}]
    assert {"messages": messages, "use_activation": False} in server.requests
    assert len(server.requests) == N


def test_a_template_makes_batches_of_texts_with_any_column(serve):
    def answer(path, body, count):
        return {"data": [{"index": i, "probs": [0.25, float(len(text))]} for i, text in enumerate(body["input"])]}

    server = serve(answer)
    options = {"protocol": "classify", "template": "{solution}|{prompt}{{}}{completion}", "class_index": 1}
    options |= {"batch_size": 6, "extra_body": {"use_activation": None}, "solution": [str(i) for i in range(N)]}
    assert score(server, **options) == [length + 5 for length in LENGTHS]
    assert {"input": [f"{i}|q{{}}{TEXTS[i]}" for i in range(6)]} in server.requests
    options["class_index"] = None
    with pytest.raises(RemoteRewardError, match="2 classes: set class_index"):
        score(server, **options)


def test_pooling_of_a_model_that_scores_tokens_takes_the_last(serve):
    server = serve(lambda *_: {"data": [{"index": 0, "object": "pooling", "data": [[7.0], [-1.0], [2.5]]}]})
    assert score(server, protocol="pooling", prompts=["q"], completions=["a"]) == [2.5]


def test_a_judge_is_asked_by_template_and_its_last_number_counts(serve):
    replies = {"a": "Score: 3 at first. Score: **-7.5**/10", "bb": "no idea", "ccc": None, "dddd": "score: 1e999"}

    def answer(path, body, count):
        [message] = body["messages"]
        content = replies.get(message["content"].split("\n")[-1], "9" * 400)
        return {"choices": [{"message": {"role": "assistant", "content": content}}]}

    server = serve(answer)
    judge = {"protocol": "openai_judge", "model": "j", "template": "{prompt}, {solution}\n{completion}"}
    columns = {"prompts": ["q"] * 4, "completions": TEXTS[:4], "solution": list("wxyz")}
    assert score(server, **judge, **columns, scale=0.1) == [pytest.approx(-0.75), None, None, None]
    assert {"model": "j", "messages": [{"role": "user", "content": "q, w\na"}], "temperature": 0} in server.requests
    columns["completions"] = ["eeeee"] * 4
    assert score(server, **judge, **columns, pattern=r"^(\d+)$") == [None] * 4  # not finite
    replies["a"] = "grade (A) 4"
    columns["completions"] = ["a"] * 4
    assert score(server, **judge, **columns, pattern=r"grade \(\w\) (\d)") == [4.0] * 4
    assert score(server, protocol="openai_judge", prompts=["{x}"], completions=["{y}"]) == [None]
    text = server.requests[-1]["messages"][0]["content"]
    assert "[Question]\n{x}\n" in text
    assert "[Answer]\n{y}\n" in text


def test_the_key_is_sent_and_never_shown(serve, monkeypatch):
    server = serve(lambda *_: (401, "bad key sk-secret", {}))
    monkeypatch.setenv("JUDGE_KEY", "sk-secret\n")
    with pytest.raises(RemoteRewardError) as error:
        score(server, url=f"{server.url}/score?token=abc", api_key_env="JUDGE_KEY")
    assert server.headers[0]["Authorization"] == "Bearer sk-secret"
    shown = f"POST {server.url}/score: answered 401: "
    assert str(error.value) == f"{shown}'bad key ***'. Check the key in api_key_env."
    with_user = server.url.replace("http://", "http://user:pass-word@") + "/score"
    with pytest.raises(RemoteRewardError, match=f"^{shown}"):
        score(server, url=with_user)
    assert server.headers[-1]["Authorization"].startswith("Basic ")
    with pytest.raises(ValueError, match="only one would be sent") as error:
        score(server, url=with_user, api_key_env="JUDGE_KEY")
    assert "pass-word" not in str(error.value)
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ValueError, match="api_key_env='JUDGE_KEY'"):
        score(server, api_key_env="JUDGE_KEY")


def test_unpaired_surrogates_and_null_scores(serve):
    scores = [1.5, None, float("nan")]
    server = serve(lambda *_: {"data": [{"index": i, "score": s} for i, s in enumerate(scores)]})
    assert score(server, prompts=["\ud800"] * 3, completions=["\udfff", "é", ""]) == [1.5, None, None]
    assert server.requests[0]["text_2"] == ["\udfff", "é", ""]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        *((f"Score: {reply}", value) for reply, value in {"7": 7, ".5": 0.5, "-.5/1": 0, "**7.5**": 7.5}.items()),
        *((f"score: {reply}", value) for reply, value in {"1e1": 10, "2.5E-1.": 0.25, "8.": 8, "1e999": None}.items()),
        *((f"Score: {reply}", value) for reply, value in {"1e308": 10, "11": 10, "-1e308": 0, "10.0": 10}.items()),
        ([{"type": "text", "text": "Fine.\nSco"}, {"type": "text", "text": "re: 7"}], 7.0),
        (["Score: 2"], 2.0),
        ([{"type": "refusal"}], None),
        (None, None),
    ],
)
def test_a_judges_answer_is_a_text_or_a_list_of_parts(serve, content, expected):
    server = serve(lambda *_: {"choices": [{"message": {"role": "assistant", "content": content}}]})
    columns = {"prompts": ["q"], "completions": ["a"]}
    assert score(server, **columns, url=f"{server.url}/v1/chat/completions", protocol="openai_judge") == [expected]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"template": "Rate from 1 to 5.\n{completion}", "score_range": [1, 5], "scale": 0.2}, 1.0),
        ({"score_range": [0, 1], "scale": 3.0}, 3.0),
        ({"template": "{completion}"}, 1e308),
        ({"template": "{completion}", "scale": 10.0}, None),  # it would be infinite
    ],
)
def test_a_judges_score_is_clipped_to_the_scale_that_its_template_states(serve, options, expected):
    server = serve(lambda *_: {"choices": [{"message": {"role": "assistant", "content": "Score: 1e308"}}]})
    columns = {"prompts": ["q"], "completions": ["a"], "protocol": "openai_judge"}
    assert score(server, **columns, **options) == [pytest.approx(expected) if expected else None]


SECRETS = ("pl4nted-user", "pl4nted%2Fpass", "pl4nted-query", "pl4nted-fragment", "pl4nted-key")


@pytest.mark.parametrize("answer", ["status", "scores", "nobody", "no address"])
def test_no_part_of_an_address_that_may_be_secret_is_shown(serve, answer, monkeypatch):
    """The server repeats the request's line and headers in its error."""
    user, password, query, fragment, key = SECRETS

    def echo(handler, *_):
        text = f"{handler.path} {handler.headers['Authorization']}".encode()
        handler.send_response(400 if answer == "status" else 200)
        handler.send_header("Content-Length", str(len(text) + 2))
        handler.end_headers()
        handler.wfile.write(b'"' + text + b'"')

    server = serve(lambda *_: echo)
    address = server.url.removeprefix("http://")
    monkeypatch.setenv("JUDGE_KEY", key)
    url = {
        "nobody": f"http://{user}:{password}@127.0.0.1:9/score?sig={query}#{fragment}",
        "no address": f"{address}/score?sig={query}&user={user}#{fragment}",
    }.get(answer, f"http://{user}:{password}@{address}/score?sig={query}&{fragment}")
    with pytest.raises((RemoteRewardError, ValueError)) as caught:
        score(server, url=url, retries=0)
    for secret in (*SECRETS, "pl4nted/pass", base64.b64encode(f"{user}:pl4nted/pass".encode()).decode()):
        assert secret not in str(caught.value)


# Failures


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_an_answer_without_end_takes_bounded_memory(serve, monkeypatch, encoding):
    """In memory it is a thousand times as large where it is compressed."""
    chunk = b" " * (1 << 20) if encoding == "identity" else gzip.compress(b" " * (1 << 26))

    def endless(handler):
        handler.send_response(200)
        handler.send_header("Content-Encoding", encoding)
        handler.send_header("Connection", "close")
        handler.end_headers()
        while not handler.server.released.is_set():
            handler.wfile.write(chunk)

    monkeypatch.setattr(http_client, "LARGEST_RESPONSE", 4 << 20)
    server = serve(lambda *_: endless)
    tracemalloc.start()
    try:
        with pytest.raises(RemoteRewardError, match=r"more than 4 MiB|in Content-Encoding 'gzip', which was not"):
            score(server, prompts=["q"], completions=["a"], timeout=10.0, retries=0)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert server.headers[0]["Accept-Encoding"] == "identity"


def test_a_server_that_is_down_is_asked_once_a_batch(serve, runtime, caplog):
    server = serve(lambda *_: (503, "down", {}))
    kwargs = {"url": f"{server.url}/score", "protocol": "score", "retries": 1, "backoff": 0.01, "batch_size": 5}
    [spec], problems = parse_rewards([{"name": "remote", "kwargs": kwargs}])
    assert problems == []
    assert asyncio.run(runtime(spec).functions[0](**COLUMNS)) == [None] * N
    assert len(server.requests) == 4  # two batches, each tried twice
    [record] = caplog.records
    assert "reward 'remote' (remote) failed on 10 of 10 completions" in record.message
    assert "answered 503: 'down'" in record.message
    assert "independent" not in record.message


@pytest.mark.parametrize("fault", [429, 408, 500, 503, None])
def test_what_may_pass_is_tried_again(serve, fault):
    def answer(path, body, count):
        return lengths_of(path, body, count) if count == 3 else fault and (fault, "busy", {})

    server = serve(answer)
    assert score(server, batch_size=5, retries=2) == LENGTHS
    assert len(server.requests) == 6
    server.seen.clear()
    with pytest.raises(RemoteRewardError, match=r"answered 5|answered 4|RemoteProtocolError|ReadError") as error:
        score(server, batch_size=5, retries=1)
    assert "(2 attempts)" in str(error.value)
    assert len(server.requests) == 10


@pytest.mark.parametrize("status", [400, 422, 301, 404])
def test_what_will_not_pass_is_not_tried_again(serve, status):
    server = serve(lambda *_: (status, "x" * 500, {"Location": "/elsewhere"}))
    with pytest.raises(RemoteRewardError) as error:
        score(server, batch_size=1, max_concurrency=1)
    assert f"POST {server.url}/score: answered {status}: '{'x' * 200}...'" in str(error.value)
    assert len(server.requests) == (1 if status == 404 else N)  # no request can do better than the first


def test_the_pause_doubles_and_is_jittered(serve, monkeypatch):
    server, pauses, real = serve(lambda *_: (503, "", {})), [], asyncio.sleep

    async def sleep(seconds):
        pauses.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    for _ in range(2):
        with pytest.raises(RemoteRewardError, match=r"answered 503: nothing. \(8 attempts\)"):
            score(server, batch_size=N, retries=7, backoff=0.2, timeout=10.0)
    assert len(set(pauses)) == 14
    for pause, middle in zip(pauses, [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0] * 2, strict=True):
        assert 0.5 * middle <= pause <= 1.5 * middle


@pytest.mark.parametrize(
    ("header", "attempts"), [("1", 2), ("date", 2), ("3600", 1), ("soon", 2), ("-5", 2), ("nan", 2)]
)
def test_retry_after_is_honoured_unless_it_asks_too_much_or_is_nonsense(serve, header, attempts):
    # a date has whole seconds: two ahead is between one and two seconds from now
    after = formatdate(time.time() + 2, usegmt=True) if header == "date" else header
    server = serve(lambda *_: (429, "later", {"Retry-After": after}))
    with pytest.raises(RemoteRewardError, match=r"after 3600 s: 'later'" if attempts == 1 else "429: 'later'"):
        score(server, batch_size=N, retries=1, timeout=60.0)
    assert len(server.requests) == attempts
    waited = server.times[-1] - server.times[0]
    assert waited >= (0.95 if header in ("1", "date") else 0.0)
    assert waited < 30


def drip(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.1)


@pytest.mark.cases(1)
@pytest.mark.parametrize("answer", [lambda server: server.released.wait(10) and None, lambda server: drip])
def test_a_server_that_hangs_or_drips_costs_the_timeout(serve, answer):
    server = serve(lambda *_: answer(server))
    started = time.monotonic()
    with pytest.raises(RemoteRewardError, match=r"no answer within 1.5 s \(2 attempts\)"):
        score(server, batch_size=N, retries=1, timeout=1.5)
    assert 3.0 <= time.monotonic() - started < 15
    assert len(server.requests) == 2


def test_nobody_there_ends_all_requests_at_once(serve):
    server = serve(lengths_of)
    server.shutdown()
    server.server_close()
    started = time.monotonic()
    with pytest.raises(RemoteRewardError, match=r"cannot connect.*\(3 attempts\)"):
        score(server, batch_size=1, max_concurrency=1, retries=2, backoff=0.1)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    "garbage",
    [
        (200, "<html>", {}),
        (200, "{}", {"Content-Encoding": "gzip"}),
        *([], {"data": []}, {"data": None}, {"data": [7]}),
        {"data": [{"index": 0, "score": 1.0}] * N},
        {"data": [{"index": i + 1, "score": 1.0} for i in range(N)]},
        *({"data": [{"index": i, "score": value} for i in range(N)]} for value in ("1.0", True, 10**400)),
        {"data": [{"index": i} for i in range(N)]},
        *({"choices": value} for value in ("text", [{"message": "text"}], [{"message": {"content": [3]}}])),
    ],
)
def test_garbage_is_an_error_that_shows_it(serve, garbage):
    server = serve(lambda *_: garbage)
    options = {"protocol": "openai_judge"} if "choices" in garbage else {"batch_size": N}
    shown = f"POST {server.url}/score: answered .*(html|gzip|data|choices|\\[\\])"
    with pytest.raises(RemoteRewardError, match=shown):
        score(server, **options)
    assert len(server.requests) == (N if "choices" in garbage else 1)


def test_a_part_that_fails_is_none_with_one_warning(serve, caplog):
    server = serve(
        lambda path, body, count: (500, "bad", {}) if "ccc" in body["text_2"] else lengths_of(path, body, 1)
    )
    with caplog.at_level(logging.WARNING, "grpo_ext"):
        scores = score(server, batch_size=2, retries=1)
    assert scores == [1.0, 2.0, None, None, *LENGTHS[4:]]
    [record] = [record for record in caplog.records if record.name.startswith("grpo_ext")]
    assert record.getMessage() == (
        f"1 of 5 requests gave no scores (None): POST {server.url}/score: answered 500: 'bad'. (2 attempts)"
    )


# Concurrency


@pytest.mark.parametrize("most", [1, 3])
def test_concurrency_is_used_and_bounded(serve, most):
    def answer(path, body, count):
        time.sleep(0.05)
        return lengths_of(path, body, count)

    server = serve(answer)
    assert score(server, batch_size=1, max_concurrency=most) == LENGTHS
    assert server.most == most


def test_a_cancelled_call_leaves_nothing_behind(serve):
    server = serve(lambda *_: server.released.wait(10) and None)

    async def cancelled():
        call = remote(**COLUMNS, url=f"{server.url}/score", protocol="score", batch_size=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call, 1.0)
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert asyncio.run(cancelled()) == []
    assert 0 < len(server.requests) <= 8


# Options


def test_nothing_to_score_needs_no_server():
    columns = {"prompts": [], "completions": []}
    assert asyncio.run(remote(**columns, url="http://127.0.0.1:9/score", protocol="score")) == []


def test_a_recipes_entry_is_an_async_reward_for_trl(serve):
    server = serve(lengths_of)
    specs, problems = parse_rewards(
        [{"name": "remote", "kwargs": {"url": f"{server.url}/score", "protocol": "score"}}]
    )
    assert problems == []
    [reward] = Runtime(specs, workers=0).functions
    assert asyncio.run(reward(**COLUMNS, completion_ids=[[1]] * N, trainer_state=None, label=[1] * N)) == LENGTHS
    assert parse_rewards([{"name": "remote", "kwargs": {"url": "http://h", "protocol": "scores"}}])[1] != []
