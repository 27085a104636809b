"""Every causal architecture of transformers shares prompts exactly, in loss and in rollouts, or is refused by name."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from trl.trainer.utils import add_fused_lm_head

from grpo_ext.objective.trajectory import paths
from grpo_ext.packing.attention import ForeignAttention
from grpo_ext.packing.dropout import switch_dropout_off
from grpo_ext.packing.forward import log_probs
from grpo_ext.packing.layout import pack
from grpo_ext.packing.obstacles import name_body, obstacles
from grpo_ext.packing.recurrent import is_recurrent
from grpo_ext.packing.tree import pack_tree
from grpo_ext.rollout.prompt_cache import Unsupported
from grpo_ext.rollout.transformers_engine import GroupedEngine
from support import architectures, image_text
from support.float64 import float64_in

BOTH = {
    "": (
        "afmoe apertus arcee aria_text axk1 bitnet cohere cohere2 cohere2_moe cohere_compass_text cwm dbrx "
        "deepseek_v2 deepseek_v3 diffllama dots1 emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma "
        "gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt_neox "
        "gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hy_v3 "
        "hyperclovax jais2 jetmoe laguna llama llama4 llama4_text longcat_flash mellum mimo_v2_flash minicpm3 "
        "minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral nanochat olmo olmo2 olmo3 olmoe "
        "persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2 vaultgemma "
        f"youtu {' '.join(architectures.RECURRENT)}"
    ),
    "the model carries a recurrent state": "deepseek_v4 recurrent_gemma rwkv",
    "the model has layers of deepseek_sparse_attention": "axk2 deepseek_v32 glm_moe_dsa hy_v4",
    "the model has layers of hybrid_sliding": "inkling_text",
    "the router is noisy in training": "phimoe",
}
"""What is said of these, in the loss and in rollouts, with transformers 5.17; nothing where a prompt is shared."""
LOSS = {
    "": "mamba2 mllama",
    "the model carries a recurrent state": (
        "falcon_mamba jamba kimi_linear mamba minimax qwen4_exp qwen4_exp_text zamba zaya"
    ),
    "does not take its attention from": (
        "bart big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom codegen cpmant falcon gpt_neo "
        "gpt_neox_japanese gptj marian mbart megatron-bert mpt mvp openai-gpt pegasus plbart prophetnet rembert "
        "roformer stablelm trocr whisper xglm xlm xlnet"
    ),
    "positions are not rotary": (
        "bert bert-generation camembert ctrl data2vec-text electra ernie gpt-sw3 gpt2 gpt_bigcode opt roberta "
        "roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl xmod"
    ),
    "asks for a mask": "doge",
    "asks for an attention other than softmax": "moshi nemotron",
    "computes more than its output embeddings": "modernbert-decoder",
    "normalised after their rotation": "hunyuan_v1_dense hunyuan_v1_moe",
}
"""The others, in the loss."""
ROLLOUTS = {
    "": (
        "bert bert-generation big_bird camembert codegen ctrl data2vec-text doge electra ernie falcon gpt-sw3 gpt2 "
        "gpt_bigcode gpt_neo gpt_neox_japanese gptj hunyuan_v1_dense hunyuan_v1_moe jamba kimi_linear megatron-bert "
        "modernbert-decoder moshi nemotron "
        "rembert roberta roberta-prelayernorm roc_bert stablelm xlm-roberta xlm-roberta-xl xmod zamba zaya"
    ),
    "the model does not take position_ids of shape [batch, time]": (
        "bigbird_pegasus bloom cpmant mvp prophetnet roformer trocr xlnet"
    ),
    "ForcedEOSTokenLogitsProcessor may depend on other rows": "bart blenderbot-small marian mbart pegasus plbart",
    "the model takes cache_params": "falcon_mamba mamba mamba2",
    "its cache is a NoneType": "minimax",
    "the model has layers of qwen_sparse_attention": "qwen4_exp qwen4_exp_text",
    "its forward draws random numbers": "biogpt opt xglm",
    "some of its layers have an empty cache": "mllama openai-gpt xlm",
    "EncoderNoRepeatNGramLogitsProcessor may depend on other rows": "blenderbot",
    "return_dict_in_generate, prefill_chunk_size or use_cache is set": "mpt",
    "SuppressTokensAtBeginLogitsProcessor may depend on other rows": "whisper",
}
"""The others, in rollouts of a model that is in training."""
SEEING_BOTH = {
    "": (
        "chameleon cosmos3_edge cosmos3_omni deepseek_ocr2 emu3 ernie4_5_vl_moe glm46v glm4v glm4v_moe glm_ocr glmga "
        "granite4_vision muse_glimmer paddleocr_vl qwen2_5_vl qwen2_vl qwen3_vl qwen3_vl_moe step3p7"
    ),
    "the model has an encoder": "florence2 t5gemma2",
    "positions are not rotary": "git kosmos-2.5",
}
"""What is said of models that also take images, on text, where it is not what is said of the model inside."""
SEEING_LOSS = SEEING_BOTH | {
    "": SEEING_BOTH[""] + " mistral4 mllama",
    "the model carries a recurrent state": "glm5_next",
    "TRL's LM head multiplies logits": "aya_vision cohere2_vision",
    "does not take its attention from": "evolla",
    "normalised after their rotation": "hunyuan_vl",
    "has no base model": "llama4 qwen2_5_omni_thinker qwen3_omni_moe_thinker",
    "attention looks ahead": "paligemma",
}
SEEING_ROLLOUTS = SEEING_BOTH | {
    "": SEEING_BOTH[""] + " hunyuan_vl mistral4",
    "the model has layers of deepseek_sparse_attention": "glm5_next",
    "return_dict_in_generate, prefill_chunk_size or use_cache is set": "evolla",
    "some of its layers have an empty cache": "mllama",
    "the model does not take position_ids of shape [batch, time]": "qwen2_5_omni_thinker qwen3_omni_moe_thinker",
}
TOLERANCE = 1e-4
"""Nats: norms and routers round to float32 in float64 models; a mask that is lost is off by tenths and more."""
IN_FLOAT64 = 1e-10
"""The same where nothing rounds to float32: in the loss, and in rollouts of recurrent layers, which amplify it."""
COMPLETION = 7

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


# In the loss.


def padded(groups: list[tuple[int, list[int]]]) -> tuple[Tensor, Tensor]:
    """Rows in no order, padded on both sides: prompts of these lengths, completions of those."""
    generator = torch.Generator().manual_seed(0)
    width, ids, masks = max(length for length, _ in groups), [], []
    for length, completions in groups:
        prompt = torch.randint(3, architectures.VOCABULARY, (width,), generator=generator)
        for n in completions:
            own = torch.randint(3, architectures.VOCABULARY, (COMPLETION,), generator=generator)
            ids.append(torch.cat([prompt, own]))
            masks.append(torch.tensor([0] * (width - length) + [1] * (length + n) + [0] * (COMPLETION - n)))
    order = torch.randperm(len(ids), generator=generator)
    mask = torch.stack(masks)[order]
    return torch.stack(ids)[order] * mask, mask


def alone(model: Any, ids: Tensor, mask: Tensor, parents: np.ndarray) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the completions, from a forward of each context by itself, without padding.

    `parents` [rows, completion] as in `packing.tree`.
    """
    start = ids.shape[1] - COMPLETION
    tokens = [[torch.zeros((), dtype=model.dtype)] * COMPLETION for _ in range(2 * len(ids))]
    for row, (own, active) in enumerate(zip(ids, mask.bool(), strict=True)):
        prompt = active[:start].nonzero()[:, 0].tolist()
        for kept, path in paths(parents[row, : int(active[start:].sum())].tolist(), len(prompt)):
            columns = [*prompt[:kept], *(start + i for i in path)]
            log_p = model(input_ids=own[columns][None]).logits[0].log_softmax(-1)
            for place, i in enumerate(path, kept):
                tokens[row][i] = log_p[place - 1, own[start + i]]
                tokens[len(ids) + row][i] = -(log_p[place - 1].exp() * log_p[place - 1]).sum()
    logps, entropies = torch.stack([torch.stack(row) for row in tokens]).chunk(2)
    return logps, entropies


