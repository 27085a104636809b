"""Sampler and policy stay the same, without an engine: weight transfer, adapters, the drift check, server facts."""

import functools
import http.server
import json
import logging
import socket
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from grpo_ext import GRPOExtConfig
from grpo_ext.commands import serve
from grpo_ext.errors import RolloutDrift
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.rollout.vllm import gloo, plugin, pushed
from grpo_ext.rollout.vllm.client import Client
from grpo_ext.rollout.vllm.drift import Drift, DriftCheck
from grpo_ext.rollout.vllm.generation import Generation
from grpo_ext.rollout.vllm.gloo import (
    TensorSpec,
    join,
    mark,
    open_group,
    open_store,
    receive,
    send,
    specs_of,
    trains,
)
from grpo_ext.rollout.vllm.server import (
    PROBE,
    ServerFacts,
    ServerTrouble,
    engine_mismatches,
    mismatches,
    server_facts,
    unsuited,
)
from grpo_ext.rollout.vllm.transfer import WeightClient
from support import tiny
from support.commands import command


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# Weights by gloo.


def test_the_store_listens_at_its_address_only():
    """torch's own listens at every address of the machine, whatever host it is given."""
    store = open_store("127.0.0.1", 0, 20, trainer=True)
    listening = {c.laddr.ip for c in psutil.Process().net_connections() if c.laddr.port == store.port}
    assert listening == {"127.0.0.1"}
    with pytest.raises(RuntimeError, match=rf"127\.0\.0\.1:{store.port}: Address already in use"):
        open_store("127.0.0.1", store.port, 20, trainer=True)


@pytest.mark.parametrize("sent", [("other", torch.zeros(2)), ("w", torch.zeros(3)), ("w", torch.zeros(2).double())])
def test_a_tensor_that_was_not_announced_is_refused(sent):
    with pytest.raises(ValueError, match=r"w \(2,\) torch.float32 was announced"):
        send(None, [TensorSpec("w", torch.float32, (2,))], iter([sent]), lambda: False)


def test_weights_arrive_as_they_were_sent():
    """Scalars, every dtype and transposed weights; both ends in one process, the trainer's in a thread."""
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8]
    named = [(f"layer.{i}", (10 * torch.randn(17, i + 1)).to(dtypes[i % 5])) for i in range(9)]
    named += [("scale", torch.tensor(3.0)), ("transposed", torch.randn(4, 6).T)]
    specs = specs_of([(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in named])
    port = free_port()
    trainers, workers = (open_store("127.0.0.1", port, 20, trainer=trainer) for trainer in (True, False))

    def trainer() -> None:
        send(open_group(trainers, "run", 0, 2, 20), specs, iter(named), lambda: False)

    thread = threading.Thread(target=trainer)
    thread.start()
    found = list(receive(open_group(workers, "run", 1, 2, 20), specs))
    thread.join(20)
    for (name, sent), (arrived, tensor) in zip(named, found, strict=True):
        assert (arrived, tensor.dtype) == (name, sent.dtype)
        assert torch.equal(tensor, sent)


def joined(address, owner, timeout):
    return join(*address, owner, "run", 1, 2, timeout)


def test_a_request_of_a_run_that_was_killed_does_not_join_the_next_one_at_its_address(monkeypatch):
    """Which waits for this very worker; the dead one would have been waited for as long as its limit."""
    store = open_store("127.0.0.1", 0, 600, trainer=True)
    address, began = ("127.0.0.1", store.port), time.monotonic()
    for owner in (None, "host:2"):  # the next one has just begun to listen, or waits for the worker
        mark(store, "host:2")
        mark(store, owner)
        with pytest.raises(RuntimeError, match=r"\(host:1\) has ended"):
            joined(address, "host:1", 600.0)
    assert trains(store, "host:2")
    assert not trains(store, "host:1")
    del store
    monkeypatch.setattr(gloo, "JOIN_SECONDS", 0.5)
    with pytest.raises(RuntimeError, match="timed out"):  # nobody listens there any more
        joined(address, "host:1", 600.0)
    assert time.monotonic() - began < 60


def test_a_worker_that_joins_soon_waits_as_long_as_it_is_told_for_weights(monkeypatch):
    monkeypatch.setattr(gloo, "JOIN_SECONDS", 1.0)
    store = open_store("127.0.0.1", 0, 20, trainer=True)
    mark(store, "host:1")
    specs, sent = [TensorSpec("w", torch.float32, (2,))], []

    def trainer() -> None:
        group = open_group(store, "run", 0, 2, 20)
        time.sleep(2.0)
        send(group, specs, iter([("w", torch.ones(2))]), lambda: False)
        sent.append(group)

    thread = threading.Thread(target=trainer)
    thread.start()
    _, group = joined(("127.0.0.1", store.port), "host:1", 20.0)
    [(_, weight)] = receive(group, specs)
    thread.join()
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("mode", "arguments", "kept"),
    [
        ("1", ["--weight-transfer-config", '{"backend": "gloo"}'], True),
        ("1", ["--config", "server.yaml"], True),
        ("1", ["--config=server.yaml"], True),
        ("1", ["--weight-transfer-config", '{"backend": "nccl"}'], False),
        ("0", ["--weight-transfer-config", '{"backend": "gloo"}'], False),
    ],
)
def test_the_plugin_changes_only_servers_that_receive_weights_by_gloo(mode, arguments, kept, monkeypatch):
    calls = []
    monkeypatch.setattr(plugin, "keep_weights_in_place", lambda: calls.append(1))
    monkeypatch.setattr("sys.argv", ["vllm", *arguments])
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", mode)
    plugin.register()
    assert bool(calls) is kept


