"""What keeps a vLLM sampler and the policy the same, as far as it needs no vLLM: transport, drift, server facts."""

import json
import socket
import threading
import time
from importlib.util import find_spec
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_ext.commands import serve
from grpo_ext.quickstart.model import ensure_model
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.rollout.vllm.buckets import ALIGNMENT, TensorSpec, bucket_bytes, bucketed, pack, unpack
from grpo_ext.rollout.vllm.client import Client, ServerTrouble
from grpo_ext.rollout.vllm.drift import Drift, DriftMonitor, moments, tolerance
from grpo_ext.rollout.vllm.generation import Generation, merged_value
from grpo_ext.rollout.vllm.gloo import open_group, open_store, receive, send, specs_of
from grpo_ext.rollout.vllm.server import ServerFacts, ServerUnreachable, Wanted, mismatches, server_facts
from support import tiny

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# Buckets.


@given(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=12), st.integers(1, 400))
def test_what_is_packed_comes_out_again(kinds, limit):
    specs = [TensorSpec(f"w{i}", dtype, shape) for i, (dtype, shape) in enumerate(kinds)]
    tensors = [(spec.name, (10 * torch.randn(spec.shape)).to(spec.dtype)) for spec in specs]
    buckets, left = list(bucketed(specs, limit)), iter(tensors)
    assert [spec for bucket in buckets for spec in bucket] == specs
    found = []
    for bucket in buckets:
        assert bucket_bytes(bucket) <= limit or len(bucket) == 1
        found += unpack(pack(bucket, left), bucket)
    for (name, sent), (arrived, tensor) in zip(tensors, found, strict=True):
        assert arrived == name
        assert tensor.dtype == sent.dtype
        assert torch.equal(tensor, sent)
    assert next(left, None) is None


def test_the_store_listens_at_its_address_alone():
    """torch's own listens at every address of the machine, whatever host it is given."""
    store = open_store("127.0.0.1", 0, 20, trainer=True)
    listening = {c.laddr.ip for c in psutil.Process().net_connections() if c.laddr.port == store.port}
    assert listening == {"127.0.0.1"}
    with pytest.raises(RuntimeError, match=rf"127\.0\.0\.1:{store.port}: Address already in use"):
        open_store("127.0.0.1", store.port, 20, trainer=True)