def branching(ids: Tensor, mask: Tensor) -> np.ndarray:
    """Parents by which some tokens of the completions follow an earlier token than the one before, or the prompt's."""
    draw = np.random.default_rng(0)
    parents = np.tile(np.arange(COMPLETION) - 1, (len(ids), 1))
    for row, length in enumerate(mask[:, :-COMPLETION].sum(dim=1).tolist()):
        for i in np.flatnonzero(draw.random(COMPLETION) < 0.3):
            parents[row, i] = draw.integers(-min(3, length), i)
    return parents


def gradients(model: Any, logps: Tensor, entropies: Tensor) -> dict[str, Tensor]:
    factors = torch.randn(2, *logps.shape, generator=torch.Generator().manual_seed(1)).to(logps.dtype)
    model.zero_grad()
    (factors[0] * logps + factors[1] * entropies).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


GROUPS = [(9, [7, 3, 5, 5]), (4, [2, 0, 6]), (1, [3, 3]), (6, [4])], [(40, [7, 7, 4]), (12, [7, 5])]
"""Lengths of prompts and of their completions."""


def in_the_loss(
    model: Any, tolerance: float = TOLERANCE, batches: Sequence[list[tuple[int, list[int]]]] = GROUPS
) -> str:
    """Why prompts are not shared; nothing, after rows and trees have been found the same as alone, where they are."""
    switch_dropout_off(model)
    name_body(model)
    if reason := next(obstacles(model), ""):
        return reason
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    for groups, trees in [(batches[0], True), *((groups, False) for groups in batches)]:
        ids, mask = padded(groups)
        parents = branching(ids, mask) if trees else np.tile(np.arange(COMPLETION) - 1, (len(ids), 1))
        tokens = ids.numpy(), mask.numpy()
        layout = pack_tree(*tokens, parents) if trees else pack(*tokens, COMPLETION)
        assert layout is not None
        try:
            packed = log_probs(model, model, ids, layout, COMPLETION)[:2]
        except ForeignAttention as foreign:
            return str(foreign)
        expected = alone(model, ids, mask, parents)
        for ours, theirs in zip(packed, expected, strict=True):
            assert (ours - theirs).abs().max() < tolerance
        wanted, found = gradients(model, *expected), gradients(model, *packed)
        assert wanted.keys() == found.keys()
        for name, gradient in wanted.items():
            assert (found[name] - gradient).abs().max() < tolerance * max(1.0, gradient.abs().max()), name
    return ""


