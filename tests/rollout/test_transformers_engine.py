"""The grouped engine samples as `generate`: greedy tokens are equal, samples have its distribution; or it refuses."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from scipy.stats import chisquare
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from grpo_ext.errors import ConfigError
from grpo_ext.packing.obstacles import Forward, obstacles
from grpo_ext.rollout import decoding, transformers_engine
from grpo_ext.rollout.decoding import decode, distinct, padded
from grpo_ext.rollout.prompt_cache import Unsupported
from grpo_ext.rollout.transformers_engine import GroupedEngine, grouped_engine, transformers_sampler
from support import architectures, image_text, tiny
from support.trainers import build, weights

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 41, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
SIZES |= {"max_position_embeddings": 128, "initializer_range": 0.3}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
MODELS = {
    "llama": lambda: tiny.model(max_position_embeddings=128),
    "llama-eager": lambda: tiny.model(attn_implementation="eager"),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=8)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)),
    "qwen2-window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=1)
    ),
    "phi": lambda: PhiForCausalLM(PhiConfig(**SIZES)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, sliding_window=None)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=41, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=None, initializer_range=0.3
        )
    ),
    "lora": lambda: get_peft_model(tiny.model(), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)),
}


def prompts(lengths, seed=1, vocabulary=41):
    """Left-padded prompts; equal lengths are equal prompts."""
    generator = torch.Generator().manual_seed(seed)
    known: dict[int, torch.Tensor] = {}
    width, rows = max(lengths), []
    for length in lengths:
        row = known.setdefault(length, torch.randint(3, vocabulary, (length,), generator=generator))
        rows.append(torch.cat([torch.zeros(width - length, dtype=torch.long), row]))
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return {"input_ids": torch.stack(rows), "attention_mask": mask.long()}


def settings(**overrides):
    base = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1, "top_k": 0}
    return GenerationConfig(**(base | overrides))


def grouped(model, **inputs):
    return GroupedEngine(required=True).generate(model, **inputs)[0]


def both(model, inputs, config):
    """Completions by `generate` and by the engine."""
    stock = model.generate(**inputs, generation_config=config)
    return stock, grouped(model, **inputs, generation_config=config)


# The same completions.


@pytest.mark.parametrize("name", MODELS)
def test_greedy_completions_are_those_of_generate(name):
    """Prompts of five lengths, ends of many lengths, one row at least that never ends."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    inputs = prompts([5, 5, 5, 9, 9, 3, 3, 12, 7, 5])
    stock, ours = both(model, inputs, settings(eos_token_id=[1, 7, 20], repetition_penalty=1.3))
    assert torch.equal(stock, ours)
    lengths = (ours[:, 12:] != 0).sum(dim=1)
    assert len(lengths.unique()) > 2


def test_prompts_of_one_length_and_a_cache_that_grows():
    model = tiny.model(max_position_embeddings=256).eval()
    inputs = prompts([6] * 4)
    stock, ours = both(model, inputs, settings(max_new_tokens=150, eos_token_id=None, no_repeat_ngram_size=3))
    assert ours.shape == (4, 156)
    assert torch.equal(stock, ours)


def test_a_minimum_length_and_suppressed_tokens_are_kept():
    model = tiny.model().eval()
    inputs = prompts([4, 4, 8])
    config = settings(eos_token_id=[1, *range(5, 20)], min_new_tokens=6, suppress_tokens=[22, 23])
    stock, ours = both(model, inputs, config)
    assert torch.equal(stock, ours)
    assert (ours[:, 8:14] != 0).all()


def test_left_padding_is_dropped_when_no_row_needs_it():
    """The long prompt ends at once; what is left runs without padding, and comes out the same."""
    model = tiny.model().eval()
    inputs = prompts([4, 30, 4, 6])
    first = model.generate(**inputs, generation_config=settings(max_new_tokens=1))[1, -1].item()
    stock, ours = both(model, inputs, settings(eos_token_id=[first]))
    assert torch.equal(stock, ours)
    assert ours[1, 31:].eq(0).all()


# The same distribution.