# A push may take long.


@pytest.mark.parametrize("sending", [True, False])
def test_weights_that_are_being_sent_count_as_progress(sending, monkeypatch):
    monkeypatch.setattr("grpo_ext.rollout.vllm.client.POLL_SECONDS", 0.05)
    client = Client.__new__(Client)
    client.base_url, client.patience, client._sent = "http://127.0.0.1:1", 0.3, 0
    client._tokens_processed = lambda within: 7.0
    over = threading.Event()

    def push():
        while sending and not over.wait(0.05):
            client._sent += 1

    pusher = threading.Thread(target=push)
    pusher.start()

    def answer():
        time.sleep(1.0)
        return SimpleNamespace(status_code=200, content=b"done", json=lambda: "done")

    try:
        if sending:
            assert client._request(answer) == "done"
        else:
            with pytest.raises(ServerTrouble, match="no sign of life"):
                client._request(answer)
    finally:
        over.set()
        pusher.join()


# NCCL has no time limit of its own.


class Communicator:
    """Stands in for vLLM's NCCL communicator whose peer has died: a broadcast returns only once it is destroyed."""

    def __init__(self):
        self.destroyed = threading.Event()

    def destroy(self):
        self.destroyed.set()


def nccl_client(monkeypatch, **stock):
    for name, method in stock.items():
        monkeypatch.setattr(VLLMClient, name, method)
    client = WeightClient.__new__(WeightClient)
    client.base_url, client.patience, client.engine, client.communicator = "http://server", 0.3, "nccl", Communicator()
    client._sent = client._failures = 0
    client.serving, client.identity = None, lambda: None  # no answer, which is no reason not to push
    return client


METADATA = [(f"w{i}", "float32", [2]) for i in range(4)]


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("request_fails", [True, False])
def test_a_broadcast_by_nccl_to_a_dead_server_ends_within_the_limit(request_fails, raises, monkeypatch):
    def send(client, metadata, named_params):
        next(named_params)
        client._failures += request_fails
        assert client.communicator.destroyed.wait(60)
        if raises:
            raise RuntimeError("NCCL error: communicator was aborted")

    client, start = nccl_client(monkeypatch, update_named_params=send), time.monotonic()
    client.patience = 30.0 if request_fails else 0.3
    with pytest.raises(ServerTrouble, match="http://server: weights did not arrive"):
        client.update_named_params(METADATA, ((name, torch.zeros(2)) for name, _, _ in METADATA))
    assert time.monotonic() - start < 20


def test_a_slow_broadcast_by_nccl_is_not_aborted(monkeypatch):
    def send(client, metadata, named_params):
        for _ in named_params:
            time.sleep(0.2)

    client = nccl_client(monkeypatch, update_named_params=send)
    client.patience = 0.6
    client.update_named_params(METADATA, ((name, torch.zeros(2)) for name, _, _ in METADATA))
    assert not client.communicator.destroyed.is_set()


def test_errors_of_the_trainer_in_a_push_by_nccl_stay_what_they_are(monkeypatch):
    def send(client, metadata, named_params):
        raise KeyError("of the trainer")

    with pytest.raises(KeyError, match="of the trainer"):
        nccl_client(monkeypatch, update_named_params=send).update_named_params(METADATA, iter(()))


