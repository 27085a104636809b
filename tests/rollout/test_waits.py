"""What a wait costs when the other side hangs, answers nonsense, or a signal ends the run; with a server of faults."""

import http.server
import json
import os
import signal
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from grpo_ext import waiting
from grpo_ext.commands import serve
from grpo_ext.errors import ConfigError, SamplerLost, ServerLost
from grpo_ext.registry import import_path
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.runtime import Runtime
from grpo_ext.rewards.scorers import OwnFunction
from grpo_ext.rollout.vllm import client as client_module
from grpo_ext.rollout.vllm.generation import Generation
from grpo_ext.rollout.vllm.gloo import TensorSpec, open_group, send
from grpo_ext.rollout.vllm.server import ServerTrouble
from grpo_ext.rollout.vllm.transfer import WeightClient
from grpo_ext.trainer.signals import Signals
from grpo_ext.waiting import Wait, WaitedInVain
from support import tiny
from support.trainers import build

SECONDS = 30
"""More than any wait of these tests takes on a busy machine."""


@pytest.fixture(autouse=True)
def run():
    with waiting.ended_by(waiting.Shutdown()):
        yield


def signal_after(seconds):
    timer = threading.Timer(seconds, waiting.shutdown().set)
    timer.start()
    return timer


# One wait.


def test_a_wait_says_once_what_it_waits_for_and_until_when_and_ends_at_its_limit(caplog):
    wait = Wait("The sampler", 0.4, "ddp_timeout")
    wait.silent = 0.1
    with pytest.raises(WaitedInVain, match=r"no sign of life for ddp_timeout=0\.4 s"):
        [time.sleep(min(0.05, wait.seconds())) for _ in range(1000)]
    lines = [record.message for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith("The sampler: no sign of life for 0 s. Waiting until ")
    assert lines[0].endswith("(ddp_timeout=0.4 s).")


def test_progress_moves_the_limit(caplog):
    wait, began = Wait("The sampler", 0.5, "ddp_timeout"), time.monotonic()
    while time.monotonic() - began < 1.2:
        time.sleep(min(0.1, wait.seconds()))
        wait.progressed()
    assert not caplog.records


def test_a_signal_while_training_ends_every_wait_of_its_run():
    received = Signals()
    wait = Wait("The sampler", 100.0, "ddp_timeout")
    with received.run():
        received.phase = "training"
        received.arrived(signal.SIGTERM)
        with pytest.raises(WaitedInVain, match="a signal ends the run"):
            wait.seconds()
    assert wait.seconds() > 0  # a signal of one run is none of the next


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def line_after(seconds, clock, caplog):
    """Silence of as long, then an answer; return after how many seconds a line told of it, None if none did."""
    caplog.clear()
    wait, began = Wait("The sampler", 1e9, "ddp_timeout"), clock[0]
    while clock[0] < began + seconds:
        clock[0] += 1
        wait.look()
        if caplog.records:
            break
    told = clock[0] - began if caplog.records else None
    clock[0] = began + seconds
    wait.progressed()
    return told


def test_a_silence_as_long_as_one_before_is_not_told_again_and_one_of_30_seconds_always(clock, caplog):
    silences = [7, 12, 12, 13, 5, 3600, 29, 3600]
    assert [line_after(seconds, clock, caplog) for seconds in silences] == [None, 8, 12, 12, None, 13, None, 30]


def test_what_was_silent_in_one_run_is_not_expected_to_be_so_in_the_next(clock, caplog):
    for _ in range(2):
        with waiting.ended_by(waiting.Shutdown()):
            assert line_after(20, clock, caplog) == 8


def test_waits_for_the_same_thing_share_one_line_until_one_of_them_hears_of_it(clock, caplog):
    """As the rows that a server completes, each by a request of its own, in a thread of its own."""
    rows = [Wait("The server", 1e9, "vllm_server_timeout") for _ in range(8)]
    for _ in range(60):
        clock[0] += 1.0
        [row.look() for row in rows]
    rows[3].progressed()
    clock[0] += 5.0
    [row.look() for row in rows]
    [row.progressed() for row in rows]
    assert [record.message[:39] for record in caplog.records] == [
        "The server: no sign of life for 8 s. Wa",
        "The server: it answers again.",
    ]


def test_what_is_imported_or_scores_without_a_limit_is_named_once_it_takes_long(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(waiting, "SILENT_SECONDS", 0.1)
    file = tmp_path / "rewards_that_wait.py"
    slow = "def slow(completions, **_):\n    time.sleep(SECONDS.pop())\n    return [1.0]\n"
    file.write_text(f"import time\ntime.sleep(0.5)\nSECONDS = [0.1, 0.8]\n{slow}")
    reward = import_path(f"{file}:slow")
    assert import_path(f"{file}:slow") is reward
    spec = RewardSpec("slow", f"{file}:slow", isolate=False)
    [component] = Runtime([spec], workers=0).functions
    assert component(completions=["a"], prompts=["b"]) == [1.0]
    assert OwnFunction(reward).scores({"completions": ["a"], "prompts": ["b"]}).values == [1.0]
    lines = [record.message for record in caplog.records]
    assert [line.partition(":")[0] for line in lines] == [f"Import of {file}"] * 2 + ["reward 'slow'"] * 2
    assert "it has not returned for 0 s, and nothing limits it. Ctrl-C ends it." in lines[0]
    assert lines[2].endswith(f"isolate: true limits it, by timeout={spec.timeout:g} s.")
    assert lines[3] == "reward 'slow': it has returned."


@pytest.mark.parametrize("spoils", [False, True])
def test_a_signal_leaves_a_reward_that_hangs_in_the_main_thread(spoils, monkeypatch):
    """Again, where the function has caught what was to end it."""
    monkeypatch.setattr(waiting, "GRACE_SECONDS", 0.1)
    before = signal.getsignal(signal.SIGRTMIN)

    def hangs(completions, **_):
        waiting.shutdown().set()
        try:
            time.sleep(SECONDS)
        except BaseException:
            if not spoils:
                raise
        time.sleep(SECONDS)

    began = time.monotonic()
    scores = OwnFunction(hangs).scores({"prompts": ["b"], "completions": ["a"]})
    assert time.monotonic() - began < SECONDS / 2
    assert (scores.values, scores.error) == ([0.0], waiting.SIGNALLED)
    assert signal.getsignal(signal.SIGRTMIN) == before


# A server that plants faults.


def choice(ids, logprobs=True):
    tokens = [f"token_id:{token}" for token in ids]
    found = {"tokens": tokens, "token_logprobs": [-0.5] * len(ids), "top_logprobs": [None] * len(ids)}
    return {"prompt_token_ids": [3], "token_ids": ids, "logprobs": found if logprobs else None}


GOOD = {"choices": [choice([4, 5]), choice([6])]}
HANGS = "hangs"


@pytest.fixture
def faults():
    """Answers to requests for completions, in turn; the last one stays. A status, a text, an object, or HANGS."""
    answers, over = [], threading.Event()

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            models = json.dumps({"data": [{"id": "a model"}]})
            self.answer(200, "process_start_time_seconds 7\n" if self.path == "/metrics" else models)

        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            planted = answers.pop(0) if len(answers) > 1 else answers[0]
            if planted == HANGS:
                over.wait(SECONDS)
            elif isinstance(planted, int):
                self.answer(planted, "planted")
            else:
                self.answer(200, planted if isinstance(planted, str) else json.dumps(planted))

        def answer(self, status, text):
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield SimpleNamespace(answers=answers, url=f"http://127.0.0.1:{server.server_address[1]}")
    over.set()
    server.shutdown()


def client_of(faults, patience=SECONDS):
    client = WeightClient(faults.url, float(patience), 0, "gloo")
    client.serving = "started at 7.0"
    return client


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (500, "answered 500: planted"),
        (429, "answered 429: planted"),
        ("{not json", "Expecting property name"),
        ("[]", "answered something else than completions"),
        ({"choices": []}, "answered something else than completions|fewer completions"),
        ({"choices": [choice([4, 5])]}, "fewer completions or log-probabilities"),
        ({"choices": [choice([4, 5], logprobs=False), choice([6], logprobs=False)]}, "something else|fewer"),
        ({"choices": [choice([4, 5]), {**choice([6]), "token_ids": [6, 7]}]}, "fewer completions or log-prob"),
        ({"error": "no"}, "KeyError: 'choices'"),
    ],
    ids=str,
)
def test_a_wrong_answer_is_named_and_may_be_asked_for_again(planted, words, faults):
    faults.answers[:] = [planted, GOOD]
    client = client_of(faults)
    with pytest.raises(ServerTrouble, match=words):
        client.generate([[3], [3]], max_tokens=4)
    assert client.generate([[3], [3]], max_tokens=4)["completion_ids"] == [[4, 5], [6]]