def exact(model, inputs, config, length):
    """Probability of every completion of up to `length` tokens, by plain forwards and transformers' own warpers."""
    ids = inputs["input_ids"][:1, inputs["attention_mask"][0].bool()]
    warp = model._get_logits_processor(config, input_ids_seq_length=ids.shape[1])
    found, open_ = {}, {(): 1.0}
    for step in range(length):
        grown = {}
        for tokens, probability in open_.items():
            row = torch.cat([ids, torch.tensor([tokens], dtype=torch.long)], dim=1)
            scores = warp(row, model(row).logits[:, -1].float())
            for token, p in enumerate(scores.softmax(dim=-1)[0].tolist()):
                target = found if (token in (config.eos_token_id, 0) and token) or step == length - 1 else grown
                if p > 0:
                    target[(*tokens, token)] = probability * p
        open_ = grown
    return found


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.6, "top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2, "repetition_penalty": 1.4}],
    ids=["plain", "temperature-top_k", "top_p", "min_p-repetition"],
)
@torch.no_grad()
def test_sampled_completions_have_the_exact_probabilities(sampling):
    """Chi-square over all completions of up to three tokens; rows end at different times."""
    model = tiny.model(vocab_size=7, initializer_range=0.5).eval()
    config = settings(do_sample=True, max_new_tokens=3, **sampling)
    one = prompts([5], vocabulary=7)
    expected = exact(model, one, config, 3)
    count = 8000
    inputs = {name: value.repeat(count, 1) for name, value in one.items()}
    torch.manual_seed(0)
    drawn = grouped(model, **inputs, generation_config=config)[:, 5:].tolist()
    seen = dict.fromkeys(expected, 0)
    for row in drawn:
        ended = row.index(1) + 1 if 1 in row else len(row)
        seen[tuple(row[:ended])] += 1
    ranked = sorted(expected, key=expected.__getitem__, reverse=True)
    common = [key for key in ranked if expected[key] * count >= 5]
    observed = [seen[key] for key in common] + [count - sum(seen[key] for key in common)]
    wanted = [expected[key] * count for key in common] + [count * (1 - sum(expected[key] for key in common))]
    if wanted[-1] < 1:
        observed, wanted = [*observed[:-2], sum(observed[-2:])], [*wanted[:-2], sum(wanted[-2:])]
    assert sum(expected.values()) == pytest.approx(1, abs=1e-5)
    assert len(common) > 5
    assert chisquare(observed, [w * count / sum(wanted) for w in wanted]).pvalue > 1e-3


# The work that is spared.


def test_a_prompt_runs_once_and_finished_rows_leave():
    model, shapes = tiny.model().eval(), []
    inputs = prompts([5] * 8 + [9] * 8)
    torch.manual_seed(0)
    hook = model.register_forward_pre_hook(
        lambda _, args, k: shapes.append(tuple(k["input_ids"].shape)), with_kwargs=True
    )
    with hook:
        config = settings(do_sample=True, eos_token_id=[1, *range(5, 12)], suppress_tokens=[0])
        lengths = (grouped(model, **inputs, generation_config=config)[:, 9:] != 0).sum(dim=1)
    assert shapes[0] == (2, 9)
    rows = [rows for rows, _ in shapes[1:]]
    assert {width for _, width in shapes[1:]} == {1}
    assert len(rows) == lengths.max() - 1
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < 6
    assert all(n * 7 / 8 <= (lengths > drawn).sum() <= n for drawn, n in enumerate(rows, start=1))


def test_prompts_that_differ_only_in_their_padding_are_distinct():
    """Token 0 at the start of a prompt is no padding."""
    ids = torch.tensor([[0, 3, 4], [0, 3, 4], [0, 3, 4], [5, 3, 4]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 1, 1], [1, 1, 1]])
    found = distinct(ids, mask)
    assert found.rows.tolist() == [0, 1, 3]
    assert found.of_row.tolist() == [0, 1, 0, 2]


def test_no_mask_is_built_where_nothing_is_padded():
    """From the start, or from where the row that needed it is gone."""
    model, masks = tiny.model().eval(), []
    first = model.generate(**prompts([4, 30]), generation_config=settings(max_new_tokens=1))[1, -1].item()
    hook = model.register_forward_pre_hook(lambda _, args, k: masks.append(k["attention_mask"]), with_kwargs=True)
    with hook:
        grouped(model, **prompts([6, 6]), generation_config=settings(max_new_tokens=3))
        assert [mask is None for mask in masks[1:]] == [True, True]  # the first is transformers', which 5.20 drops
        masks.clear()
        grouped(model, **prompts([4, 30, 4, 6]), generation_config=settings(max_new_tokens=3, eos_token_id=[first]))
    assert [mask is None for mask in masks] == [False, False, False]
    assert masks[-1].shape == (3, 6 + 2)


