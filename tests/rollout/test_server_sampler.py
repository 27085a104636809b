"""`ServerSampler` without an engine: when it asks, when weights move, and what a dead server costs."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from grpo_ext.errors import ServerLost
from grpo_ext.packing.sampling_support import decoded
from grpo_ext.rollout.vllm import client as client_module
from grpo_ext.rollout.vllm import sampler as sampler_module
from grpo_ext.rollout.vllm.client import Client
from grpo_ext.rollout.vllm.sampler import Repairs, ServerSampler
from grpo_ext.rollout.vllm.server import ServerTrouble
from grpo_ext.rollout.vllm.transfer import WeightClient
from grpo_ext.rollout.vllm.weights import HostCopy
from grpo_ext.waiting import in_thread

SECONDS = 20
"""More than any wait of these tests takes."""


class FakeServer:
    """Answers a request by its context, its seed and the weights it has; `down` makes requests fail."""

    def __init__(self):
        self.weights, self.starts, self.down = None, 0, False
        self.asked, self.gate = [], threading.Event()
        self.gate.set()

    def answer(self, context, request):
        self.asked.append((context, request["max_tokens"], request["generation_kwargs"]["seed"], self.weights))
        assert self.gate.wait(SECONDS)
        if self.down:
            raise ServerTrouble("connection refused")
        seed = request["generation_kwargs"]["seed"]
        return {
            "completion_ids": [[*context, seed % 7]],
            "logprobs": [[[-0.5, -9999.0, -0.25] for _ in context] + [[None, -0.5, -0.25]]],
            "logprob_token_ids": [[[token, 9, 2] for token in context] + [[seed % 7, 9, 2]]],
        }

    def restart(self):
        self.starts, self.weights, self.down = self.starts + 1, None, False


class FakeGeneration:
    """The part of `Generation` that the sampler uses, before a `FakeServer`; the policy's weights are a number."""

    support_bound, server_url, server_timeout = None, "http://server", 5.0
    adapts, adapter, kept = False, None, ()

    def __init__(self, server):
        self.server, self.policy, self.pushes, self.returns = server, 0, [], True
        self.accelerator = SimpleNamespace(
            is_main_process=True, num_processes=1, wait_for_everyone=lambda: None, device=torch.device("cpu")
        )
        self.vllm_client = SimpleNamespace(
            serving="0",
            identity=lambda: str(server.starts),
            healthy=lambda: not server.down,
            generate=lambda prompts, **request: self._complete(prompts[0], request),
        )

    def _complete(self, context, request):
        if self.vllm_client.identity() != self.vllm_client.serving:
            raise ServerTrouble("restarted")
        return self.server.answer(context, request)

    def settings(self):
        return {"temperature": 1.0, "logprobs": 0, "generation_kwargs": {"ignore_eos": True}}

    def on_main(self, action):
        action()

    def sync_weights(self, copy):
        for _ in copy.taking([("w", torch.tensor(self.policy))]):
            self._push(self.policy)

    def push_again(self, copy, troubles=()):
        if troubles and not self.returns:
            raise self.lost(troubles[-1])
        for _, weight in copy.named(torch.device("cpu")):
            self._push(int(weight))

    def _push(self, weight):
        if self.server.down:
            self.server.restart()
        self.server.weights, self.vllm_client.serving = weight, str(self.server.starts)
        self.pushes.append(weight)

    def lost(self, trouble):
        return ServerLost(f"{trouble}; it did not recover")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(sampler_module, "LONGEST_PAUSE", 0.01)


@pytest.fixture
def server():
    return FakeServer()


@pytest.fixture
def generation(server):
    return FakeGeneration(server)


@pytest.fixture
def sampler(generation):
    made = ServerSampler(generation)
    made.publish(0)
    yield made
    made.close()


def streams(*seeds):
    return [np.random.default_rng(seed) for seed in seeds]


def until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_row_is_a_request_of_its_own_with_its_limit_and_a_seed_from_its_stream(sampler, server):
    found = sampler.sample(0, [[3], [4, 5]], [7, 9], streams(1, 2))
    seeds = [int(stream.integers(2**31)) for stream in streams(1, 2)]
    assert sorted(server.asked) == [([3], 7, seeds[0], 0), ([4, 5], 9, seeds[1], 0)]
    assert [row.ids for row in found] == [[3, seeds[0] % 7], [4, 5, seeds[1] % 7]]
    assert found[0].logps == pytest.approx([-0.5, np.nan], nan_ok=True)
    assert found[0].support is None


