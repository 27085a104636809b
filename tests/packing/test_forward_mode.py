"""Scores equal the model's own forward of each row without padding, or the model is refused by name before step 1."""

import copy
import os
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from grpo_ext.errors import ConfigError
from grpo_ext.packing.dropout import switch_dropout_off
from grpo_ext.packing.forward_mode import ForwardMode, count_positions
from grpo_ext.packing.obstacles import name_body, takes_positions
from grpo_ext.packing.sampling_support import SamplingSupport, encoded
from grpo_ext.packing.scorer import Scorer
from support import architectures, image_text, tiny, trainers
from support.tuners import needs_virtual_tokens

TEMPERATURE = 0.7
POSITIONS, LOGITS, BOTH = ForwardMode(positions=True), ForwardMode(logits=True), ForwardMode(True, True)
WAYS = {
    POSITIONS: (
        "bert-generation biogpt ctrl gpt-sw3 gpt2 gpt_bigcode gpt_neo hunyuan_v1_dense hunyuan_v1_moe openai-gpt xglm "
        "xlm git hunyuan_vl"
    ),
    LOGITS: (
        "inkling_text modernbert-decoder aya_vision cohere2_vision inkling_mm_model kosmos-2.5 qwen2_5_omni_thinker "
        "qwen3_omni_moe_thinker"
    ),
    BOTH: (
        "bert big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm "
        "roc_bert xlm-roberta xlm-roberta-xl xmod"
    ),
    None: (
        "bart bigbird_pegasus blenderbot blenderbot-small cpmant deepseek_v4 doge marian mbart mvp pegasus plbart "
        "prophetnet recurrent_gemma roformer rwkv trocr whisper paligemma florence2 t5gemma2"
    ),
}
"""What is done for these, with transformers 5.17, None: refused. TRL's scores are those of the others."""
SINGLE = ("bloom", "mpt")
"""Those whose padding is NaN in float64."""
VIRTUAL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
ADAPTERS = {
    "prompt": PromptTuningConfig(**VIRTUAL),
    "p-tuning": PromptEncoderConfig(**VIRTUAL, encoder_hidden_size=16),
    "prefix": PrefixTuningConfig(**VIRTUAL),
}
LENGTHS = (9, 7), (4, 5), (6, 3), (1, 6)
"""Tokens of prompts and completions."""


def made(name, adapter=None, *, tied=None):
    """A tiny model that the trainer has prepared, and its base."""
    if name in architectures.CAUSAL and name not in architectures.NOT_BUILT:
        config = architectures.config(name)
        config.tie_word_embeddings = config.tie_word_embeddings if tied is None else tied
        base = architectures.model(name, config)
        base = base.float() if name in SINGLE else base
    else:
        base = image_text.model(name)
    switch_dropout_off(base)
    name_body(base)
    add_fused_lm_head(base, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    if adapter is None:
        return base, base
    model = get_peft_model(base, copy.deepcopy(adapter)).to(base.dtype).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5 * torch.randn_like(parameter))
    if takes_positions(base):
        count_positions(base)
    return model, base


def scorer():
    accelerator = Accelerator(cpu=True)
    stock = GRPOTrainer._get_per_token_logps_and_entropies.__get__(SimpleNamespace(accelerator=accelerator))
    sharing = SimpleNamespace(possible=False, agreed=None)
    return Scorer(stock, sharing, accelerator, torch.no_grad, temperature=TEMPERATURE)


def rows():
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randint(3, architectures.VOCABULARY, (n,), generator=generator).tolist() for n in sum(LENGTHS, ())]
    return draw[::2], draw[1::2]


def batch(prompts, completions):
    before, after = max(map(len, prompts)), max(map(len, completions))
    pairs = list(zip(prompts, completions, strict=True))
    ids = [[0] * (before - len(p)) + p + c + [0] * (after - len(c)) for p, c in pairs]
    mask = [[0] * (before - len(p)) + [1] * len(p + c) + [0] * (after - len(c)) for p, c in pairs]
    return torch.tensor(ids), torch.tensor(mask), after


@torch.no_grad()
def alone(model, base, prompt, completion):
    """Log-probabilities over the vocabulary, from the logits of the row by itself, as `generate` numbers it."""
    row = torch.tensor([prompt + completion])
    text = base.config.get_text_config(decoder=True) is base.config
    where = (
        {"position_ids": torch.arange(row.shape[1])[None]} if model is base and takes_positions(base) and text else {}
    )
    logits = model(input_ids=row, attention_mask=torch.ones_like(row), **where).logits[0]
    return (logits[-len(completion) - 1 : -1].double() / TEMPERATURE).log_softmax(-1)


def check(name, adapter=None, *, tied=None, exact=1e-4):
    """The way that is chosen, after its scores have been compared; None where the model is refused."""
    (model, base), one, (prompts, completions) = made(name, adapter, tied=tied), scorer(), rows()
    try:
        one.choose_forward_mode(model, prompts, completions, [], 0)
    except ConfigError:
        return None
    with torch.no_grad():
        logps, entropies, _ = one.stock(model, *batch(prompts, completions), compute_entropy=True)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        expected = alone(model, base, prompt, completion)
        chosen = expected[range(len(completion)), completion]
        assert (logps[i, : len(completion)] - chosen).abs().max() < exact
        assert (entropies[i, : len(completion)] + (expected.exp() * expected).sum(-1)).abs().max() < exact
    return one.way


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("llama", ForwardMode()), ("qwen3_moe", ForwardMode()), ("gpt2", POSITIONS), ("hunyuan_v1_dense", POSITIONS),
        ("modernbert-decoder", LOGITS), ("aya_vision", LOGITS), ("bert", BOTH), ("roberta", BOTH), ("bart", None),
        ("recurrent_gemma", None),
    ],
)  # fmt: skip
def test_scores_are_those_of_the_models_own_forward(name, way):
    assert check(name) == way