@pytest.mark.parametrize("make", [lambda: image_text.model("llava"), lambda: architectures.model("nemotron_h")])
def test_text_of_models_with_images_and_layers_without_a_cache_are_grouped(make):
    model = make().eval()
    ids = {name: value % 9 + 3 for name, value in prompts([4, 4]).items() if name == "input_ids"}
    found = grouped(model, **ids, attention_mask=torch.ones_like(ids["input_ids"]), generation_config=settings())
    assert found.shape[0] == 2


# Refusals.


def noisy():
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.1)
    return MixtralForCausalLM(config).train()


def scaled():
    return tiny.model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}).eval()


def prompt_tuned():
    return get_peft_model(tiny.model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()


def dropping():
    return tiny.model(attention_dropout=0.1).train()


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize(
    ("make", "overrides", "reason"),
    [
        (noisy, {}, "router is noisy"),
        (scaled, {}, "length of the batch"),
        (prompt_tuned, {}, "adds tokens before the prompt"),
        (dropping, {}, "dropout"),
        (tiny.model, {"num_beams": 2}, "beam"),
        (tiny.model, {"cache_implementation": "static"}, "StaticCache"),
        (tiny.model, {"use_cache": False}, "use_cache"),
        (tiny.model, {"forced_eos_token_id": 3}, "ForcedEOSTokenLogitsProcessor"),
        (tiny.model, {"max_time": 60.0}, "MaxTimeCriteria"),
    ],
    ids=["jitter", "rope", "prompt", "dropout", "beams", "static", "no-cache", "processor", "criterion"],
)
def test_generate_takes_over_where_the_engine_is_not_exact(make, overrides, reason, caplog):
    torch.manual_seed(0)
    model, inputs = make(), prompts([5, 5, 8])
    config = settings(max_new_tokens=6, disable_compile=True, **overrides)
    torch.manual_seed(1)
    stock = model.generate(**inputs, generation_config=config)
    engine = GroupedEngine()
    for _ in range(2):
        torch.manual_seed(1)
        with caplog.at_level("WARNING"):
            assert torch.equal(engine.generate(model, **inputs, generation_config=config)[0], stock)
    assert caplog.text.count("rollouts by transformers' own generate") == 1
    assert reason in engine.refusal
    with pytest.raises(Unsupported, match=reason):
        grouped(model, **inputs, generation_config=config)


def test_generate_takes_over_if_the_forward_draws_random_numbers():
    """PhiMoE samples its experts in training, whatever `router_jitter_noise` says."""
    config = PhimoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.0)
    model = PhimoeForCausalLM(config)
    assert next(obstacles(model, Forward.ROLLOUT), None) is None
    stock, ours = both(model.eval(), prompts([5, 5, 8]), settings(max_new_tokens=6))
    assert torch.equal(stock, ours)
    with pytest.raises(Unsupported, match="draws random numbers"):
        grouped(model.train(), **prompts([5, 5]), generation_config=settings(max_new_tokens=2))


# In the trainer.


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("overrides", "used"),
    [
        ({}, True),
        ({"rollout_engine": "grouped", "loss_defaults": "trl", "scale_rewards": "group"}, True),
        ({"rollout_engine": "generate"}, False),
        ({"loss_defaults": "trl"}, False),
        ({"gradient_checkpointing": True}, True),
    ],
)
def test_the_trainer_takes_the_engine_that_is_set(overrides, used, model_path, tmp_path, monkeypatch):
    calls, decode = itertools.count(), decoding._Batch.completed
    monkeypatch.setattr(decoding._Batch, "completed", lambda self: (next(calls), decode(self))[1])
    trainer = build(model_path, tmp_path, **overrides)
    trainer.train()
    assert next(calls) == (2 if used else 0)


@pytest.mark.parametrize("sharding", ["is_deepspeed_zero3_enabled", "is_fsdp_managed_module"])
def test_sharded_weights_are_left_to_generate(sharding, monkeypatch):
    """Their forwards are collective: all processes must make as many, which `generate` sees to. The loss does so."""
    monkeypatch.setattr(f"grpo_ext.packing.obstacles.{sharding}", lambda *_: True)
    assert "sharded" in next(obstacles(tiny.model(), Forward.ROLLOUT))
    assert next(obstacles(tiny.model()), None) is None


