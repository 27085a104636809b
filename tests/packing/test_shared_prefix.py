"""Shared prompts: values and gradients are the plain forward's, on every architecture, and nothing is left behind."""

import dataclasses
import itertools
import types
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.nn.functional import rms_norm
from trl.trainer.utils import add_fused_lm_head

from grpo_ext import GRPOExtConfig
from grpo_ext.errors import ConfigError
from grpo_ext.objective.losses import losses
from grpo_ext.packing import lm_head, scorer
from grpo_ext.packing import micro_batches as batching
from grpo_ext.packing.forward import log_probs
from grpo_ext.packing.kernels import Segments
from grpo_ext.packing.layout import pack
from grpo_ext.packing.lm_head import LabelledLogProbs
from grpo_ext.packing.merged import calls_of
from grpo_ext.packing.obstacles import name_body, obstacles
from grpo_ext.packing.policy import PrefixSharing, Size
from support import architectures, image_text, tiny
from support.float64 import FLOAT64, float64_in, float64_throughout
from support.trainers import build, scripted_rollout, weights

TEMPERATURE = 0.7
COMPLETION = 7
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
ARCHITECTURES = {
    "llama": (transformers.LlamaConfig, {}),
    "llama-tied-mha": (transformers.LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2": (transformers.Qwen2Config, {"num_key_value_heads": 1}),
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": True}),
    "qwen3-moe": (transformers.Qwen3MoeConfig, MOE),
    "gemma": (transformers.GemmaConfig, {"tie_word_embeddings": True}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "mistral-window": (transformers.MistralConfig, {"sliding_window": 6}),
    "qwen2-window": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "gemma2-sdpa": (transformers.Gemma2Config, WINDOWS | {"attn_logit_softcapping": 2.0}),
    "gemma2-capped": (
        transformers.Gemma2Config,
        WINDOWS | {"attn_implementation": "eager", "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (transformers.Gemma3TextConfig, WINDOWS),
    "gpt-oss": (transformers.GptOssConfig, WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi": (transformers.PhiConfig, {"num_key_value_heads": 4}),
    "phi3": (transformers.Phi3Config, {}),
}


def network(name: str, dtype=torch.float32, **overrides):
    torch.manual_seed(0)
    config_cls, settings = ARCHITECTURES[name]
    extra = {"experts_implementation": "eager"} if name in ("qwen3-moe", "gpt-oss") else {}
    model = transformers.AutoModelForCausalLM.from_config(config_cls(**(SIZES | settings | overrides)), **extra)
    model = model.to(dtype)
    if dtype == torch.float64:
        for module in model.modules():
            if "RMSNorm" in type(module).__name__:
                module.forward = types.MethodType(_double_norm, module)
    add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    return model


def _double_norm(self, x):
    """transformers rounds its norms to float32, whatever the model's dtype."""
    weight = 1 + self.weight if "Gemma" in type(self).__name__ else self.weight
    eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
    return rms_norm(x, x.shape[-1:], weight, eps)


GROUPS = [(9, [7, 3, 5, 5]), (4, [2, 0, 6]), (1, [3, 3]), (6, [4])]
"""Prompts of 9, 4, 1, 6 tokens; completions of these lengths, one with none at all."""


def padded_batch():
    """Rows in no order, padded on both sides."""
    g = torch.Generator().manual_seed(0)
    width, ids, mask = max(p for p, _ in GROUPS), [], []
    for prompt_length, lengths in GROUPS:
        prompt = torch.randint(3, 50, (width,), generator=g)
        for n in lengths:
            ids.append(torch.cat([prompt, torch.randint(3, 50, (COMPLETION,), generator=g)]))
            row = [0] * (width - prompt_length) + [1] * (prompt_length + n) + [0] * (COMPLETION - n)
            mask.append(torch.tensor(row))
    order = torch.randperm(len(ids), generator=g)
    return (torch.stack(ids) * torch.stack(mask))[order], torch.stack(mask)[order]


IDS, MASK = padded_batch()


def plain(model):
    """Log-probabilities and entropies of the completions from the padded batch's logits."""
    logits = model(input_ids=IDS, attention_mask=MASK).logits[:, -COMPLETION - 1 : -1]
    log_p = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    active = MASK[:, -COMPLETION:].bool()
    logps = log_p.gather(-1, IDS[:, -COMPLETION:, None])[..., 0]
    return logps * active, -(log_p.exp() * log_p).sum(-1) * active


def packed(model, base=None, **options):
    layout = pack(IDS.numpy(), MASK.numpy(), COMPLETION, whole=bool(options))
    return log_probs(model, base or model, IDS, layout, COMPLETION, **options)


def gradients(model, logps, entropies):
    g = torch.Generator().manual_seed(1)
    factors = torch.randn(2, *logps.shape, generator=g, dtype=torch.float64).to(logps.dtype)
    model.zero_grad()
    (factors[0] * logps + factors[1] * entropies).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model, run, tolerance, gradient_tolerance=None):
    gradient_tolerance = gradient_tolerance or tolerance
    expected, found = plain(model), run()[:2]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < tolerance
    expected, found = gradients(model, *expected), gradients(model, *found)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() < gradient_tolerance * max(1.0, value.abs().max()), name


PRECISE = {"f64": (torch.float64, 1e-10), "f32": (torch.float32, 1e-4)}
NAN = [
    ("f64", "gemma2-capped"),
    *([] if transformers.Gemma2PreTrainedModel._supports_sdpa else [("f64", "gemma2-sdpa")]),
]
"""Where transformers' eager attention, whose softmax is in float32, gives NaN for padding; Gemma 2 may lack sdpa."""


CHECKPOINTED = "f64"
"""Where a recomputed forward that is another one cannot hide in rounding."""


@pytest.mark.parametrize(
    ("precision", "name", "checkpointing"),
    [
        (*case, checkpointing)
        for case in itertools.product(PRECISE, ARCHITECTURES)
        for checkpointing in (False, True)[: 1 + (case[0] == CHECKPOINTED)]
        if case not in NAN
    ],
)
def test_values_and_gradients_are_the_plain_forwards(name, precision, checkpointing):
    dtype, tolerance = PRECISE[precision]
    model = network(name, dtype)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # transformers' router computes in float32, whatever the model's dtype
    before = model.config._attn_implementation
    assert_same(model, lambda: packed(model), tolerance, 1e-6 if name == "qwen3-moe" and tolerance < 1e-6 else None)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_lora_and_reentrant_checkpointing(name):
    model = network(name, torch.float64)
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    wrapped = get_peft_model(model, adapter)
    wrapped.train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    wrapped.enable_input_require_grads()
    assert_same(wrapped, lambda: packed(wrapped, model), 1e-10)


def test_the_auxiliary_loss_counts_every_row():
    """A prompt of four completions weighs four times, as where it is computed four times."""
    model = network("qwen3-moe")
    labels = IDS.masked_fill(MASK == 0, -100)
    stock = model(IDS, attention_mask=MASK, labels=labels, fused_lm_head=True, output_router_logits=True).aux_loss
    ours = packed(model, output_router_logits=True)[2]
    assert ours.item() == pytest.approx(stock.item(), rel=1e-6)
    found = [torch.autograd.grad(loss, model.model.layers[0].mlp.gate.weight)[0] for loss in (stock, ours)]
    assert (found[0] - found[1]).abs().max() < 1e-6


def test_only_distinct_tokens_are_computed():
    layout = pack(IDS.numpy(), MASK.numpy(), COMPLETION)
    expected = sum((p - 1 + sum(n)) if len(n) > 1 else p - 1 + n[0] for p, n in GROUPS)
    assert layout.tokens == expected < MASK.sum()
    assert len(layout.scored) == MASK[:, -COMPLETION:].sum()
    covered = [t for run in layout.segments.runs for t in range(run.start, run.stop)]
    assert covered == list(range(layout.tokens))


@pytest.mark.parametrize("change", ["hole", "hole in a prompt", "right-padded prompt", "no labels"])
def test_masks_that_cannot_be_packed_have_no_layout(change):
    mask = MASK.clone()
    if change == "hole":
        mask[0, -COMPLETION:] = torch.tensor([1, 0, 1, 1, 0, 0, 0])
    elif change == "hole in a prompt":
        mask[MASK[:, 0].argmax(), 3] = 0
    elif change == "right-padded prompt":
        mask[0, -COMPLETION - 1] = 0
    else:
        mask[:, -COMPLETION:] = 0
    assert pack(IDS.numpy(), mask.numpy(), COMPLETION) is None


@pytest.mark.parametrize("chunk", [2**28, 240], ids=["kept", "computed again"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_head_over_labelled_positions(softcap, chunk, monkeypatch):
    monkeypatch.setattr("grpo_ext.packing.lm_head.CHUNK_BYTES", chunk)
    monkeypatch.setattr("grpo_ext.packing.lm_head.CPU_BLOCK", 25)  # two rows
    x, w, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((7, 5), (11, 5), (11,)))
    labels = torch.arange(7)

    def direct(x, w, b):
        logits = (x @ w.T + b) * 0.5
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        log_p = torch.log_softmax(logits / 0.9, dim=-1)
        return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def ours(x, w, b):
        return LabelledLogProbs.apply(x, w, b, labels, 0.9, 0, softcap, 0.5, ("log_probs", "entropy"))[:2]

    for a, e in zip(ours(x, w, b), direct(x, w, b), strict=True):
        assert torch.allclose(a, e, atol=1e-12)
    assert torch.autograd.gradcheck(ours, (x, w, b), check_undefined_grad=False)


@pytest.mark.parametrize("chunk", [2**28, 60], ids=["one chunk", "chunks"])
def test_a_weight_gradient_in_16_bits_is_added_in_blocks(chunk, monkeypatch):
    """Blocks of two rows of 11, the last of one; each chunk's product has the bits of the whole one."""
    monkeypatch.setattr(lm_head, "CHUNK_BYTES", chunk)
    x, weight, labels = torch.randn(7, 5), torch.randn(11, 5), torch.arange(7)

    def gradient(numbers: int) -> torch.Tensor:
        monkeypatch.setattr(lm_head, "PRODUCT", numbers)
        w = weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            LabelledLogProbs.apply(x, w, None, labels, 1.0, 0)[0].sum().backward()
        assert w.grad is not None
        return w.grad

    whole = gradient(10**6)
    assert whole.dtype == torch.float32
    assert torch.equal(gradient(10), whole)
    exact = weight.clone().requires_grad_()
    (x @ exact.T).log_softmax(-1).gather(1, labels[:, None]).sum().backward()
    torch.testing.assert_close(whole, exact.grad, atol=0.05, rtol=0.02)


def test_a_failing_forward_leaves_no_hook_and_no_attention_behind():
    model = network("llama")
    hooks = len(model.model._forward_hooks)
    layout = pack(IDS.numpy(), MASK.numpy(), COMPLETION)
    model.lm_head.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(TypeError):
        log_probs(model, model, IDS, layout, COMPLETION, no_such_argument=object(), input_ids=None)
    model.model.layers[1].mlp.forward = None
    with pytest.raises(TypeError):
        packed(model)
    assert model.config._attn_implementation == "sdpa"
    assert len(model.model._forward_hooks) == hooks


# Where it is used.


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
OBSTACLES = {
    "layers of window_attention": ("llama", {"layer_types": ["full_attention", "window_attention"]}),
    "dynamic rotary": ("llama", {"rope_parameters": DYNAMIC}),
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_obstacles_are_named(reason):
    name, settings = OBSTACLES[reason]
    model = network(name, **settings)
    assert any(reason in obstacle for obstacle in obstacles(model))
    assert not PrefixSharing("auto", model).possible
    assert reason in PrefixSharing("auto", model).describe()


def test_obstacles_of_attention_and_adapters_are_named():
    model = network("llama")
    model.config._attn_implementation_internal = "someones_own"
    assert "someones_own" in next(obstacles(model))
    virtual = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    assert "before the prompt" in next(obstacles(get_peft_model(network("llama"), virtual)))
    invoked = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5])
    assert "a token of each completion" in next(obstacles(get_peft_model(network("llama"), invoked)))


@pytest.mark.parametrize(
    "adapter",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
    ],
    ids=["embedding", "tokens"],
)
@pytest.mark.parametrize("setting", ["true", "false"])
def test_adapters_of_the_embedding(adapter, setting, model_path, tmp_path):
    trainer = build(model_path, tmp_path, peft_config=LoraConfig(r=2, **adapter), shared_prefix=setting, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1


def test_shared_prefix_true_is_refused_where_it_is_not_exact(tmp_path):
    model = network("llama", rope_parameters=DYNAMIC, vocab_size=len(tiny.WORDS))
    with pytest.raises(ConfigError, match="dynamic rotary"):
        build(model, tmp_path, shared_prefix="true")
    assert not build(model, tmp_path).sharing.possible


@pytest.mark.parametrize(
    ("value", "setting"), [(True, "true"), (False, "false"), ("auto", "auto"), ("false", "false")]
)
def test_shared_prefix_takes_yaml_booleans(value, setting, tmp_path):
    assert GRPOExtConfig(str(tmp_path), bf16=False, use_cpu=True, shared_prefix=value).prefix_setting == setting


def test_auto_packs_only_where_it_saves_time():
    sharing = PrefixSharing("auto", network("llama"))
    assert sharing.layout(IDS, MASK, COMPLETION, False) is None
    assert PrefixSharing("true", network("llama")).layout(IDS, MASK, COMPLETION, False) is not None
    wide = network("llama", hidden_size=512, intermediate_size=1024, head_dim=128)
    ids = torch.cat([torch.ones(8, 64), torch.randint(3, 50, (8, 32))], dim=1).long()
    layout = PrefixSharing("auto", wide).layout(ids, torch.ones_like(ids), 32, False)
    assert layout.tokens == 63 + 8 * 32
    alone = torch.cat([torch.arange(8 * 64).view(8, 64) % 47, ids[:, 64:]], dim=1)
    pairs = [PrefixSharing("auto", wide).layout(x[:2], torch.ones_like(x[:2]), 32, False) for x in (ids, alone)]
    assert [pair is None for pair in pairs] == [False, True]


@pytest.mark.parametrize("factor", [0.999, 1.001])
def test_a_micro_batch_has_one_layout_with_a_gradient_and_without(factor, monkeypatch):
    """Old log-probabilities are those of the layout that the loss computes, also where packing hardly pays."""
    sharing = PrefixSharing("auto", network("llama"))
    gain = sharing.size.gain(pack(IDS.numpy(), MASK.numpy(), COMPLETION), "cpu")
    monkeypatch.setattr("grpo_ext.packing.policy.MARGIN", factor * gain)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert (sharing.layout(IDS, MASK, COMPLETION, False) is None) == (factor > 1)


@pytest.mark.parametrize("seed", range(60))
def test_the_bounds_of_a_gain_are_upper_bounds(seed):
    draw = np.random.default_rng(seed)
    rows, prompt, completion = draw.integers(1, 9), draw.integers(1, 12), draw.integers(1, 8)
    kinds, lengths = draw.integers(0, draw.integers(1, 5), rows), draw.integers(0, completion + 1, rows)
    lengths[0] = 1
    columns = np.arange(prompt + completion)
    starts = draw.integers(0, prompt, 5)[kinds]
    active = (columns >= starts[:, None]) & (columns < prompt + lengths[:, None])
    ids = np.where(columns < prompt, kinds[:, None], draw.integers(5, 50, active.shape))
    layout, size = pack(ids, active, completion), Size.of(network("llama"))
    gain = size.gain(layout, "cpu")
    assert gain <= size.most_of(active, completion, "cpu") <= size.most(active.shape, "cpu")


def test_a_model_that_mixes_tokens_outside_attention_is_not_packed(tmp_path, caplog):
    """Without a name in any list: the first forward is compared with the plain one."""
    model = network("llama", vocab_size=len(tiny.WORDS))
    layer = model.model.layers[0]
    layer.mlp.register_forward_hook(lambda module, args, output: output + output.roll(1, dims=1))
    for setting in ("true", "auto"):
        trainer = build(model, tmp_path, shared_prefix=setting, max_steps=1)
        trainer._scorer.compared = True  # it mixes tokens with padding too, which is refused before
        with pytest.raises(ConfigError, match="off the plain forward") if setting == "true" else nullcontext():
            trainer.train()
    assert not trainer.sharing.possible
    assert "off the plain forward" in caplog.text


PRECISIONS = {"f32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.float32}
TRAINED = {"random": 0.3, "hardly begun": 0.02}
"""Standard deviation of the weights: sharp predictions, as trained ones are, and those of an untrained model."""


def without(layout, begin, end):
    """Every completion sees its prompt but for tokens at its begin or its end."""
    runs = [
        dataclasses.replace(run, prefix=run.prefix and (run.prefix[0] + begin, run.prefix[1] - end))
        for run in layout.segments.runs
    ]
    return dataclasses.replace(layout, segments=Segments(tuple(runs)))


def one_further(model):
    """Completions stand one position further behind their prompts."""

    def forward(position_ids, **kwargs):
        return model(position_ids=position_ids + (position_ids >= 5), **kwargs)

    return forward


def token_shift(model):
    """Every token sees the one before it in the packed row, by other means than attention."""
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output + output.roll(1, dims=1))
    return model


FAULTS = {
    "none": (lambda model: model, lambda layout: layout),
    "the last token of a prompt unseen": (lambda model: model, lambda layout: without(layout, 0, 1)),
    "the first token of a prompt unseen": (lambda model: model, lambda layout: without(layout, 1, 0)),
    "positions off by one": (one_further, lambda layout: layout),
    "tokens that see their neighbours": (token_shift, lambda layout: layout),
}
BELOW_ROUNDING = {
    ("bf16", "hardly begun", "positions off by one"),  # 2e-4 nats
    ("autocast", "hardly begun", "positions off by one"),
    ("bf16", "hardly begun", "tokens that see their neighbours"),
    ("autocast", "hardly begun", "tokens that see their neighbours"),  # seen with AVX-512 and without, not with AVX2
}


@pytest.mark.parametrize(
    ("precision", "weights", "fault"),
    [case for case in itertools.product(PRECISIONS, TRAINED, FAULTS) if case not in BELOW_ROUNDING],
)
def test_the_check_tells_a_wrong_packing_from_rounding(precision, weights, fault):
    change_model, change_layout = FAULTS[fault]
    model = network("llama", PRECISIONS[precision], initializer_range=TRAINED[weights], num_hidden_layers=4)
    sharing, changed = PrefixSharing("auto", model), change_model(model)

    def plain_forward(ids, mask, completion):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            labels = torch.cat([torch.full_like(ids[:, completion:], -100), ids[:, completion:]], dim=1)
            outputs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        return outputs.log_probs[:, -completion:], None, None

    def packed_forward(ids, layout, completion):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            return log_probs(changed, model, ids, change_layout(layout), completion)

    sharing.check(plain_forward, packed_forward, model, IDS.device)
    assert sharing.possible == (fault == "none"), sharing.reason


@pytest.mark.parametrize("name", ["mistral-window", "gemma3"])
@pytest.mark.parametrize("off", [0, 1, -1])
def test_the_check_exceeds_windows_longer_than_its_rows(name, off, monkeypatch):
    model = network(name, sliding_window=4096)
    monkeypatch.setattr("grpo_ext.packing.attention.calls_of", lambda s, window: calls_of(s, window and window + off))

    def plain_forward(ids, mask, completion):
        labels = torch.cat([torch.full_like(ids[:, completion:], -100), ids[:, completion:]], dim=1)
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        return outputs.log_probs[:, -completion:], None, None

    sharing = PrefixSharing("auto", model)
    sharing.check(plain_forward, lambda *batch: log_probs(model, model, *batch), model, IDS.device)
    assert sharing.possible == (off == 0)
    assert model.config.sliding_window == model.model.layers[0].self_attn.config.sliding_window == 4096


def test_an_attention_that_asks_for_a_mask_is_not_packed(tmp_path):
    model = network("llama", vocab_size=len(tiny.WORDS))

    def masked(module, args, kwargs):
        return args, kwargs | {"attention_mask": torch.zeros(1)} if kwargs["attention_mask"] is None else kwargs

    trainer = build(model, tmp_path, max_steps=1)
    handle = model.model.layers[1].self_attn.register_forward_pre_hook(masked, with_kwargs=True)
    ids = torch.ones(2, 8, dtype=torch.long)

    def plain(ids, mask, completion):
        return torch.zeros(len(ids), completion), None, None

    def forward(ids, layout, completion):
        return log_probs(model, model, ids, layout, completion)

    trainer.sharing.check(plain, forward, model, ids.device)
    handle.remove()
    assert "asks for a mask" in trainer.sharing.describe()


# Batching.


def micro_batches(count=4, size=4, groups=4, seed=0):
    """Rows of groups of 4, shuffled, in micro-batches; every row knows its number."""
    g = torch.Generator().manual_seed(seed)
    rows = count * size
    order = torch.randperm(rows, generator=g)
    group = torch.arange(rows) // (rows // groups)
    prompt = 3 + group[:, None].expand(-1, 6)
    prompt_mask = (torch.arange(6) >= (group % 3)[:, None]).long()
    lengths = torch.randint(1, 12, (rows,), generator=g)
    whole = {
        "prompt_ids": prompt * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.arange(rows)[:, None].expand(-1, 12),
        "completion_mask": (torch.arange(12) < lengths[:, None]).long(),
        "advantages": torch.arange(rows).float(),
        "old_per_token_logps": torch.arange(rows)[:, None].expand(-1, 12).float(),
    }
    shuffled = {k: v[order] for k, v in whole.items()} | {"num_items_in_batch": lengths.sum(), "names": None}
    return [
        {k: v[i * size : (i + 1) * size] if torch.is_tensor(v) and v.ndim else v for k, v in shuffled.items()}
        for i in range(count)
    ]


@pytest.mark.parametrize(("count", "size", "groups"), [(4, 4, 4), (2, 8, 4), (8, 2, 4), (4, 6, 4), (1, 12, 3)])
def test_regrouping_keeps_rows_and_groups_together(count, size, groups):
    before = micro_batches(count, size, groups)
    after = batching.regroup(before, count)
    rows = torch.cat([b["advantages"] for b in after]).long()
    assert sorted(rows.tolist()) == list(range(count * size))
    assert [len(b["advantages"]) for b in after] == [size] * count
    for batch in after:
        number = batch["advantages"].long()
        assert (batch["completion_ids"] == number[:, None]).all()
        assert (batch["old_per_token_logps"] == number[:, None]).all()
        assert batch["completion_mask"].any(dim=0).all()
        assert batch["prompt_mask"].any(dim=0).all()
        assert batch["num_items_in_batch"].ndim == 0
    scattered = sum(len(set((b["advantages"] // (count * size // groups)).tolist())) for b in before)
    together = sum(len(set((b["advantages"] // (count * size // groups)).tolist())) for b in after)
    assert together <= scattered
    if size % (count * size // groups) == 0:
        assert together == groups


def test_regrouping_keeps_the_rows_of_an_optimizer_step_and_their_tokens():
    before = micro_batches(4, 4, 4)
    after = batching.regroup(before, 2)
    for step in (slice(0, 2), slice(2, 4)):
        rows = [sorted(torch.cat([b["advantages"] for b in side[step]]).tolist()) for side in (before, after)]
        tokens = [sum(int(b["completion_mask"].sum()) for b in side[step]) for side in (before, after)]
        assert rows[0] == rows[1]
        assert tokens[0] == tokens[1]


def test_regrouping_balances_tokens():
    spread = []
    for seed in range(5):
        sizes = [int(b["completion_mask"].sum()) for b in batching.regroup(micro_batches(8, 2, 4, seed=seed), 8)]
        spread.append(max(sizes) / (sum(sizes) / len(sizes)))
    assert np.mean(spread) < 1.5


def absolute(log_ratio, advantages):
    return -log_ratio * (1 + advantages.abs())


def half_silent(completions, **_):
    """Zero variance in every second group of four."""
    return [0.5 if (i // 4) % 2 else float(i % 4) for i in range(len(completions))]


def all_silent(completions, **_):
    return [1.0] * len(completions)


@float64_throughout()
def after(model, tmp_path, steps=1, rewards=(tiny.count_a, tiny.length), **settings):
    settings = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": steps, "seed": 3} | settings
    loading = FLOAT64 if isinstance(model, str) else {}
    trainer = build(model, tmp_path, rewards, rollout=scripted_rollout, **settings, **loading)
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_twenty_steps_end_at_the_same_weights(beta, model_path, tmp_path):
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "beta": beta}
    ends = {
        shared: weights(after(model_path, tmp_path, 20, shared_prefix=shared, **settings).model)
        for shared in ("true", "false")
    }
    assert (ends["true"] - weights(tiny.load(model_path))).abs().max() > 1e-2
    assert (ends["true"] - ends["false"]).abs().max() < 1e-9


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_a_model_that_also_takes_images_trains_on_text_as_without_sharing(name, tmp_path):
    settings = {"max_grad_norm": 0.1, "per_device_train_batch_size": 8}
    ends = []
    for shared in ("true", "false"):
        trainer = after(image_text.model(name), tmp_path, 2, shared_prefix=shared, **settings)
        assert trainer.sharing.possible == (shared == "true")
        assert ("rows with images are computed each by itself" in trainer.sharing.describe()) == (shared == "true")
        ends.append(weights(trainer.model))
    assert (ends[0] - weights(image_text.model(name))).abs().max() > 1e-4
    assert (ends[0] - ends[1]).abs().max() < 1e-9


def test_llama_4_trains_on_its_chunks_as_without_sharing(tmp_path):
    """Also where TRL's LM head does not find the body of the model by itself."""
    ends = []
    for shared in ("true", "false"):
        model = architectures.model("llama4_text")
        with float64_in(model):
            settings = {"shared_prefix": shared, "max_grad_norm": 0.1, "router_aux_loss_coef": 0.0}
            trainer = after(model, tmp_path, 2, **settings)
        assert trainer.sharing.possible == (shared == "true")
        ends.append(weights(trainer.model))
    assert (ends[0] - weights(architectures.model("llama4_text"))).abs().max() > 1e-4
    assert (ends[0] - ends[1]).abs().max() < 1e-9


def test_no_packed_row_is_so_long_that_llama_4_scales_its_queries_by_their_place_in_it():
    settings = architectures.config("llama4_text")
    settings.floor_scale = 24
    model = architectures.model("llama4_text", settings)
    name_body(model)
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    ids = torch.randint(3, 50, (4, 13), generator=torch.Generator().manual_seed(0))
    ids[:, :6] = ids[:1, :6]
    mask, sharing = torch.ones_like(ids), PrefixSharing("true", model)
    with torch.no_grad(), float64_in(model):
        plain = model(input_ids=ids).logits[:, 5:-1].log_softmax(-1).gather(-1, ids[:, 6:, None])[..., 0]
        long = log_probs(model, model, ids, pack(ids.numpy(), mask.numpy(), 7), 7)[0]
        short = log_probs(model, model, ids[:2], sharing.layout(ids[:2], mask[:2], 7, False), 7)[0]
    assert (long - plain).abs().max() > 1e-3
    assert (short - plain[:2]).abs().max() < 1e-10
    assert sharing.layout(ids, mask, 7, False) is None


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        (name, rows)
        for rows, names in {2: "grpo dr_grpo cispo topr", 8: "grpo dapo gspo vespo"}.items()
        for name in names.split()
    ],
)
def test_sharing_and_skipping_keep_the_gradient(name, rows, model_path, tmp_path):
    settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 8 // rows, "loss_type": name}
    ends = []
    for shared, skip in (("true", True), ("false", True), ("false", False)):
        trainer = after(
            model_path, tmp_path, 2, [half_silent], shared_prefix=shared, skip_zero_advantages=skip, **settings
        )
        ends.append(weights(trainer.model))
    assert (ends[2] - weights(tiny.load(model_path))).abs().max() > 1e-4
    for end in ends[:2]:
        assert (end - ends[2]).abs().max() < 1e-9


def test_skipped_rows_are_not_computed(model_path, tmp_path, monkeypatch):
    seen = []
    forward = scorer.of_active_rows

    def spy(run, inputs, active):
        return forward(lambda rows: (seen.append(len(rows["prompt_ids"])), run(rows))[1], inputs, active)

    monkeypatch.setattr(scorer, "of_active_rows", spy)
    trainer = after(model_path, tmp_path, 1, [half_silent])
    assert seen == [4]
    assert "entropy" in trainer.state.log_history[0]


def test_a_custom_surrogate_gets_every_row(model_path, tmp_path):
    trainer = after(model_path, tmp_path, 1, [half_silent], loss_type="test_shared_prefix:absolute")
    assert not trainer._skips


def test_skipping_rows_is_exact_with_absolute_positions(tmp_path):
    config = transformers.GPT2Config(vocab_size=len(tiny.WORDS), n_embd=16, n_layer=1, n_head=2, n_positions=64)
    torch.manual_seed(0)
    tiny_gpt = transformers.GPT2LMHeadModel(config)
    ends = []
    for skip in (True, False):
        model = transformers.GPT2LMHeadModel(config).double()
        model.load_state_dict(tiny_gpt.state_dict())
        ends.append(weights(after(model, tmp_path, 1, [half_silent], skip_zero_advantages=skip).model))
    assert (ends[0] - weights(tiny_gpt)).abs().max() > 1e-3
    assert (ends[0] - ends[1]).abs().max() < 1e-9


def test_a_step_without_any_gradient_stays_connected(model_path, tmp_path):
    trainer = after(model_path, tmp_path, 1, [all_silent])
    assert torch.equal(weights(trainer.model), weights(tiny.load(model_path)))
    inputs = trainer._buffered_inputs[0]
    assert trainer._active_rows(inputs, "train").sum() == 0
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in trainer.model.parameters())


@pytest.mark.parametrize("settings", [{"beta": 0.1}, {"entropy_coef": 0.01}, {"top_entropy_quantile": 0.5}])
def test_terms_that_need_every_row_disable_skipping(settings, model_path, tmp_path):
    trainer = after(model_path, tmp_path, 1, [half_silent], **settings)
    assert trainer._active_rows(trainer._buffered_inputs[0], "train") is None


def test_stock_defaults_keep_stock_batches(model_path, tmp_path):
    trainer = after(model_path, tmp_path, 1, loss_defaults="trl", shared_prefix="true")
    assert not trainer._regroups
    assert not trainer._skips


@pytest.mark.parametrize("name", [n for n in losses if losses[n].zero_without_advantage])
def test_a_zero_advantage_has_no_gradient(name):
    """What skipping relies on, of every surrogate that comes with the package."""
    from grpo_ext.objective.objective import TENSORS, bind

    tensors = {k: torch.randn(3, 4, requires_grad=True) for k in TENSORS}
    tensors |= {"advantages": torch.zeros(3, 1), "mask": torch.ones(3, 4)}
    row = losses[name]
    loss = bind(row.function, tensors)(**row.options)
    leaves = [tensors["log_ratio"], tensors["per_token_logps"]]
    for gradient in torch.autograd.grad(loss.sum(), leaves, allow_unused=True):
        assert gradient is None or not gradient.any()