def test_rows_are_in_their_order_whichever_ends_first(sampler, generation):
    complete, ended = generation.vllm_client.generate, []

    def slow_for_first(prompts, **request):
        if prompts[0] == [1]:
            until(lambda: len(ended) == 2)
        answer = complete(prompts, **request)
        ended.append(prompts[0])
        return answer

    generation.vllm_client.generate = slow_for_first
    found = sampler.sample(0, [[1], [2], [3]], [1] * 3, streams(1, 2, 3))
    assert ended[-1] == [1]
    assert [row.ids[0] for row in found] == [1, 2, 3]


def test_it_returns_the_tokens_that_a_truncated_server_kept(generation):
    generation.support_bound = 5
    sampler = ServerSampler(generation)
    sampler.publish(0)
    (row,) = sampler.sample(0, [[3]], [1], streams(1))
    counts, ids = decoded(row.support)
    assert counts.tolist() == [2, 3]  # 9 was left out at the first token
    assert ids.tolist() == [3, 2, row.ids[1], 9, 2]
    sampler.close()


def test_settings_that_change_later_are_not_seen(sampler, generation, server):
    generation.settings = lambda: {"temperature": 0.0, "generation_kwargs": {}}
    seen = []
    generation.vllm_client.generate = lambda prompts, **request: seen.append(request) or server.answer([1], request)
    sampler.sample(0, [[1]], [1], streams(1))
    assert seen[0]["temperature"] == 1.0
    assert seen[0]["generation_kwargs"]["ignore_eos"]


def test_weights_move_only_when_the_requests_of_the_version_before_have_ended(sampler, generation, server):
    server.gate.clear()
    sampling = in_thread(lambda: sampler.sample(0, [[1]] * 3, [1] * 3, streams(1, 2, 3)))
    until(lambda: len(server.asked) == 3)
    generation.policy = 1
    publishing = in_thread(lambda: sampler.publish(1))
    time.sleep(0.1)
    assert generation.pushes == [0]
    later = in_thread(lambda: sampler.sample(1, [[1]], [1], streams(4)))
    time.sleep(0.1)
    assert len(server.asked) == 3  # the new request waits for its version
    server.gate.set()
    publishing.result(SECONDS)
    assert len(sampling.result(SECONDS)) == 3
    assert len(later.result(SECONDS)) == 1
    assert [weights for *_, weights in server.asked] == [0, 0, 0, 1]


def test_a_version_that_was_replaced_is_refused(sampler):
    sampler.publish(1)
    with pytest.raises(RuntimeError, match="version 0 of the weights is gone: the vLLM server has 1"):
        sampler.sample(0, [[1]], [1], streams(1))


def test_adapters_are_side_by_side_until_they_are_forgotten(server, generation):
    """Each request names its version's, and a push does not wait for those of the versions before."""
    generation.adapts = True

    def push(copy):
        generation.adapter = f"adapter {generation.policy}"
        generation.pushes.append(list(generation.kept))

    generation.sync_weights, asked = push, []
    complete = generation._complete

    def generate(prompts, **request):
        asked.append(request["generation_kwargs"]["model"])
        return complete(prompts[0], request)

    generation.vllm_client.generate = generate
    sampler = ServerSampler(generation)
    sampler.publish(0)
    server.gate.clear()
    early = in_thread(lambda: sampler.sample(0, [[1]], [1], streams(1)))
    until(lambda: asked)
    generation.policy = 1
    sampler.publish(1)
    late = in_thread(lambda: sampler.sample(1, [[1]], [1], streams(1)))
    until(lambda: len(asked) == 2)
    server.gate.set()
    assert len(early.result(SECONDS)) == len(late.result(SECONDS)) == 1
    assert asked == ["adapter 0", "adapter 1"]
    assert sampler.versions == {0, 1}
    sampler.forget(0)
    with pytest.raises(RuntimeError, match="the vLLM server has 1"):
        sampler.sample(0, [[1]], [1], streams(1))
    generation.policy = 2
    sampler.publish(2)
    assert generation.pushes == [[], ["adapter 0"], ["adapter 1"]]
    sampler.close()


def test_an_evaluation_has_the_server_alone_and_leaves_the_published_weights(sampler, generation, server):
    with sampler.paused():
        server.weights = 99
        sampling = in_thread(lambda: sampler.sample(0, [[1]], [1], streams(1)))
        time.sleep(0.1)
        assert not server.asked
    sampling.result(SECONDS)
    assert [weights for *_, weights in server.asked] == [0]