@pytest.mark.parametrize(
    ("fsdp", "setting", "reason"),
    [
        (True, {}, "sharded"),
        (False, {"torch_compile": True}, "compiles"),
        (False, {"parallelism_config": SimpleNamespace(cp_enabled=True, sp_enabled=False)}, "spread over processes"),
    ],
)
def test_a_run_that_shards_or_compiles_is_left_to_generate(fsdp, setting, reason):
    args = {"rollout_engine_resolved": "grouped"}
    args |= {"torch_compile": False, "parallelism_config": None, "loss_defaults": "trl", "replay_routes": False}
    with pytest.raises(Unsupported, match=reason):
        grouped_engine(SimpleNamespace(**args | setting), sharded=fsdp)
    args["rollout_engine_resolved"] = "auto"
    assert reason in grouped_engine(SimpleNamespace(**args | setting), sharded=fsdp).refusal


def test_a_required_engine_that_cannot_be_used_raises(model_path, tmp_path):
    trainer = build(
        model_path, tmp_path, rollout_engine="grouped", loss_defaults="trl", generation_kwargs={"num_beams": 2}
    )
    with pytest.raises(Unsupported, match=r"rollout_engine='grouped'.*beam.*Set rollout_engine: auto"):
        trainer.train()


# Random numbers by row.


@pytest.mark.parametrize(("number", "token"), [(0.0, 0), (0.1, 0), (0.25, 2), (0.6, 2), (0.75, 3), (1 - 2**-53, 3)])
def test_a_number_selects_the_token_whose_share_contains_it(number, token):
    probabilities = torch.tensor([[0.25, 0.0, 0.5, 0.25, 0.0]])
    assert decoding.picked(probabilities, torch.tensor([number], dtype=torch.float64)).item() == token