def test_a_server_that_does_not_join_the_group_of_nccl_is_given_up(monkeypatch):
    client = nccl_client(monkeypatch, init_communicator=lambda *_: threading.Event().wait(60))
    client.transfer, client._updating, client.serving = "nccl", False, None
    client.get_server_info = lambda: {"weight_transfer_config": {"backend": "nccl"}}
    client.identity = lambda: None
    with pytest.raises(ServerTrouble, match=r"did not join the NCCL transfer group within 0\.3 s"):
        client.init_communicator("cuda:0")


# Drift.

ONE_PROCESS = SimpleNamespace(reduce=lambda x: x, gather=lambda x: x)


def log_probs(n=400, seed=0):
    return -torch.rand(4, n // 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def measured(policy, sampler, mask=None, accelerator=ONE_PROCESS):
    return Drift.of(policy, sampler, torch.ones_like(policy) if mask is None else mask, accelerator)


def test_a_drift_is_the_difference_of_log_probabilities_per_token():
    policy = log_probs()
    sampler = 0.9 * policy - 0.05 + 0.01 * log_probs(seed=1)
    difference, drift = sampler - policy, measured(policy, sampler)
    assert drift.tokens == 400
    assert drift.mean == pytest.approx(difference.abs().mean().item(), rel=1e-10)
    assert drift.max == pytest.approx(difference.abs().max().item(), rel=1e-10)
    assert drift.bias == pytest.approx(difference.mean().item(), rel=1e-10)


def test_the_drift_of_two_processes_is_that_of_their_tokens_together():
    policy, sampler = log_probs(), log_probs(seed=1)
    parts = []
    alone = SimpleNamespace(reduce=lambda x: parts.append(x) or x, gather=lambda x: parts.append(x) or x)
    measured(policy[2:], sampler[2:], accelerator=alone)
    both = SimpleNamespace(reduce=lambda x: x + parts[0], gather=lambda x: torch.cat([x, parts[1]]))
    whole, together = measured(policy, sampler), measured(policy[:2], sampler[:2], accelerator=both)
    assert vars(together) == pytest.approx(vars(whole), rel=1e-12)


def test_padding_and_tokens_without_a_score_do_not_count():
    policy, sampler, mask = log_probs(), log_probs(), torch.ones(4, 100)
    mask[0], sampler[0] = 0, 99.0
    sampler[1, :50] = torch.nan
    drift = measured(policy, sampler, mask)
    assert (drift.tokens, drift.mean, drift.max) == (250, 0.0, 0.0)
    assert measured(policy, sampler, torch.zeros(4, 100)).mean == 0.0


def drift_check(drifts=(), dtypes=(torch.float32, torch.float32), **settings):
    args = {"use_cpu": True, "bf16": False, "report_to": "none", "use_vllm": True, "rollout_drift": 0.02} | settings
    sampler = SimpleNamespace(
        policy_dtype=dtypes[0], sampler_dtype=dtypes[1], sync_seconds=2.0, sync_bytes=2**20, push_rounding=None
    )
    found = DriftCheck(GRPOExtConfig(**args), sampler)
    for drift in drifts:
        found.add(drift)
    return found


def noisy(size, seed=1):
    """The two sides differ by about `size` nats per token, in either direction."""
    policy = log_probs()
    noise = torch.randn(policy.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return measured(policy, policy + size * noise)


TRUNCATED = measured(log_probs(), (log_probs() + 0.2).clamp(max=0.0))
"""top_p removes the tail, so the samples have more probability."""


@pytest.mark.parametrize(
    ("drifts", "settings", "cause"),
    [
        ([noisy(1e-6), noisy(0.02), noisy(0.05)], {}, "stale weights"),
        ([noisy(0.05), noisy(0.06, 2), noisy(0.05, 3)], {}, "dtype or kernels"),
        ([noisy(3.0)], {}, "another model, tokenizer or chat template"),
        ([TRUNCATED], {"top_p": 0.9, "loss_defaults": "trl"}, "sampling parameters that truncate"),
        ([noisy(1e-6), noisy(0.02), noisy(0.05)], {"top_p": 0.9, "loss_defaults": "trl"}, "stale weights"),
        (
            [noisy(1e-6), TRUNCATED],
            {"top_p": 0.9, "top_k": 9},
            "stale weights",
        ),  # scored over the tokens that were kept
        ([noisy(1e-6), TRUNCATED], {"min_p": 0.0, "loss_defaults": "trl"}, "stale weights"),
    ],
)
def test_the_diagnosis_points_at_the_one_cause_that_fits(drifts, settings, cause):
    lines = drift_check(drifts, **settings).diagnosis().splitlines()
    assert len(lines) == 5
    (likely,) = [line for line in lines if line.startswith("  ->")]
    assert cause in likely


INPUTS = {"completion_mask": torch.ones(4, 100), "sampling_per_token_logps": log_probs()}


def test_a_drift_beyond_the_limit_is_explained_once_or_stops_the_run(caplog):
    found = drift_check()
    with caplog.at_level(logging.WARNING):
        figures = [found.check(log_probs() + shift, INPUTS, ONE_PROCESS) for shift in (0.0, 0.5, 0.6)]
    assert [f["sampling/drift_mean"] for f in figures] == pytest.approx([0.0, 0.5, 0.6])
    assert (figures[0]["sampling/weight_sync_seconds"], figures[0]["sampling/weight_sync_mib"]) == (2.0, 1.0)
    first, second = (record.message for record in caplog.records)
    assert "stale weights" in first
    assert second == found.headline()
    with pytest.raises(RolloutDrift, match="dtype or kernels"):
        drift_check(rollout_drift_action="stop").check(log_probs() + 0.5, INPUTS, ONE_PROCESS)
    with pytest.raises(RolloutDrift, match="nan"):
        drift_check(rollout_drift_action="stop").check(log_probs() * torch.nan, INPUTS, ONE_PROCESS)


def test_the_trend_is_a_slope_per_push():
    drifts = [Drift(10, 0.01 + 0.003 * i, 0.1, 0.0) for i in range(5)]
    assert drift_check(drifts[:1]).trend == 0.0
    assert drift_check(drifts).trend == pytest.approx(0.003)


def test_a_checkpoint_restores_the_measurements_also_those_of_earlier_versions():
    found, restored = drift_check([noisy(0.01 * i) for i in range(1, 12)]), drift_check()
    restored.load([[*figures, 0.5, 1.0] for figures in found.to_list()])
    assert (restored.first, restored.history) == (found.first, found.history)


def test_the_coarser_dtype_sets_the_default_tolerance():
    float32, bfloat16, float16 = torch.float32, torch.bfloat16, torch.float16
    found = [(float32, float32), (float32, bfloat16), (bfloat16, float16), (float32, float16)]
    assert [drift_check(dtypes=pair, rollout_drift=None).tolerance for pair in found] == [0.02, 0.1, 0.1, 0.05]


# Servers.

FACTS = ServerFacts("some/model", 512, "float32", "processed_logprobs", "gloo", (1, 2, 3), 20)
SUITED = ServerFacts("some/model", 512, "float32", "processed_logprobs", "gloo", (1, 2, 3), 20)


def test_a_server_that_fits_has_no_mismatch():
    assert list(mismatches(SUITED, FACTS)) == []
    assert list(mismatches(ServerFacts(), FACTS)) == []


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", "other/model", "model='some/model': the recipe trains other/model. Start the server"),
        ("max_model_len", 513, "max_model_len=512: prompt and completion of the recipe may have 513 tokens."),
        ("dtype", "bfloat16", "dtype='float32': the recipe asks for bfloat16."),
        ("logprobs_mode", "raw_logprobs", "logprobs_mode='processed_logprobs': "),
        ("weight_transfer", "nccl", "weight_transfer='gloo': the trainer sends weights by nccl."),
        ("probe_ids", (1, 2, 4), "probe_ids="),
        (
            "max_logprobs",
            66,
            "max_logprobs=20: the loss reads the sampling support from as many log-probabilities, 66.",
        ),
    ],
)
def test_each_mismatch_is_named(field, value, message):
    (found,) = mismatches(ServerFacts(**{field: value}), FACTS)
    assert str(found).startswith(message)