@needs_virtual_tokens
@pytest.mark.filterwarnings("ignore:Position ids are not supported")  # PEFT's, in `generate`
@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_tokens_before_the_prompt_move_no_positions_in_scores_nor_in_rollouts(name, kind):
    assert check(name, ADAPTERS[kind]) == ForwardMode()
    (model, base), prompts = made(name, ADAPTERS[kind]), rows()[0][:2]
    ids, mask, _ = batch(prompts, [[3]] * 2)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], do_sample=False, **options)
    for i, prompt in enumerate(prompts):
        sampled = torch.stack([logits[i] for logits in out.logits]).double()
        expected = alone(model, base, prompt, out.sequences[i, -4:].tolist())
        assert ((sampled / TEMPERATURE).log_softmax(-1) - expected).abs().max() < 1e-4


def test_own_logits_are_normalised_over_the_tokens_that_the_sampler_kept():
    (model, base), one, (prompts, completions) = made("modernbert-decoder"), scorer(), rows()
    one.choose_forward_mode(model, prompts, completions, [], 0)
    sets = [[sorted({token, 5, 11, 30}) for token in completion] for completion in completions]
    kept = [
        encoded(torch.tensor([*map(len, row)]), torch.tensor([token for choice in row for token in choice]))
        for row in sets
    ]
    columns = batch(prompts, completions)
    supports = SamplingSupport.of(kept, columns[2], columns[0].device)
    logps = one._plain(model, {}, *columns, support=supports)[0]
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        for j, log_p in enumerate(alone(model, base, prompt, completion)):
            expected = log_p[completion[j]] - log_p[sets[i][j]].logsumexp(0)
            assert logps[i, j].item() == pytest.approx(expected.item(), abs=1e-5)


def trained(name, folder, **settings):
    config = architectures.config(name)
    config.vocab_size = len(tiny.WORDS)
    return trainers.build(architectures.model(name, config).float(), folder, max_steps=1, **settings)


def test_a_run_says_how_it_scores_where_trl_would_score_otherwise(tmp_path, caplog):
    one = trained("gpt2", tmp_path, beta=0.1)
    one.train()
    assert one._scorer.way == POSITIONS
    assert "GPT2LMHeadModel: TRL's scores are" in caplog.text
    assert "positions by the attention mask" in caplog.text
    assert all(abs(row["kl"]) < 1e-6 for row in one.state.log_history if "kl" in row)  # the reference's likewise


def test_scores_by_own_logits_leave_the_reference_where_it_was(tmp_path):
    """The reference is compared before the way of scoring is chosen, and at the first checkpoint after it."""
    one = trained("inkling_text", tmp_path, beta=0.1, save_strategy="steps", save_steps=1)
    one.train()
    assert one._scorer.way == LOGITS


def test_a_model_whose_padding_changes_scores_is_refused_before_the_first_step(tmp_path):
    one = trained("rwkv", tmp_path)
    with pytest.raises(ConfigError, match=r"RwkvForCausalLM.*nats per token off the model's own forward"):
        one.train()
    assert one.state.global_step == 0


def test_the_comparison_is_made_once_with_few_forwards(tmp_path):
    one, passes = trained("llama", tmp_path), []
    one.model.base_model.register_forward_hook(lambda module, args, out: passes.append(out[0].shape[:2].numel()))
    prompts, completions = [[3] * 300] * 8, [[4] * 200] * 8
    one._scorer.choose_forward_mode(one.model, prompts, completions, [], 0)
    assert (len(passes), sum(passes)) == (5, 2 * (16 + 13) + 2 * 18)
    one._scorer.choose_forward_mode(one.model, prompts, completions, [], 0)
    assert len(passes) == 5


# All architectures.

NAMES = [
    *(name for name in architectures.CAUSAL if name not in architectures.NOT_BUILT),
    *(name for name in image_text.IMAGE_TEXT if name not in image_text.NOT_BUILT and name not in architectures.CAUSAL),
]
EVERY = 1 if os.environ.get("GRPO_EXT_WHOLE_CENSUS") else 5
"""Of this many pairs of architecture and adapter one is tried; with the variable set, all are (two minutes)."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.cases(110)
def test_every_architecture_is_scored_exactly_or_refused(name, tied):
    assert check(name, tied=tied) == next((way for way, names in WAYS.items() if name in names.split()), ForwardMode())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "kind"), list(product(NAMES, ADAPTERS))[::EVERY])
@pytest.mark.cases(33)
def test_every_architecture_with_an_adapter_of_tokens_is_scored_exactly_or_ends(name, kind):
    try:
        found = check(name, ADAPTERS[kind])
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        pytest.skip(f"PEFT or transformers end the run: {error}")
    assert found in (None, ForwardMode(), LOGITS)