@pytest.mark.parametrize("size", [decoding.BLOCK - 1, decoding.BLOCK, 3 * decoding.BLOCK + 5])
def test_every_token_of_a_vocabulary_is_selected_by_the_middle_of_its_share(size):
    torch.manual_seed(0)
    shares = torch.rand(size, dtype=torch.float64).masked_fill_(torch.rand(size) < 0.3, 0.0)
    shares[: decoding.BLOCK // 2] = 0.0
    tokens = shares.nonzero()[:, 0]
    middles = ((shares.cumsum(0) - shares / 2) / shares.sum())[tokens]
    found = decoding.picked(shares.expand(len(tokens), -1), middles)
    assert torch.equal(found[:, 0], tokens)
    ends = decoding.picked(shares.expand(2, -1), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert ends[:, 0].tolist() == [tokens[0], tokens[-1]]


def test_a_rows_tokens_do_not_depend_on_the_other_rows():
    model, engine = tiny.model(dtype=torch.float64).eval(), GroupedEngine(required=True)
    inputs, config = prompts([5, 5, 3, 7, 5]), settings(do_sample=True, max_new_tokens=12)
    uniforms = torch.rand(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def sampled(rows):
        given = {name: part[rows] for name, part in inputs.items()}
        with torch.no_grad():
            ids, _ = engine.generate(model, uniforms[rows], **given, generation_config=config)
        return [row[7:].tolist() for row in ids]

    together = sampled([0, 1, 2, 3, 4])
    assert together[0] != together[1]
    for row in range(5):
        alone = sampled([row])[0]
        assert together[row][: len(alone)] == alone
        assert set(together[row][len(alone) :]) <= {0}


@pytest.mark.parametrize("engine", ["auto", "generate"])
def test_options_of_the_models_generation_config_do_not_change_what_is_drawn(engine, tmp_path):
    own, ends = {"min_p": 0.5, "no_repeat_ngram_size": 1, "suppress_tokens": [4, 5], "typical_p": 0.5}, []
    for options in ({}, own):
        model = tiny.model()
        model.generation_config.update(**options)
        trainer = build(model, tmp_path, rollout_engine=engine, max_steps=1)
        trainer.train()
        assert all(getattr(model.generation_config, name) == value for name, value in options.items())
        ends.append(weights(trainer.model))
    assert ends[0].equal(ends[1])


# One cast of the weights for a generation in mixed precision.


class Casts(TorchDispatchMode):
    """Counts copies of weights to half precision."""

    def __init__(self, model):
        super().__init__()
        self.shapes, self.count = {parameter.shape for parameter in model.parameters() if parameter.dim() > 1}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        cast = function is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.bfloat16
        self.count += bool(cast and args[0].shape in self.shapes and args[0].dtype == torch.float32)
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["grouped", "generate"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "adapter"])
def test_weights_are_cast_once_for_a_generation_to_the_same_bits(engine, kind, tmp_path, monkeypatch):
    model = tiny.model(dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    peft = LoraConfig(target_modules=["q_proj"], init_lora_weights=False) if kind == "adapter" else None
    trainer = build(model, tmp_path, bf16=True, rollout_engine=engine, peft_config=peft, max_steps=1)
    trainer.train()
    sampler, contexts = trainer.collector.policy, [[5, 6, 7], [5, 6, 7], [8, 9]]

    def sampled(seed):
        torch.manual_seed(seed)
        with Casts(trainer.model) as casts:
            return [(row.ids, row.logps) for row in sampler.sample(contexts, [8] * 3)], casts.count

    once = [sampled(seed) for seed in range(20)]
    monkeypatch.setattr(transformers_engine, "samples_mixed", lambda *_: False)
    if peft is not None:  # accelerate wraps PEFT's forward only
        base = trainer.model.get_base_model()
        monkeypatch.setattr(base, "forward", torch.autocast("cpu", torch.bfloat16)(base.forward))
    every_token = [sampled(seed) for seed in range(20)]
    assert [made for made, _ in once] == [made for made, _ in every_token]
    weights = sum(p.dim() > 1 for name, p in trainer.model.named_parameters() if "embed" not in name)
    if kind != "bfloat16":
        assert {count for _, count in once} == {weights}
        assert min(count for _, count in every_token) >= 2 * weights


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("defaults", ["paper", "trl"])
def test_frozen_weights_seem_to_want_a_gradient_while_they_sample(defaults, bf16, tmp_path):
    """By frozen 16-bit weights torch multiplies the last states of each row with a copy of the LM head for each."""
    peft = LoraConfig(target_modules=["q_proj"])
    settings = {"bf16": bf16, "loss_defaults": defaults, "max_steps": 1}
    trainer = build(tiny.model(dtype=torch.bfloat16), tmp_path, peft_config=peft, **settings)
    head, seen = trainer.model.get_base_model().lm_head, []
    with head.register_forward_hook(lambda *_: seen.append(head.weight.requires_grad)):
        trainer.collector.policy.sample([[5, 6, 7]], [8])
    assert set(seen) == {defaults == "paper"}
    assert not head.weight.requires_grad


def test_an_error_of_a_generation_leaves_checkpointing_on(tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise MemoryError

    trainer = build(tiny.model(), tmp_path, gradient_checkpointing=True)
    trainer.model.gradient_checkpointing_enable()
    monkeypatch.setattr(GroupedEngine, "generate", fails)
    with pytest.raises(MemoryError):
        transformers_sampler(trainer, trainer.args).sample([[5, 6]], [4])
    assert trainer.model.is_gradient_checkpointing


@torch.no_grad()
def test_a_row_that_has_ended_takes_no_further_positions():
    """One row of 16 fills a model's positions at its own limit and stays in the batch, which goes on."""
    sizes = {"vocab_size": 41, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    contexts, limits = [[5] * 28, *[[5, 6, 7]] * 15], [4] + [29] * 15
    ids, mask = padded(contexts, 0, None)
    config = settings(do_sample=True, max_new_tokens=29, suppress_tokens=[1])
    method = partial(decode, uniforms=torch.rand(16, 29), limits=torch.tensor(limits))
    found = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, custom_generate=method)
    assert found.shape == (16, 28 + 29)


def test_a_row_beyond_a_table_of_positions_is_named_with_its_length(tmp_path):
    sizes = {"vocab_size": 41, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16, "bos_token_id": None}
    trainer = build(GPT2LMHeadModel(GPT2Config(**sizes)), tmp_path)
    with pytest.raises(ConfigError, match=r"table ends at position 16, and a prompt has 14 tokens\. Set it lower"):
        transformers_sampler(trainer, trainer.args).sample([[5] * 14] * 4, [8] * 4)
