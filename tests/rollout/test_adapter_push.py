"""Which adapters vLLM is given as they are, and what it is sent of them."""

import copy
import json
import os
import subprocess

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_ext.commands import serve
from grpo_ext.errors import ConfigError
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.preflight import Preflight
from grpo_ext.rollout.vllm.adapter_files import OWNER, remove_abandoned, write_adapter
from grpo_ext.rollout.vllm.adapters import adapter_weights, slots, unheld
from grpo_ext.rollout.vllm.server import ServerFacts, mismatches
from grpo_ext.rollout.vllm.weights import Rounding, effective_weights
from support import tiny

LAYERS = ["q_proj", "v_proj", "down_proj"]


def tied():
    return tiny.model(tie_word_embeddings=True)


def mixture():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    sizes |= {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_key_value_heads=2))


def with_conv1d():
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(**sizes))


def lora(**settings):
    return LoraConfig(**({"r": 4, "target_modules": LAYERS} | settings))


HELD = {
    "LoRA": lora(),
    "all linear layers": lora(target_modules="all-linear", task_type="CAUSAL_LM"),
    "rank-stabilised": lora(use_rslora=True),
    "ranks and scalings of their own": lora(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3}),
    "gaussian": lora(init_lora_weights="gaussian"),
}
CONV1D = {"fan_in_fan_out": True}
UNHELD = {
    "PiSSA": (tiny.model, lora(init_lora_weights="pissa"), "init_lora_weights: pissa changes the base"),
    "DoRA": (tiny.model, lora(use_dora=True), "lora_magnitude_vector.default.weight is trained, which is not A or B"),
    "MiCA": (tiny.model, lora(init_lora_weights="mica"), "init_lora_weights: mica"),
    "embedding": (tiny.model, lora(target_modules=[*LAYERS, "embed_tokens"]), "embed_tokens"),
    "head": (tiny.model, lora(target_modules=[*LAYERS, "lm_head"]), "lm_head is no linear layer of the decoder"),
    "modules_to_save": (tiny.model, lora(modules_to_save=["lm_head"]), "lm_head.modules_to_save.default.weight is tr"),
    "trainable tokens": (tiny.model, lora(trainable_token_indices=[4, 9]), "tokens_delta.default is trained"),
    "bias of the base": (with_conv1d, lora(target_modules=["c_attn"], bias="all", **CONV1D), "bias is tr"),
    "lora_bias": (with_conv1d, lora(target_modules=["c_attn"], lora_bias=True, **CONV1D), "lora_B.default.bias is tr"),
    "Conv1D": (with_conv1d, lora(target_modules=["c_attn"], **CONV1D), "attn.c_attn is no linear layer"),
    "experts": (mixture, lora(target_modules=["q_proj"]), "mixture of experts"),
    "rank": (tiny.model, lora(r=513, target_modules=["q_proj"]), "vLLM holds ranks up to 512, and this is 513"),
    "IA3": (tiny.model, peft.IA3Config(target_modules=LAYERS, feedforward_modules=["down_proj"]), "the type IA3"),
}


def adapted(make, config):
    """A policy whose adapter is not at its start."""
    torch.manual_seed(0)
    model = get_peft_model(make(), copy.deepcopy(config)).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("name", HELD)
def test_base_and_sent_adapter_are_the_weights_that_the_policy_computes_with(name):
    model = adapted(tiny.model, HELD[name])
    assert unheld(model) is None
    exact = dict(effective_weights(model, torch.float32, Rounding()))
    sent = dict(adapter_weights(model, torch.float32, lambda _: torch.no_grad()))
    with model.disable_adapter():
        base = dict(effective_weights(model, torch.float32, Rounding()))
    changed = {key for key, weight in exact.items() if not torch.equal(weight, base[key])}
    assert {f"base_model.model.{key.removesuffix('weight')}lora_A.weight" for key in changed} == {
        key for key in sent if "lora_A" in key
    }
    for key in changed:
        a, b = (sent[f"base_model.model.{key.removesuffix('weight')}lora_{part}.weight"] for part in "AB")
        torch.testing.assert_close(base[key] + b @ a, exact[key], rtol=1e-5, atol=1e-6)


def test_what_is_sent_stays_when_the_policy_moves():
    model = adapted(tiny.model, lora())
    sent = dict(adapter_weights(model, torch.float32, lambda _: torch.no_grad()))
    before = {name: tensor.clone() for name, tensor in sent.items()}
    for parameter in model.parameters():
        parameter.data += 1.0
    assert all(torch.equal(sent[name], before[name]) for name in before)


def test_an_adapter_that_is_disabled_is_sent_as_zero():
    model = adapted(tiny.model, lora())
    with model.disable_adapter():
        sent = dict(adapter_weights(model, torch.bfloat16, lambda _: torch.no_grad()))
    assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
    assert not any(tensor.any() for name, tensor in sent.items() if "lora_B" in name)


@pytest.mark.parametrize("name", UNHELD)
def test_what_vllm_cannot_hold_has_a_reason(name):
    make, config, words = UNHELD[name]
    assert words in str(unheld(get_peft_model(make(), copy.deepcopy(config))))