def test_a_server_that_comes_back_gets_the_published_weights_once_and_the_requests_again(sampler, generation, server):
    generation.policy = 5  # training has gone on since
    server.down = True
    found = sampler.sample(0, [[i] for i in range(9)], [1] * 9, streams(*range(9)))
    assert [row.ids[0] for row in found] == [*range(9)]
    assert generation.pushes == [0, 0]
    assert len({seed for _, _, seed, _ in server.asked[-9:]}) == 9
    assert all(weights == 0 for *_, weights in server.asked[-9:])


def test_a_server_that_was_restarted_between_two_requests_gets_the_weights_first(sampler, generation, server):
    server.restart()
    sampler.sample(0, [[1]], [1], streams(1))
    assert [weights for *_, weights in server.asked] == [0]


def test_a_server_that_still_has_the_weights_is_asked_again_without_a_push(sampler, generation, server):
    complete, failures = generation.vllm_client.generate, [ServerTrouble("answered 500")] * 2

    def erring(prompts, **request):
        if failures:
            raise failures.pop()
        return complete(prompts, **request)

    generation.vllm_client.generate = erring
    assert sampler.sample(0, [[1]], [1], streams(1))[0].ids[0] == 1
    assert generation.pushes == [0]


def test_a_request_that_fails_for_good_ends_within_the_limit(sampler, generation):
    def erring(prompts, **request):
        raise ServerTrouble("answered 500")

    generation.server_timeout, generation.vllm_client.generate = 0.5, erring
    with pytest.raises(ServerLost, match="answered 500; it did not recover"):
        sampler.sample(0, [[1]], [1], streams(1))


def test_all_requests_end_with_one_message_when_the_server_does_not_come_back(sampler, generation, server):
    generation.returns, server.down = False, True
    messages = set()
    for _ in range(2):
        with pytest.raises(ServerLost) as lost:
            sampler.sample(0, [[1]] * 4, [1] * 4, streams(1, 2, 3, 4))
        messages.add(str(lost.value))
    assert messages == {"connection refused; it did not recover"}


def test_a_request_that_the_server_refuses_is_not_repeated(sampler, generation):
    def refusing(prompts, **request):
        raise RuntimeError("answered 400")

    generation.vllm_client.generate = refusing
    with pytest.raises(RuntimeError, match="answered 400"):
        sampler.sample(0, [[1]] * 2, [1] * 2, streams(1, 2))


@pytest.mark.parametrize("waits_for", ["answer", "repair", "pause"])
def test_closing_ends_every_wait(waits_for, sampler, generation, server):
    release = threading.Event()
    if waits_for == "answer":
        server.gate.clear()
    if waits_for == "repair":
        server.down = True
        generation.push_again = lambda *_: release.wait(SECONDS)
    with sampler.paused() if waits_for == "pause" else threading.Lock():
        sampling = in_thread(lambda: sampler.sample(0, [[1]], [1], streams(1)))
        time.sleep(0.3)
        assert not sampling.done()
        sampler.close()
        with pytest.raises(ServerLost, match="the run has ended"):
            sampling.result(SECONDS)
    release.set()
    server.gate.set()


def test_a_sampler_that_was_closed_is_opened_by_the_next_push(sampler):
    sampler.close()
    assert not sampler.versions
    with pytest.raises(ServerLost, match="the run has ended"):
        sampler.sample(0, [[1]], [1], streams(1))
    sampler.publish(7)
    assert sampler.versions == {7}
    assert len(sampler.sample(7, [[1]], [1], streams(1))) == 1


def test_a_process_without_the_weights_has_its_requests_repaired_by_the_main_process():
    store, main, other = HashStore(), SimpleNamespace(serving="0"), SimpleNamespace(serving="0")
    repaired = []

    def repair(trouble):
        repaired.append(str(trouble))
        main.serving = "1"

    over = threading.Event()
    repairs = [Repairs(store, other, None, over), Repairs(store, main, repair, over)]
    waits = [in_thread(lambda: repairs[0].wait(0, [ServerTrouble("refused")])) for _ in range(5)]
    for done in waits:
        done.result(SECONDS)
    assert repaired == ["refused"]
    assert (other.serving, repairs[0].done) == ("1", 1)
    over.set()


# What the client and the copy do for it.


def bare_client(answers):
    client = WeightClient.__new__(WeightClient)
    client.base_url, client.patience = "http://server", 0.3
    client._post = lambda url, **_: answers.pop(0) if len(answers) > 1 else answers[0]
    return client


