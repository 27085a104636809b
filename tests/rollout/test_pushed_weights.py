"""What a sampler is sent of a policy with adapters or a quantised base: the weights with which the policy computes."""

import copy

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_ext.rollout.vllm.unpushable import unpushable
from grpo_ext.rollout.vllm.weights import Rounding, effective_weights
from support import tiny

LAYERS = ["q_proj", "v_proj", "down_proj"]
ENDS = ["embed_tokens", "lm_head"]
IDS = torch.arange(3, 19).view(2, 8)


def tied():
    return tiny.model(tie_word_embeddings=True)


def mixture():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    sizes |= {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_key_value_heads=2))


def with_conv1d():
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes))


def lora(**settings):
    return LoraConfig(**({"r": 4, "target_modules": LAYERS} | settings))


CONV1D = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FORMATS = {
    "LoRA": (tiny.model, lora()),
    "rank-stabilised": (tiny.model, lora(use_rslora=True)),
    "PiSSA": (tiny.model, lora(init_lora_weights="pissa")),
    "MiCA": (tiny.model, lora(init_lora_weights="mica")),
    "DoRA": (tiny.model, lora(use_dora=True, target_modules=[*LAYERS, *ENDS])),
    "embedding and head": (tiny.model, lora(target_modules=[*LAYERS, *ENDS])),
    "modules_to_save": (tiny.model, lora(modules_to_save=ENDS)),
    "tied modules_to_save": (tied, lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    "tied embedding": (tied, lora(target_modules=[*LAYERS, "embed_tokens"], ensure_weight_tying=True)),
    "trainable tokens": (tiny.model, lora(trainable_token_indices=[4, 9])),
    "tied trainable tokens": (tied, lora(trainable_token_indices=[4, 9])),
    "trainable tokens only": (tied, peft.TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[4, 9])),
    "Conv1D": (with_conv1d, lora(**CONV1D, bias="all")),
    "Conv1D DoRA": (with_conv1d, lora(**CONV1D, use_dora=True)),
    "lora_bias": (with_conv1d, lora(**CONV1D, lora_bias=True)),
    "experts": (mixture, lora(target_modules=["q_proj"], target_parameters=EXPERTS)),
    "AdaLora": (tiny.model, peft.AdaLoraConfig(target_modules=LAYERS, total_step=10)),
    "BOFT": (tiny.model, peft.BOFTConfig(target_modules=LAYERS, boft_block_size=4)),
    "C3A": (tiny.model, peft.C3AConfig(target_modules=LAYERS, block_size=8)),
    "DeLoRA": (tiny.model, peft.DeloraConfig(target_modules=LAYERS)),
    "FourierFT": (tiny.model, peft.FourierFTConfig(target_modules=LAYERS, n_frequency=10)),
    "HRA": (tiny.model, peft.HRAConfig(target_modules=LAYERS, r=4)),
    "IA3": (tiny.model, peft.IA3Config(target_modules=LAYERS, feedforward_modules=["down_proj"])),
    "LoHa": (tiny.model, peft.LoHaConfig(target_modules=LAYERS, r=4)),
    "LoKr": (tiny.model, peft.LoKrConfig(target_modules=LAYERS, r=4)),
    "MiSS": (tiny.model, peft.MissConfig(target_modules=LAYERS, r=4)),
    "OFT": (tiny.model, peft.OFTConfig(target_modules=LAYERS, oft_block_size=4)),
    "RandLoRA": (tiny.model, peft.RandLoraConfig(target_modules=["q_proj"], r=4)),
    "SHiRA": (tiny.model, peft.ShiraConfig(target_modules=LAYERS, r=2)),
    "VeRA": (tiny.model, peft.VeraConfig(target_modules=["q_proj"], r=4)),
    "WaveFT": (tiny.model, peft.WaveFTConfig(target_modules=LAYERS, n_frequency=10)),
}


def adapted(make, config, dtype=torch.float32, spread=0.1):
    """A policy whose adapters are not at their start."""
    model = get_peft_model(make().to(dtype), copy.deepcopy(config)).eval()
    return moved(model, spread)


def moved(model, spread=0.1):
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += spread * torch.randn_like(parameter)
    return model


def sent(model, dtype=torch.float32, rounding=None):
    return {name: value.clone() for name, value in effective_weights(model, dtype, rounding or Rounding())}


def logits_of(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits.double()


@pytest.mark.filterwarnings("ignore")  # PEFT's about ties and merging
@pytest.mark.parametrize("name", FORMATS)
def test_a_sampler_with_the_weights_that_are_sent_computes_what_the_policy_does(name):
    make, config = FORMATS[name]
    policy = adapted(make, config)
    assert [*unpushable(policy)] == []
    before = {key: p.detach().clone() for key, p in policy.named_parameters()}
    weights = sent(policy)
    assert all(torch.equal(p, before[key]) for key, p in policy.named_parameters())
    sampler = make().eval()
    assert weights.keys() == dict(sampler.named_parameters()).keys()
    sampler.load_state_dict(weights, strict=False)
    sampler.tie_weights()
    torch.testing.assert_close(logits_of(sampler), logits_of(policy), rtol=1e-4, atol=1e-4)
    assert (logits_of(policy) - logits_of(make().eval())).abs().max() > 0.01


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "tied embedding"])  # a copy of it is not tied
def test_a_sum_in_bfloat16_is_that_in_float64_rounded_once(name):
    make, config = FORMATS[name]
    policy = adapted(make, config, torch.bfloat16)
    exact = copy.deepcopy(policy).double().merge_and_unload().state_dict()
    wide, rounded = sent(policy), sent(policy, torch.bfloat16)
    for key, value in wide.items():
        torch.testing.assert_close(value.double(), exact[key].double(), rtol=2e-6, atol=2e-6)
        assert torch.equal(rounded[key].float(), value.bfloat16().float())


