"""The estimate of memory in `grpo-ext check`: its parts follow the settings, and it never refuses."""

import gc
import time
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import psutil
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import ModelConfig

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.commands import memory, peaks
from grpo_ext.commands.memory import estimate
from grpo_ext.commands.peaks import MicroBatch, Shape
from grpo_ext.quickstart.model import build_tokenizer
from grpo_ext.recipe.model_checks import InspectedPolicy
from support import tiny

CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "num_generations": 4, "gradient_checkpointing": False}
SIZE = {"per_device_train_batch_size": 8, "max_completion_length": 64, "shared_prefix": "auto"}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = LlamaConfig(hidden_size=64, intermediate_size=160, num_hidden_layers=4, vocab_size=500, **HEADS)


def parts(prompt=32, dtype=None, **settings):
    config = GRPOExtConfig(**CPU | SIZE | settings)
    return estimate(config, dtype, 1000, 1000, Shape.of(CONFIG), prompt)


def saved_bytes(model, ids) -> int:
    """What autograd keeps of a forward, without the weights: each storage once."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(ids)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_keeps_what_the_formula_counts(dtype):
    sizes = {"hidden_size": 64, "intermediate_size": 160, **HEADS}
    ids = torch.randint(3, 40, (4, 64))
    deep, flat = (tiny.model(dtype=dtype, num_hidden_layers=n, **sizes) for n in (6, 2))
    each = (saved_bytes(deep, ids) - saved_bytes(flat, ids)) / 4 / ids.numel()
    assert Shape.of(deep.config).layer(dtype.itemsize) == pytest.approx(each, rel=0.25)


def test_each_setting_moves_its_part(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    plain = parts()
    assert parts(max_completion_length=128)["activations"] > 1.5 * plain["activations"]
    assert parts(gradient_checkpointing=True)["activations"] < 0.6 * plain["activations"]
    assert parts(shared_prefix="false")["activations"] > plain["activations"] + 512 * 32_768 * 4  # TRL's buffer
    assert parts(entropy_coef=0.01)["activations"] == plain["activations"] + 512 * 500 * 4
    assert parts(gradient_accumulation_steps=2)["activations"] == plain["activations"] + 4000
    assert parts(dtype="bfloat16")["weights"] == plain["weights"] / 2
    assert parts(use_vllm=True)["engine"] == plain["weights"] + 2**30
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert parts(use_vllm=True)["engine"] == plain["weights"] + 2**32
    assert "engine" not in parts(use_vllm=True, vllm_mode="server")
    bare = estimate(GRPOExtConfig(**CPU | SIZE), None, 1000, 1000, None, 32)
    assert bare.keys() == plain.keys() - {"activations", "rollout"}


def test_autocast_keeps_copies_of_all_layers_unless_they_are_computed_again():
    """4 layers of 10,000 weights, and a head of 500 x 64."""

    def found(**settings):
        config = GRPOExtConfig(**CPU | SIZE | {"bf16": True} | settings)
        return estimate(config, None, 72_000, 72_000, Shape.of(CONFIG), 32)

    assert found()["autocast"] == 2 * 72_000
    assert found(gradient_checkpointing=True)["autocast"] == 2 * (32_000 + 10_000)


def test_a_tied_embedding_adds_a_gradient_beside_the_heads():
    sizes = {"tokens": 1, "labels": 1, "width": 4, "stream": 4, "merged": True, "adapter": 0, "checkpointed": True}
    batch = MicroBatch(**sizes, logits=0, accumulated=False)
    shape = Shape(layers=1, hidden=10, inner=10, queries=10, keys=10, vocabulary=1000, tied=True)
    assert peaks.peak(shape, batch, 100_000) == 100_000 + 4 * 10_000
    assert peaks.peak(replace(shape, tied=False), batch, 100_000) < 102_000


def test_a_rollout_holds_keys_values_logits_and_copies_of_the_weights(monkeypatch):
    shape = Shape(layers=2, hidden=8, inner=8, queries=8, keys=4, vocabulary=100)
    args = GRPOExtConfig(**CPU | SIZE | {"max_completion_length": 20})
    rows, length = 8, 10 + 20 + 64  # 64: the room by which a cache grows
    assert peaks.rollout_held(args, shape, 10, 4, 1000) == 1000 + rows * length * 2 * 2 * 4 * 4 + rows * 100 * 16
    assert peaks.rollout_held(GRPOExtConfig(**CPU | SIZE | {"use_vllm": True}), shape, 10, 4, 1000) == 0
    monkeypatch.setattr(memory, "rollout_held", lambda *sizes: 10**9)
    found = parts()
    assert found["rollout"] == 10**9 - found["gradients"] - found["activations"]


def test_a_process_that_samples_is_counted_with_its_weights_where_it_is_on_the_device(monkeypatch):
    monkeypatch.setattr(memory, "rollout_held", lambda *sizes: 10**9)
    plain, beside = parts(), parts(rollout_engine="process")
    assert beside == {name: size for name, size in plain.items() if name != "rollout"} | {"sampler": 10**9 + 4000}
    config = GRPOExtConfig(**CPU | SIZE | {"rollout_engine": "process", "rollout_device": "cpu"})
    monkeypatch.setattr(config, "use_cpu", False)
    assert "sampler" not in estimate(config, None, 1000, 1000, Shape.of(CONFIG), 32)


@pytest.mark.parametrize(
    ("dtype", "settings", "copies"),
    [
        ("bfloat16", {}, 2 * 40_000),
        (None, {"bf16": True}, 2 * 72_000),
        (None, {}, 0),
        ("float16", {}, 0),
        ("bfloat16", {"rollout_engine": "generate"}, 0),
        ("bfloat16", {"max_completion_length": 31}, 0),
        ("bfloat16", {"use_cpu": False}, 0),
        ("bfloat16", {"can_block": False}, 0),
        ("bfloat16", {"tied": True}, 2 * 72_000),
    ],
)
def test_a_rollout_copies_weights_to_16_bits_or_into_blocks(dtype, settings, copies, monkeypatch):
    """Of 72,000 weights an LM head of 500 x 64 is one, and an embedding of as many is not of a linear layer."""
    settings = {"can_block": True, "tied": False, "use_cpu": True} | settings
    blocks, tied, on_cpu = (settings.pop(name) for name in ("can_block", "tied", "use_cpu"))
    monkeypatch.setattr(memory, "can_block", lambda: blocks)
    monkeypatch.setattr(memory, "rollout_held", lambda *given: held.append(given[-1]) or 0)
    held, shape = [], replace(Shape.of(CONFIG), tied=tied)
    config = GRPOExtConfig(**CPU | SIZE | settings)
    monkeypatch.setattr(config, "use_cpu", on_cpu)
    estimate(config, dtype, 72_000, 72_000, shape, 32)
    assert held == [copies]


def test_quantized_layers_are_smaller():
    """7,680 weights in the linear layers of each of two layers, beside a head and an embedding."""
    four, frozen = {"use_peft": True, "load_in_4bit": True}, tiny.model().requires_grad_(False)
    assert memory.packed_bytes(ModelConfig(**four), frozen) == 15_360 * (4 - 0.5 - 4 / 64)
    assert memory.packed_bytes(ModelConfig(**four, use_bnb_nested_quant=True), frozen) == 15_360 * (3.5 - 1 / 64)
    assert memory.packed_bytes(ModelConfig(use_peft=True, load_in_8bit=True, dtype="float16"), frozen) == 15_360
    assert memory.packed_bytes(ModelConfig(use_peft=True), frozen) == 0


def test_pieces_of_a_micro_batch_bound_its_activations():
    plain, whole = parts(shared_prefix="true"), 2 * 32 + 8 * 64
    assert parts(shared_prefix="true", micro_batch_tokens=whole) == plain
    cut = parts(shared_prefix="true", micro_batch_tokens=200)["activations"]
    assert 0.3 < cut / plain["activations"] < 0.45
    row = parts(shared_prefix="true", micro_batch_tokens=96)
    assert parts(shared_prefix="true", micro_batch_tokens=1) == row  # a completion is not cut


@pytest.mark.parametrize("settings", [{}, {"micro_batch_tokens": 500}])
def test_the_largest_limit_that_fits_is_named(settings, monkeypatch):
    recipe = SimpleNamespace(
        training=GRPOExtConfig(**CPU | SIZE | settings),
        model=ModelConfig(),
        data=SimpleNamespace(max_prompt_length=None),
    )
    policy = InspectedPolicy(SimpleNamespace(config=CONFIG, modules=list), parameters=1000, trained=1000)

    def total(tokens):
        return sum(parts(micro_batch_tokens=tokens).values())

    for limit in (96, 97, 200, 300):
        monkeypatch.setattr(memory, "device_memory", lambda _, limit=limit: total(limit))
        fit = memory.fitting(recipe, policy, 32)
        assert total(fit) <= total(limit) < total(fit + 1)
    problem = memory.too_large(recipe, memory.of_recipe(recipe, policy, 32), fit)
    assert f"Set micro_batch_tokens: {fit}, the most by which it fits" in str(problem)
    monkeypatch.setattr(memory, "device_memory", lambda _: total(96) - 1)
    assert memory.fitting(recipe, policy, 32) is None
    monkeypatch.setattr(memory, "device_memory", lambda _: total(None))
    assert memory.fitting(recipe, policy, 32) is None
    assert recipe.training.micro_batch_tokens == settings.get("micro_batch_tokens")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, "float32"),
        ({"gradient_checkpointing": True}, "float32"),
        ({"use_peft": True}, "float32"),
        ({"use_peft": True}, "bfloat16"),  # adapters copy their inputs to float32
    ],
)
@pytest.mark.cases(2)
def test_the_estimate_is_near_the_peak_of_a_step(settings, dtype, tmp_path):
    """By the tensors that torch allocates between the first step's rollout and its optimizer."""
    gc.collect()
    torch.manual_seed(0)
    tokenizer, settings = build_tokenizer(), dict(settings)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4} | HEADS
    config = LlamaConfig(**sizes, vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=1)
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    adapter = (
        LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        if settings.pop("use_peft", False)
        else None
    )
    size = {"per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 96, "max_steps": 2}
    whole = {"skip_zero_advantages": False, "generation_kwargs": {"suppress_tokens": [1]}}  # no completion ends early
    args = GRPOExtConfig(str(tmp_path), **CPU | size | whole | settings, loss_type="grpo", save_strategy="no")
    rows, between = Dataset.from_list([{"prompt": "a" * 34}] * 64), Between()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        reward = [lambda completions, **_: [float(i % 3) for i in range(len(completions))]]
        trainer = Profiled(model, reward, args, rows, None, tokenizer, callbacks=[between], peft_config=adapter)
        trainer.train()
    weights = list(trainer.model.parameters())
    numbers = (sum(p.numel() for p in weights), sum(p.numel() for p in weights if p.requires_grad))
    parts = estimate(args, dtype, *numbers, Shape.of(config).with_adapter(model), 34)
    expected = parts["gradients"] + parts["autocast"] + parts["activations"]
    measured = between.most(profiled, trainer.began)
    assert expected / measured == pytest.approx(1, abs=0.15)


class Profiled(GRPOExtTrainer):
    """Notes when the first step's rollout ends."""

    began = 0

    def _prepare_inputs(self, inputs):
        prepared = super()._prepare_inputs(inputs)
        self.began = self.began or time.time_ns()
        return prepared


class Between(TrainerCallback):
    """Notes when the first step has its gradients, before Adam's moments are made."""

    ended = 0

    def on_pre_optimizer_step(self, args, state, control, **_):
        self.ended = self.ended or time.time_ns()

    def most(self, profiled: profile, began: int) -> int:
        """The most bytes over those at `began`."""
        events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        levels = list(accumulate(event.nbytes() for event in events))
        times = [event.start_ns() for event in events]
        before = [level for at, level in zip(times, levels, strict=True) if at <= began][-1]
        return max(level for at, level in zip(times, levels, strict=True) if began <= at <= self.ended) - before


def test_an_engine_on_a_gpu_takes_its_share(monkeypatch):
    monkeypatch.setattr(memory, "device_memory", lambda _: 80 * 2**30)
    config = GRPOExtConfig(**CPU | SIZE, use_vllm=True, vllm_gpu_memory_utilization=0.25)
    config.use_cpu = False
    assert estimate(config, None, 1000, 1000, None, 0)["engine"] == 20 * 2**30


def test_a_recipe_that_cannot_fit_is_warned_of_with_the_numbers(monkeypatch):
    class Recipe:
        training = GRPOExtConfig(**CPU | SIZE)

    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("M", (), {"total": 2**30}))
    found = memory.too_large(Recipe, {"weights": 2**29, "activations": 2**31})
    assert str(found).startswith("memory: by the estimate it is 2.50 GiB, most of it for activations, and the device")
    assert "Halve per_device_train_batch_size" in str(found)
    assert memory.too_large(Recipe, {"weights": 2**29}) is None


def test_copies_of_the_weights_for_rollouts_are_counted(tmp_path, monkeypatch):
    settings = {"use_cpu": True, "bf16": False, "max_steps": 9, "report_to": "none"}
    training = GRPOExtConfig(str(tmp_path), **settings, rollout_engine="process", rollout_ahead=4)
    recipe = SimpleNamespace(training=training, model=SimpleNamespace(dtype="bfloat16"))
    policy = SimpleNamespace(parameters=2**30)
    assert memory.copies(recipe, policy) == 4 * 2**31
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(total=2**32))
    assert "8.00 GiB of copies of the weights are more than the main memory" in str(memory.too_many(recipe, 2**33))
    assert memory.too_many(recipe, 2**32) is None
    recipe.training = GRPOExtConfig(str(tmp_path), **settings)
    assert memory.copies(recipe, policy) == 0