def test_a_request_that_is_refused_is_not_asked_again(faults):
    faults.answers[:] = [400]
    with pytest.raises(RuntimeError, match="answered 400") as error:
        client_of(faults).generate([[3]], max_tokens=4)
    assert not isinstance(error.value, ServerTrouble)


def test_a_server_that_hangs_is_named_soon_and_left_at_once_on_a_signal(faults, monkeypatch, caplog):
    monkeypatch.setattr(waiting, "SILENT_SECONDS", 0.2)
    faults.answers[:] = [HANGS]
    client, began = client_of(faults), time.monotonic()
    timer = signal_after(2.0)
    with pytest.raises(ServerTrouble, match="a signal ends the run"):
        client.generate([[3], [3]], max_tokens=4)
    timer.join()
    assert time.monotonic() - began < SECONDS / 2
    assert any(f"vLLM server at {faults.url}: no sign of life" in record.message for record in caplog.records)


def test_a_server_that_hangs_ends_the_wait_at_the_limit(faults, monkeypatch):
    monkeypatch.setattr(client_module, "POLL_SECONDS", 0.1)
    faults.answers[:] = [HANGS]
    with pytest.raises(ServerTrouble, match=r"no sign of life for vllm_server_timeout=0\.5 s"):
        client_of(faults, patience=0.5).generate([[3], [3]], max_tokens=4)