CONFIG = {
    "cache_config": {"cache_dtype": "auto", "block_size": 16},
    "scheduler_config": {"max_num_seqs": 8},
    "compilation_config": {"mode": 3, "backend": "inductor"},
    "speculative_config": None,
}


@pytest.mark.parametrize(
    ("options", "differing"),
    [
        ({"max_num_seqs": 8, "kv_cache_dtype": "auto", "enable_dbo": True}, []),
        ({"kv_cache_dtype": "fp8"}, ["vllm_engine_kwargs.kv_cache_dtype='fp8': the server has 'auto'"]),
        ({"compilation_config": {"mode": 3}}, []),
        ({"compilation_config": {"mode": 0}, "max_num_seqs": 4}, ["the server has {", "the server has 8"]),
    ],
)
def test_options_of_the_engine_are_compared_with_what_the_server_reports(options, differing):
    found = list(map(str, engine_mismatches(options, CONFIG)))
    assert len(found) == len(differing)
    assert all(words in problem for words, problem in zip(differing, found, strict=True))


@pytest.mark.parametrize(
    ("reported", "words"),
    [
        ({"speculative_config": {"method": "ngram"}}, "speculative_config={'method': 'ngram'}: drafted tokens have"),
        ({"watermark_config": {"key": 1}}, "watermark_config={'key': 1}: a watermark chooses tokens by a key"),
        ({"kv_transfer_config": {"kv_connector": "x"}}, "kv_transfer_config={'kv_connector': 'x'}: keys and values"),
        ({"kv_transfer_config": None}, None),
        (
            {"device_config": {"device_type": "cpu"}, "model_config": {"quantization": "fp8"}},
            "quantization='fp8': a push to a server on a CPU writes weights in place",
        ),
        ({"device_config": {"device_type": "cuda"}, "model_config": {"quantization": "fp8"}}, None),
        ({"device_config": {"device_type": "cpu"}, "model_config": {"quantization": None}}, None),
    ],
    ids=str,
)
def test_a_server_whose_samples_cannot_be_the_policys_is_refused(reported, words):
    found = [str(problem) for problem in unsuited(CONFIG | reported)]
    assert [problem.startswith(words) for problem in found] == ([True] if words else [])