def test_all_active_adapters_are_summed_and_the_others_are_not():
    policy = adapted(tiny.model, lora())
    for name in ("second", "other"):
        policy.add_adapter(name, lora(r=2, init_lora_weights=False))
    policy.base_model.set_adapter(["default", "second"])
    weights = sent(policy)
    merged = copy.deepcopy(policy).double().merge_and_unload(adapter_names=["default", "second"]).state_dict()
    for key, value in weights.items():
        torch.testing.assert_close(value.double(), merged[key].double(), rtol=1e-6, atol=1e-6)


def test_an_adapter_that_is_disabled_is_not_sent():
    policy = adapted(tiny.model, lora(modules_to_save=["lm_head"]))
    with policy.disable_adapter():
        weights = sent(policy)
    assert all(torch.equal(value, weights[name]) for name, value in tiny.model().named_parameters())


def test_what_a_reference_adapter_keeps_of_a_module_is_not_sent():
    policy = adapted(tiny.model, lora(modules_to_save=["embed_tokens"]))
    before = sent(policy)
    policy.add_adapter("ref", lora(modules_to_save=["embed_tokens"], init_lora_weights=False))
    assert all(torch.equal(value, before[key]) for key, value in sent(policy).items())


REFUSED = {
    "activated LoRA": (tiny.model, lora(alora_invocation_tokens=[4], task_type="CAUSAL_LM"), "ALoraLinearVariant"),
    "LN tuning": (tiny.model, peft.LNTuningConfig(target_modules=["input_layernorm"]), "LN_TUNING"),
    "prompt": (tiny.model, peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "PROMPT_TUNING"),
    "embedding of a tied pair": (tied, lora(target_modules=[*LAYERS, "embed_tokens"]), "tie_word_embeddings"),
    "head of a tied pair": (tied, lora(target_modules=[*LAYERS, "lm_head"]), "tie_word_embeddings"),
    "copy of a tied embedding": (tied, lora(modules_to_save=["embed_tokens"]), "tie_word_embeddings"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_make_no_single_weight_are_refused(name):
    make, config, words = REFUSED[name]
    [problem] = unpushable(get_peft_model(make(), copy.deepcopy(config)))
    assert words in str(problem)
    assert problem.cure


# Rounding.


def test_rounding_counts_the_share_of_the_update_that_is_lost():
    base, update = torch.ones(3, 4), torch.zeros(3, 4)
    update[0] = torch.tensor([2**-3, 2**-12, 0.0, 0.0])  # on the grid of bfloat16, and lost on it
    rounding = Rounding()
    rounding.add((base + update).bfloat16(), base + update, base)
    assert rounding.share == pytest.approx(2**-12 / (2**-6 + 2**-24) ** 0.5, rel=1e-9)
    assert Rounding().share == 0.0


@pytest.mark.parametrize("spread", [1e-6, 1e-3, 0.1])
def test_the_smaller_the_update_the_more_of_it_bfloat16_loses(spread):
    policy = adapted(tiny.model, lora(), torch.bfloat16, spread)
    exact, coarse = Rounding(), Rounding()
    sent(policy, torch.float32, exact), sent(policy, torch.bfloat16, coarse)
    assert exact.share == 0.0
    assert {1e-6: 0.9, 1e-3: 0.03, 0.1: 0.0}[spread] < coarse.share < {1e-6: 1.1, 1e-3: 0.9, 0.1: 0.02}[spread]


# Quantised bases.

QUANTISED = {
    "4 bits": {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32},
    "nf4 twice": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "8 bits": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), hidden_size=64, intermediate_size=64)


def quantised(folder, dtype, **options):
    from transformers import AutoModelForCausalLM

    config = BitsAndBytesConfig(**options)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype).eval()


@pytest.mark.extra("qlora")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("adapter", "training"),
    # without gradients some CPUs rearrange 4-bit weights, and PEFT's DoRA computes its norms of what it finds then
    [({}, True), ({}, False), ({"use_dora": True}, True), ({"target_modules": ["q_proj"]}, True)],
)
@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantised_base_is_sent_unpacked_with_its_adapter(name, adapter, training, folder):
    policy = moved(get_peft_model(quantised(folder, torch.float32, **QUANTISED[name]), lora(**adapter)))
    expected = logits_of(policy.train(training))
    weights = sent(policy)
    assert [*unpushable(policy)] == []
    bare, sampler = tiny.load(folder).eval(), tiny.load(folder).eval()
    assert weights.keys() == dict(sampler.named_parameters()).keys()
    assert all(value.is_floating_point() for value in weights.values())
    sampler.load_state_dict(weights, strict=False)
    distance, update = ((logits_of(model) - expected).abs().mean() for model in (sampler, bare))
    assert distance < (1e-3 if training else 0.1 * update)  # without gradients a CPU multiplies in fewer bits


def test_packed_weights_that_nothing_unpacks_are_refused():
    model = tiny.model()
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.uint8), requires_grad=False)
    [problem] = unpushable(model)
    assert "lm_head.weight" in str(problem)
    assert "load_in_4bit: true" in problem.cure


def test_a_mixture_of_experts_is_refused_on_a_cpu_whose_engine_rearranges_experts():
    assert [*unpushable(mixture())] == []
    [problem] = unpushable(mixture(), on_cpu=True)
    assert (problem.field, problem.cure) == ("use_vllm", "Set use_vllm: false, or train on a GPU.")