@pytest.mark.parametrize("answers", [[{"success": False}] * 2 + [{"success": True}], [{}]])
def test_a_prefix_cache_is_reset_as_soon_as_the_server_accepts_it(answers):
    bare_client(answers).reset_prefix_cache()
    assert len(answers) == 1


def test_a_prefix_cache_that_is_never_reset_ends_the_run():
    with pytest.raises(RuntimeError, match="requests of others"):
        bare_client([{"success": False}]).reset_prefix_cache()


@pytest.mark.parametrize(
    ("metrics", "weights", "identity"),
    [
        ("process_start_time_seconds 1.5e9\n", '{"weight_version": "mine"}', "started at 1500000000.0, weights mine"),
        ("process_start_time_seconds 1.5e9\n", '{"weight_version": "default"}', "started at 1500000000.0"),
        ("vllm:x 1\n", '{"detail": "Not Found"}', "ab1"),
        ("vllm:x 1\n", "not found", "ab1"),
        (None, None, None),
    ],
)
def test_a_server_is_recognised_by_its_start_or_configuration_and_its_weights(metrics, weights, identity, monkeypatch):
    def get(url, timeout):
        if metrics is None:
            raise client_module.requests.ConnectionError
        return SimpleNamespace(text=metrics if url.endswith("/metrics") else weights)

    client = Client.__new__(Client)
    client.base_url, client._reading, client._pages = "http://server", threading.Lock(), {}
    client.get_server_info = lambda: {"instance_id": "ab1"}
    monkeypatch.setattr(client_module.requests, "get", get)
    assert client.identity() == identity


@pytest.mark.parametrize(
    ("served", "found", "raises", "words"),
    [
        ("at 1, weights mine", "at 1, weights mine", None, ""),
        ("at 1, weights mine", None, None, ""),  # it does not answer: the request will tell
        ("at 1, weights mine", "at 1, weights theirs", RuntimeError, r"weights of another run \(theirs\). End it"),
        ("at 1", "at 1, weights theirs", RuntimeError, "weights of another run"),
        ("at 1, weights me@1, push 2", "at 1, weights me@1, push 3", None, ""),  # an adapter comes beside requests
        ("at 1, weights me@1, push 2", "at 1, weights me@12, push 2", RuntimeError, "weights of another run"),
        ("at 1, weights mine", "at 2", ServerTrouble, "has been restarted"),
        ("at 1, weights mine", "at 1", ServerTrouble, "has been restarted"),  # of several processes that answer
        (None, "at 1", ServerTrouble, "has been restarted"),
    ],
)
def test_a_replaced_server_is_asked_again_and_one_with_weights_of_another_run_is_left(served, found, raises, words):
    client = Client.__new__(Client)
    client.base_url, client.serving, client._pages, client.identity = "http://server", served, {}, lambda: found
    if raises is None:
        client.check_serving()
    else:
        with pytest.raises(raises, match=words):
            client.check_serving()


def test_a_server_that_has_come_back_is_asked_only_when_it_has_all_weights_again(monkeypatch):
    """Requests of other threads wait for that, while the main one opens a transfer group and pushes."""
    client, server = WeightClient.__new__(WeightClient), ["at 1"]
    client.base_url, client.transfer, client.serving, client._pages = "http://server", "gloo", None, {}
    client.get_server_info = lambda: {"weight_transfer_config": {"backend": "gloo"}}
    client.identity, client._open_gloo = lambda: server[0], lambda: None

    def refused():
        with pytest.raises(ServerTrouble, match="has been restarted"):
            client.check_serving()

    client.init_communicator("cpu")
    client.check_serving()
    server[0] = "at 2"
    client.init_communicator("cpu")
    refused()
    monkeypatch.setattr(client, "_send_adapter", lambda *_: refused())
    client.hold({"one": {}, "two": {}}, {})
    client.check_serving()


def test_a_copy_of_the_weights_stays_when_the_policy_moves():
    policy, copy = {"a": torch.ones(2, 3), "b": torch.ones(4).bfloat16()}, HostCopy()
    passed = dict(copy.taking(policy.items()))
    assert all(passed[name] is tensor for name, tensor in policy.items())
    for tensor in policy.values():
        tensor.zero_()
    found = dict(copy.named(torch.device("cpu")))
    assert {name: (tensor.sum().item(), tensor.dtype) for name, tensor in found.items()} == {
        "a": (6.0, torch.float32),
        "b": (4.0, torch.bfloat16),
    }
    dict(copy.taking(policy.items()))
    assert all(tensor.sum() == 0 for _, tensor in copy.named(torch.device("cpu")))