@pytest.mark.parametrize(
    ("mode", "temperature", "with_support", "suits"),
    [
        ("processed_logprobs", 0.7, True, True),
        ("raw_logprobs", 1.0, False, True),
        ("raw_logprobs", 0.7, False, False),
        ("raw_logprobs", 1.0, True, False),
        ("raw_logits", 1.0, False, False),
        ("processed_logits", 1.0, False, False),
    ],
)
def test_a_server_that_returns_other_log_probabilities_than_the_samplers_is_refused(
    mode, temperature, with_support, suits, monkeypatch
):
    """vLLM's default are those before the temperature, by which the correction would be wrong at each token."""
    policy, tokenizer = tiny.model(), tiny.tokenizer()
    settings = {
        "with_support": with_support,
        "with_routes": False,
        "temperature": temperature,
        "top_k": 4,
        "dtype": "auto",
    }
    found = Generation.__new__(Generation)
    vars(found).update(settings, model=policy, processing_class=tokenizer, engine_kwargs={}, max_completion_length=8)
    ids = tuple(tokenizer.encode(PROBE, add_special_tokens=False))
    facts = ServerFacts(policy.name_or_path, 512, "float32", mode, "gloo", ids, 99, CONFIG)
    monkeypatch.setattr(pushed, "server_facts", lambda url: facts)
    if suits:
        found._check_server("http://server")
    else:
        with pytest.raises(RuntimeError, match=rf"http://server does not suit.*\nlogprobs_mode='{mode}': the corr"):
            found._check_server("http://server")


def test_a_model_is_the_same_by_another_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    facts = ServerFacts(str(tmp_path / "model"), 512, "float32", "", None, (), 20)
    assert list(mismatches(ServerFacts(model="./model"), facts)) == []


def test_an_address_without_a_server_is_reported():
    with pytest.raises(ServerTrouble, match="no vLLM server answers"):
        server_facts(f"http://127.0.0.1:{free_port()}")


def test_a_server_without_development_endpoints_is_refused_and_not_waited_for(tmp_path, capsys):
    answers_404 = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    model = tiny.save(tmp_path / "model")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), answers_404) as plain:
        threading.Thread(target=plain.serve_forever, daemon=True).start()
        with pytest.raises(RuntimeError, match="has no development endpoints"):
            server_facts(f"http://127.0.0.1:{plain.server_port}")
        given = ("--model_name_or_path", model, "--vllm_server_port", plain.server_port)
        assert command("check", "--config", "quickstart/grpo-vllm-server", *given) == 2
        plain.shutdown()
    assert "has no development endpoints" in capsys.readouterr().err