# In rollouts.


class TemperatureLogitsWarper(LogitsProcessor):
    """Keeps the logits after every row of tokens; the engine takes it by its name for one that it knows."""

    def __init__(self) -> None:
        self.logits: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.logits |= dict(zip(map(tuple, ids.tolist()), scores.double(), strict=True))
        return scores


def prompts(lengths: list[int]) -> dict[str, Tensor]:
    """Padded on the left; equal lengths are equal prompts."""
    generator, width, known = torch.Generator().manual_seed(1), max(lengths), {}
    for length in lengths:
        row = torch.randint(3, architectures.VOCABULARY, (length,), generator=generator)
        known.setdefault(length, torch.cat([torch.zeros(width - length, dtype=torch.long), row]))
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return {"input_ids": torch.stack([known[length] for length in lengths]), "attention_mask": mask.long()}


def marks(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """What a processor adds to text for a model that also takes images: no token is one of an image."""
    taken = inspect.signature(type(model).forward).parameters if image_text.sees(model) else ()
    return {name: torch.zeros_like(ids) for name in ("token_type_ids", "mm_token_type_ids") if name in taken}


ROLLS = ([5, 5, 5, 9, 9, 3, 3, 12, 7, 5], 24), ([260, 260, 251, 251, 260, 200, 200], 10)
"""Lengths of prompts, and the most tokens of a completion."""
ENDS = [1, 7, 20, 30]


def in_rollouts(model: Any, tolerance: float = TOLERANCE, batches: Sequence[tuple[list[int], int]] = ROLLS) -> str:
    """Why prompts are not shared; nothing, after greedy tokens and logits have been found the same, where they are."""
    switch_dropout_off(model.train())
    for lengths, tokens in batches:
        given = prompts(lengths)
        given |= marks(model, given["input_ids"])
        config = GenerationConfig(
            max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=ENDS, disable_compile=True
        )
        found = []
        for generate in (model.generate, partial(GroupedEngine(required=True).generate, model)):
            seen = TemperatureLogitsWarper()
            options = {"generation_config": config, "logits_processor": LogitsProcessorList([seen])}
            try:
                made = generate(**given, **options)
            except Unsupported as reason:
                return str(reason)
            found.append((made if isinstance(made, torch.Tensor) else made[0], seen.logits))
        (stock, expected), (ours, logits) = found
        assert torch.equal(stock, ours)
        assert logits.keys() <= expected.keys()
        for ids, values in logits.items():
            if not {*ENDS} & {*ids[max(lengths) :]}:  # what a row that has ended computes is not read
                assert (values - expected[ids])[values.isfinite()].abs().max() < tolerance
    return ""


# The tables.

BUILT = [name for name in architectures.CAUSAL if name not in architectures.NOT_BUILT]


def expected(table: dict[str, str], model_type: str) -> str | None:
    return next((words for words, types in [*BOTH.items(), *table.items()] if model_type in types.split()), None)


def as_exactly(outcome: Callable[..., str], model: Any, **batches: Any) -> str:
    """An outcome with the tolerance of the model's kind."""
    narrow = outcome is in_the_loss or any(map(is_recurrent, model.modules()))
    if narrow and model.dtype == torch.float64:
        with float64_in(model):
            return outcome(model, IN_FLOAT64, **batches)
    return outcome(model, **batches)


@pytest.mark.parametrize("model_type", BUILT)
@pytest.mark.parametrize(
    ("outcome", "table"), [(in_the_loss, LOSS), (in_rollouts, ROLLOUTS)], ids=["loss", "rollouts"]
)
@pytest.mark.cases(80)
def test_prompts_are_shared_exactly_or_refused_by_name(outcome, table, model_type):
    model, words = architectures.model(model_type), expected(table, model_type)
    found = as_exactly(outcome, model)
    assert words is not None, f"{model_type} is new: write it down under {found!r}"
    assert words in found
    assert bool(words) == bool(found)


# Models that also take images, on text.

SEEING = [name for name in image_text.IMAGE_TEXT if name not in image_text.NOT_BUILT]


def expected_of_text(table: dict[str, str], own: dict[str, str], model_type: str) -> str | None:
    """What is said of the model inside, or of this one in `own`."""
    found = (words for words, types in own.items() if model_type in types.split())
    inside = image_text.config(model_type).get_text_config(decoder=True).model_type
    return next(found, expected(table, inside))


@pytest.mark.parametrize("model_type", SEEING)
@pytest.mark.cases(18)
def test_a_model_that_also_takes_images_shares_text_as_the_model_inside(model_type):
    model = image_text.model(model_type)
    for outcome, batches, table, own in (
        (in_rollouts, ROLLS[:1], ROLLOUTS, SEEING_ROLLOUTS),  # first: it leaves positions behind
        (in_the_loss, GROUPS[:1], LOSS, SEEING_LOSS),
    ):
        found, words = as_exactly(outcome, model, batches=batches), expected_of_text(table, own, model_type)
        assert words is not None, f"{model_type} is new: write it down under {found!r}"
        assert words in found
        assert bool(words) == bool(found)