def test_buckets_are_as_full_as_they_may_be():
    specs = [TensorSpec(str(i), torch.float32, (ALIGNMENT // 4,)) for i in range(7)]
    assert [len(bucket) for bucket in bucketed(specs, 3 * ALIGNMENT)] == [3, 3, 1]


@pytest.mark.parametrize("sent", [("other", torch.zeros(2)), ("w", torch.zeros(3)), ("w", torch.zeros(2).double())])
def test_a_tensor_that_was_not_announced_is_refused(sent):
    with pytest.raises(ValueError, match=r"w \(2,\) torch.float32 was announced"):
        pack([TensorSpec("w", torch.float32, (2,))], iter([sent]))


def test_weights_travel_by_gloo():
    """Both ends in one process: the trainer's in a thread of its own."""
    named = [(f"layer.{i}", torch.randn(17, i + 1).to(DTYPES[i % 3])) for i in range(9)]
    specs = specs_of([(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in named])
    port = free_port()
    trainers, workers = (open_store("127.0.0.1", port, 20, trainer=trainer) for trainer in (True, False))

    def trainer() -> None:
        send(open_group(trainers, "run", 0, 2, 20), specs, iter(named), 1000)

    thread = threading.Thread(target=trainer)
    thread.start()
    messages = list(receive(open_group(workers, "run", 1, 2, 20), specs, 1000))
    thread.join(20)
    assert len(messages) > 3
    for (name, sent), (arrived, tensor) in zip(named, [pair for message in messages for pair in message], strict=True):
        assert arrived == name
        assert torch.equal(tensor, sent)


# Adapters: the sampler gets merged weights, the policy keeps its own.


def test_adapters_around_one_another_are_all_merged():
    """PEFT wraps a mixture's experts once for each of their parameters that it adapts."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    sizes |= {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    adapter = LoraConfig(
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
        r=4,
    )
    torch.manual_seed(0)
    model = get_peft_model(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_key_value_heads=2)), adapter)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sent = {name: value.clone() for name, value in Generation.__new__(Generation)._merged_params(model)}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    merged = model.merge_and_unload().state_dict()
    assert sent.keys() == merged.keys() - {"lm_head.weight"} or sent.keys() == merged.keys()
    for name, value in sent.items():
        torch.testing.assert_close(value, merged[name], rtol=1e-6, atol=1e-6)


def test_what_a_reference_adapter_keeps_of_a_module_is_not_sent():
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"], init_lora_weights=False)
    model = get_peft_model(tiny.model(), config)
    model.add_adapter("ref", model.peft_config["default"])
    sent = {name: value.clone() for name, value in Generation.__new__(Generation)._merged_params(model)}
    merged = model.merge_and_unload().state_dict()
    assert sent.keys() == merged.keys()
    for name, value in sent.items():
        torch.testing.assert_close(value, merged[name], rtol=1e-6, atol=1e-6)


class Replacing(Linear):
    """Merges as PEFT does into quantised weights: by another parameter in the place of the first."""

    def _shift(self, sign):
        base = self.get_base_layer()
        base.weight = torch.nn.Parameter(base.weight.detach() + sign * self.get_delta_weight("default") + 0.01)

    def merge(self, *args, **kwargs):
        self._shift(1)

    def unmerge(self):
        self._shift(-1)


def test_a_weight_that_merging_replaces_is_the_merged_one_and_comes_back():
    base = torch.nn.Linear(16, 16, bias=False)
    layer = Replacing(base, "default", config=LoraConfig(), r=4, lora_alpha=8, init_lora_weights=False)
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    own, data = base.weight, base.weight.detach().clone()
    value = merged_value([layer], "weight")
    torch.testing.assert_close(value, data + layer.get_delta_weight("default") + 0.01)
    assert base.weight is own
    assert torch.equal(own, data)


# A push takes as long as it takes.


@pytest.mark.parametrize("sending", [True, False])
def test_weights_on_their_way_are_progress(sending, monkeypatch):
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
        return SimpleNamespace(status_code=200, json=lambda: "done")

    try:
        if sending:
            assert client._ask(answer) == "done"
        else:
            with pytest.raises(ServerTrouble, match="no progress"):
                client._ask(answer)
    finally:
        over.set()
        pusher.join()


# Drift.


def log_probs(n=400, seed=0):
    return -torch.rand(4, n // 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def measured(trainer, sampler, mask=None):
    return Drift.of(*moments(trainer, sampler, torch.ones_like(trainer) if mask is None else mask))


def test_a_drift_is_what_it_says():
    trainer = log_probs()
    sampler = 0.9 * trainer - 0.05 + 0.01 * log_probs(seed=1)
    drift = measured(trainer, sampler)
    difference = sampler - trainer
    assert drift.tokens == 400
    assert drift.mean == pytest.approx(difference.abs().mean().item(), rel=1e-10)
    assert drift.max == pytest.approx(difference.abs().max().item(), rel=1e-10)
    assert drift.bias == pytest.approx(difference.mean().item(), rel=1e-10)
    assert drift.surer == pytest.approx((difference > 0).double().mean().item())
    both = torch.cov(torch.stack([trainer.flatten(), sampler.flatten()]))
    assert drift.slope == pytest.approx((both[0, 1] / both[0, 0]).item(), rel=1e-8)


def test_moments_add_up_over_processes():
    trainer, sampler = log_probs(), log_probs(seed=1)
    whole, largest = moments(trainer, sampler, torch.ones(4, 100))
    parts = [moments(trainer[rows], sampler[rows], torch.ones(2, 100)) for rows in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(sum(sums for sums, _ in parts), whole, rtol=1e-12, atol=1e-12)
    assert max(top for _, top in parts) == largest


def test_padding_and_tokens_without_a_score_do_not_count():
    trainer, sampler, mask = log_probs(), log_probs(), torch.ones(4, 100)
    mask[0], sampler[0] = 0, 99.0
    sampler[1, :50] = torch.nan
    drift = measured(trainer, sampler, mask)
    assert (drift.tokens, drift.mean, drift.max) == (250, 0.0, 0.0)
    assert measured(trainer, sampler, torch.zeros(4, 100)).mean == 0.0


def monitor(drifts, limit=0.02, **settings) -> DriftMonitor:
    found = DriftMonitor(limit, "trainer float32, sampler bfloat16", **settings)
    for drift in drifts:
        found.add(drift)
    return found


def noisy(size, seed=1):
    """The two sides differ by about `size` nats a token, to either side."""
    trainer = log_probs()
    noise = torch.randn(trainer.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return measured(trainer, trainer + size * noise)


def truncated():
    """top_p takes away the tail: what is left is surer."""
    trainer = log_probs()
    return measured(trainer, (trainer + 0.2).clamp(max=0.0))


@pytest.mark.parametrize(
    ("drifts", "settings", "cause"),
    [
        ([noisy(1e-6), noisy(0.02), noisy(0.05)], {}, "stale weights"),
        ([noisy(0.05), noisy(0.06, 2), noisy(0.05, 3)], {}, "dtype or kernels"),
        ([noisy(3.0)], {}, "another model, tokenizer or chat template"),
        ([truncated()], {"sampling": {"top_p": 0.9}}, "sampling parameters that truncate"),
        ([measured(log_probs(), log_probs() * 1.4)], {"sampling": {"top_k": 9}}, "sampling parameters that truncate"),
    ],
)
def test_each_fault_is_told_from_the_others(drifts, settings, cause):
    found = monitor(drifts, **settings)
    assert found.exceeded
    fitting = [line for line in found.diagnosis().splitlines() if line.startswith("  ->")]
    assert len(fitting) == 1
    assert cause in fitting[0]


def test_an_alarm_explains_itself_once():
    found = monitor([noisy(0.05)])
    assert "dtype or kernels" in found.warning()
    found.add(noisy(0.06))
    assert found.warning() == found.headline()


def test_what_is_no_number_is_an_alarm():
    assert monitor([measured(log_probs(), torch.full((4, 100), -torch.inf).double())]).exceeded
    assert not monitor([noisy(1e-3)]).exceeded


def test_the_trend_is_a_slope_per_push():
    drifts = [Drift(10, 0.01 + 0.003 * i, 0.1, 0.0, 0.5, 1.0) for i in range(5)]
    assert monitor(drifts[:1]).trend == 0.0
    assert monitor(drifts).trend == pytest.approx(0.003)


def test_the_coarser_dtype_sets_the_tolerance():
    assert tolerance(torch.float32, torch.float32) == 0.02
    assert tolerance(torch.float32, torch.bfloat16) == tolerance(torch.bfloat16, torch.float16) == 0.1


# Servers.

FACTS = ServerFacts("some/model", 512, "float32", "processed_logprobs", "gloo", (1, 2, 3))
SUITED = Wanted("some/model", 512, "float32", "processed_logprobs", "gloo", (1, 2, 3))


def test_a_server_that_fits_has_no_mismatch():
    assert list(mismatches(SUITED, FACTS)) == []
    assert list(mismatches(Wanted(), FACTS)) == []


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("model", "other/model", "model: the server has some/model, the recipe trains other/model."),
        ("length", 513, "length: the server takes 512 tokens, prompt and completion may have 513."),
        ("dtype", "bfloat16", "dtype: the server computes in float32"),
        ("logprobs_mode", "raw_logprobs", "log-probabilities: the server returns processed_logprobs"),
        ("transfer", "nccl", "weight transfer: the server receives by gloo"),
        ("probe_ids", (1, 2, 4), "vocabulary:"),
    ],
)
def test_each_mismatch_is_named(field, value, sentence):
    (found,) = mismatches(Wanted(**{field: value}), FACTS)
    assert found.startswith(sentence)


def test_a_model_is_the_same_by_another_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    facts = ServerFacts(str(tmp_path / "model"), 512, "float32", "", None, ())
    assert list(mismatches(Wanted(model="./model"), facts)) == []


def test_no_server_is_said_to_be_none():
    with pytest.raises(ServerUnreachable, match="no vLLM server answers"):
        server_facts(f"http://127.0.0.1:{free_port()}")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(ensure_model(directory=tmp_path_factory.mktemp("cache"), steps=2))  # hardly warmed up


needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make install-vllm")


def packaged(model, **settings):
    given = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return load_recipe(["--config", "quickstart/grpo-vllm-server", "--model_name_or_path", model, *given])


def flags(recipe) -> dict[str, str]:
    line = serve.command(recipe, "127.0.0.1", 8000)
    return {name: value for name, value in zip(line, [*line[1:], ""], strict=True) if name.startswith("--")}


@needs_vllm
def test_a_server_gets_the_flags_that_its_recipe_needs(model):
    recipe = packaged(model)
    found = flags(recipe)
    assert found["--model"] == model
    assert found["--host"] == "127.0.0.1"
    assert found["--dtype"] == "float32"
    assert found["--logprobs-mode"] == "processed_logprobs"
    assert json.loads(found["--weight-transfer-config"]) == {"backend": "gloo"}
    assert "--enforce-eager" in found
    assert "--trust-remote-code" not in found
    assert serve.environment(recipe)["VLLM_SERVER_DEV_MODE"] == "1"
    assert serve.command(recipe, "127.0.0.1", 8000, ["--max-num-seqs", "4"])[-2:] == ["--max-num-seqs", "4"]


@needs_vllm
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
def test_a_setting_of_the_recipe_is_a_flag_of_the_server(setting, value, flag, becomes, model):
    assert flags(packaged(model, **{setting: value}))[flag] == becomes