def packaged(model, **settings):
    given = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return load_recipe(["--config", "quickstart/grpo-vllm-server", "--model_name_or_path", model, *given])


def flags(recipe) -> dict[str, str]:
    line = serve.command(recipe, "127.0.0.1", 8000)
    return {name: value for name, value in zip(line, [*line[1:], ""], strict=True) if name.startswith("--")}


@pytest.mark.vllm
def test_a_server_gets_the_flags_that_its_recipe_needs(quickstart_model):
    recipe = packaged(quickstart_model)
    found = flags(recipe)
    assert found["--model"] == quickstart_model
    assert found["--host"] == "127.0.0.1"
    assert found["--dtype"] == "float32"
    assert found["--logprobs-mode"] == "processed_logprobs"
    assert json.loads(found["--weight-transfer-config"]) == {"backend": "gloo"}
    assert "--enforce-eager" in found
    assert "--trust-remote-code" not in found
    assert serve.environment(recipe)["VLLM_SERVER_DEV_MODE"] == "1"
    assert serve.command(recipe, "127.0.0.1", 8000, ["--max-num-seqs", "4"])[-2:] == ["--max-num-seqs", "4"]


@pytest.mark.vllm
def test_a_server_on_a_cpu_cuts_no_prompt(quickstart_model):
    name, whole = "--max-num-batched-tokens", "--no-enable-chunked-prefill"
    found = flags(packaged(quickstart_model))
    assert found[name] == "16384"
    assert whole not in found  # a prompt may be longer
    assert whole in flags(packaged(quickstart_model, vllm_max_model_length=512))
    own = json.dumps({"max_num_batched_tokens": 512})
    found = flags(packaged(quickstart_model, vllm_engine_kwargs=own))
    assert found[name] == "512"
    assert whole not in found


@pytest.mark.vllm
def test_a_server_returns_routes_if_its_recipe_replays_them(quickstart_model):
    name = "--enable-return-routed-experts"
    for replays in (True, False):
        recipe = packaged(quickstart_model, replay_routes=replays)
        assert (name in flags(recipe), serve.wanted(recipe).routes) == ((True, True) if replays else (False, None))


@pytest.mark.vllm
def test_options_of_the_engine_are_words_of_the_servers_command(quickstart_model):
    options = {"kv_cache_dtype": "fp8", "enable_prefix_caching": False, "compilation_config": {"mode": 0}}
    found = serve.command(packaged(quickstart_model, vllm_engine_kwargs=json.dumps(options)), "127.0.0.1", 8000)
    assert found[-5:] == [
        *("--kv-cache-dtype", "fp8", "--no-enable-prefix-caching"),
        *("--compilation-config", '{"mode": 0}'),
    ]


@pytest.mark.vllm
def test_options_reach_a_colocated_engine_over_those_of_trl(monkeypatch):
    given = []
    monkeypatch.setattr(vllm_generation, "LLM", lambda **options: given.append(options))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    accelerator = SimpleNamespace(num_processes=1, process_index=0, local_process_index=0)
    accelerator.wait_for_everyone, accelerator.device = lambda: None, torch.device("cpu")
    accelerator.state, accelerator.distributed_type = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None), "NO"
    options = {"max_num_batched_tokens": 512, "kv_cache_dtype": "fp8"}
    policy = tiny.model()
    Generation(policy, accelerator, None, max_num_seqs=8, dtype="bfloat16", engine_kwargs=options, with_routes=True)
    (found,) = given
    assert found["enable_return_routed_experts"]
    assert options.items() <= found.items()
    assert (found["dtype"], found["max_num_seqs"], found["logprobs_mode"]) == ("bfloat16", 8, "processed_logprobs")


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("setting", "value", "flag", "becomes"),
    [
        ("vllm_max_model_length", 96, "--max-model-len", "96"),
        ("max_prompt_length", 32, "--max-model-len", "96"),
        ("vllm_dtype", "bfloat16", "--dtype", "bfloat16"),
        ("vllm_tensor_parallel_size", 2, "--tensor-parallel-size", "2"),
        ("vllm_gpu_memory_utilization", 0.5, "--gpu-memory-utilization", "0.5"),
        ("seed", 7, "--seed", "7"),
    ],
)
@pytest.mark.cases(2)
def test_a_setting_of_the_recipe_is_a_flag_of_the_server(setting, value, flag, becomes, quickstart_model):
    assert flags(packaged(quickstart_model, **{setting: value}))[flag] == becomes