def test_a_policy_without_one_adapter_has_a_reason():
    assert unheld(tiny.model()) == "all weights are trained"
    model = get_peft_model(tiny.model(), lora())
    model.add_adapter("second", lora())
    model.base_model.set_adapter(["default", "second"])
    assert unheld(model) == "several adapters are active"


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (16, 16), (257, 320)])
def test_room_is_made_for_the_rank_and_the_versions(rank, room):
    model = get_peft_model(tiny.model(), lora(r=rank, rank_pattern={"q_proj": 1}))
    assert slots(model, 3) == {"max_lora_rank": room, "max_loras": 5}


def test_a_folder_may_be_written_twice(tmp_path):
    for _ in range(2):
        write_adapter(tmp_path / "a", {"r": 8}, {"x": torch.ones(2)})
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text()) == {"r": 8}
    assert load_file(tmp_path / "a" / "adapter_model.safetensors")["x"].tolist() == [1, 1]


def test_the_folders_of_processes_that_were_killed_are_removed(tmp_path):
    killed = subprocess.Popen(["true"])
    killed.wait()
    owners = {"dead": [killed.pid], "shared": [killed.pid, os.getpid()], "mine": [os.getpid()], "not-yet-owned": []}
    for name, pids in owners.items():
        write_adapter(folder := tmp_path / f"grpo-ext-{name}", {"r": 1}, {"a": torch.ones(1)})
        for pid in pids:
            (folder / f"{OWNER}{pid}").touch()
    (tmp_path / "of-another").mkdir()
    (tmp_path / "of-another" / f"{OWNER}{killed.pid}").touch()
    remove_abandoned(tmp_path)
    left = {path.name.removeprefix("grpo-ext-") for path in tmp_path.iterdir()}
    assert left == {"shared", "mine", "not-yet-owned", "of-another"}


@pytest.mark.parametrize(
    ("want", "have", "words"),
    [
        ({"max_loras": 3, "max_lora_rank": 16}, {"max_loras": 4, "max_lora_rank": 16}, []),
        ({"max_loras": 3, "max_lora_rank": 16}, {"max_loras": 2, "max_lora_rank": 8}, ["the rank 16", "3 versions"]),
        ({"max_loras": 0}, {"max_loras": 2, "max_lora_rank": 8}, ["takes no whole weights"]),
        ({"max_loras": 0}, {"max_loras": 0, "max_lora_rank": 0}, []),
        ({"loads_adapters": True}, {"loads_adapters": False}, ["VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"]),
        ({"loads_adapters": True}, {}, []),  # not reported
    ],
)
def test_a_server_has_room_for_what_the_run_pushes(want, have, words):
    found = [str(problem) for problem in mismatches(ServerFacts(**want), ServerFacts(**have))]
    assert len(found) == len(words)
    assert all(word in problem for word, problem in zip(words, found, strict=True))


def packaged(model, *given, preflight=None):
    lora = ("--use_peft", "true", "--lora_target_modules", "all-linear", "--lora_r", "9")
    return load_recipe(
        ["--config", "quickstart/grpo-vllm-server", "--model_name_or_path", model, *lora, *given], preflight
    )


def words_of(recipe):
    line = serve.command(recipe, "127.0.0.1", 8000)
    return {name: value for name, value in zip(line, [*line[1:], ""], strict=True) if name.startswith("--")}


@pytest.mark.vllm
def test_a_server_is_started_with_room_for_the_recipes_adapter(quickstart_model):
    recipe = packaged(quickstart_model, "--rollout_ahead", "1")
    found = words_of(recipe)
    assert "--enable-lora" in found
    assert (found["--max-lora-rank"], found["--max-loras"]) == ("16", "3")
    assert (serve.wanted(recipe).max_lora_rank, serve.wanted(recipe).max_loras) == (16, 3)
    assert serve.environment(recipe)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    recipe = packaged(quickstart_model, "--vllm_push", "merged")
    assert not {"--enable-lora", "--max-loras"} & words_of(recipe).keys()
    assert serve.wanted(recipe).max_loras == 0


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), "the adapter alone, 0.0"),
        (("--use_dora", "true"), "whole weights, with the adapter merged: "),
        (("--vllm_push", "merged"), "whole weights, with the adapter merged: vllm_push: merged"),
        (("--vllm_mode", "colocate", "--vllm_enable_sleep_mode", "true"), "vllm_enable_sleep_mode drops the base"),
        (("--load_in_8bit", "true"), "the base is quantized"),
    ],
)
def test_the_plan_says_what_is_pushed_and_why(given, words, quickstart_model):
    preflight = Preflight()
    packaged(quickstart_model, *given, preflight=preflight)
    assert words in preflight.policy.push


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--vllm_push", "adapter", "--use_dora", "true"), "vllm_push='adapter': .*is trained, which is not A or B"),
        (("--vllm_push", "adapter", "--use_peft", "false"), "vllm_push='adapter': all weights are trained"),
        (("--vllm_engine_kwargs", '{"enable_lora": true}'), "enable_lora=True: vllm_push controls it"),
    ],
)
def test_what_cannot_be_is_refused(given, words, quickstart_model):
    with pytest.raises(ConfigError, match=words):
        packaged(quickstart_model, *given, preflight=Preflight())