def generation_of(client, seconds):
    found = Generation.__new__(Generation)
    vars(found).update(vllm_client=client, server_timeout=seconds, mode="server")
    found.accelerator = SimpleNamespace(is_main_process=True, device=torch.device("cpu"))
    return found


def test_a_signal_ends_the_wait_for_a_server_that_is_away(faults):
    client = client_of(faults)
    client.base_url, began = "http://127.0.0.1:1", time.monotonic()
    timer = signal_after(1.0)
    with pytest.raises(ServerLost, match="refused; not waited for, since a signal ends the run"):
        generation_of(client, 1000.0).reopen([ServerTrouble("connection refused")])
    timer.join()
    assert time.monotonic() - began < SECONDS


def test_a_push_whose_request_fails_leaves_the_broadcast_at_once():
    """Nobody receives: gloo would wait for its whole time limit, and destroying the group as well."""
    store, groups = HashStore(), {}

    def join(rank):
        groups[rank] = open_group(store, "run", rank, 2, 600.0)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    began, weight = time.monotonic(), torch.zeros(1000, 1000)
    specs = [TensorSpec("w", torch.float32, (1000, 1000))]
    with pytest.raises(RuntimeError, match="the request for them failed"):
        send(groups.pop(0), specs, iter([("w", weight)]), lambda: time.monotonic() - began > 0.5)
    assert time.monotonic() - began < SECONDS


def test_a_server_that_comes_back_as_another_is_compared_again_and_refused():
    client = SimpleNamespace(base_url="http://server", joined="first")
    generation = generation_of(client, 10.0)
    client.reconnect = lambda device, patience: setattr(client, "joined", "second")

    def check(url):
        raise RuntimeError(f"the one at {url} does not suit this run")

    generation._check_server = check
    with pytest.raises(RuntimeError, match="does not suit this run"):
        generation.reopen([ServerTrouble("connection refused")])
    client.reconnect = lambda device, patience: None  # the same server
    generation.reopen([ServerTrouble("connection refused")])


# A server's start.


def test_serve_refuses_a_port_at_which_another_program_listens():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"vllm_server_port={port}: another program listens there"):
            serve.run_server(None, "127.0.0.1", port, hint="")


# The process that samples.


def children_of(sampler):
    return sampler._process._child.pid


def process_sampler(tmp_path, limit):
    from grpo_ext.rollout.process.policy import process_sampler as made

    without_end = {"loss_defaults": "trl", "generation_kwargs": {"suppress_tokens": [tiny.WORDS.index("<eos>")]}}
    settings = {"rollout_engine": "process", "max_completion_length": 24, "ddp_timeout": limit}
    trainer = build(tiny.model(), tmp_path, **settings, **without_end)
    return made(trainer, trainer.args)


def ask(sampler):
    return sampler.sample(0, [[5, 6, 7], [9, 8]], [24, 24], [np.random.default_rng(row) for row in range(2)])


@pytest.mark.slow
@pytest.mark.usefixtures("forked_samplers")
def test_a_process_that_hangs_is_started_again_at_the_limit_and_samples_the_same(tmp_path, caplog):
    sampler = process_sampler(tmp_path, 60)
    try:
        sampler.publish(0)
        expected = ask(sampler)
        sampler._limit = 3.0
        os.kill(children_of(sampler), signal.SIGSTOP)
        threading.Timer(2.0, lambda: setattr(sampler, "_limit", 600.0)).start()
        assert ask(sampler) == expected
    finally:
        sampler.close()
    assert "no sign of life for ddp_timeout=3 s. It is started and asked again." in caplog.text


@pytest.mark.slow
def test_a_process_that_hangs_is_left_at_once_on_a_signal(tmp_path):
    sampler = process_sampler(tmp_path, 1800)
    try:
        sampler.publish(0)
        ask(sampler)
        os.kill(children_of(sampler), signal.SIGSTOP)
        timer, began = signal_after(1.0), time.monotonic()
        with pytest.raises(SamplerLost, match="a signal ends the run"):
            ask(sampler)
        timer.join()
        assert time.monotonic() - began < SECONDS
    finally:
        sampler.close()


def test_a_process_that_decodes_for_long_shows_that_it_lives():
    from grpo_ext.rollout.process.child import _Heartbeat

    sent = []
    beat = _Heartbeat(lambda: sent.append(1))
    beat()
    assert sent == []
    beat._last -= 2.0
    beat()
    beat()
    assert sent == [1]


def test_a_wait_whose_limit_its_caller_keeps_ends_on_a_signal_only_after_its_grace(monkeypatch):
    """Also where this process was stopped for longer than the limit."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    first = Wait("reward slow", 10.0, "timeout", grace=5.0)
    now[0] = 1000.0
    assert first.look() == waiting.POLL_SECONDS
    waiting.shutdown().set()
    now[0] = 1004.0
    assert Wait("another", 10.0, "timeout", grace=5.0).look() == waiting.POLL_SECONDS
    now[0] = 1006.0
    for wait in (first, Wait("a third", 10.0, "timeout", grace=5.0)):
        with pytest.raises(WaitedInVain, match="a signal ends the run"):
            wait.look()
