"""Rotary embeddings that change with the length: fixed where a run may cross the change, and else as they are."""

import copy

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from grpo_ext.errors import ConfigError
from grpo_ext.packing.rotary import fix_rotary, growing, unchanged_until
from support import tiny
from support.trainers import build

LIMIT = 16
LONG = {"max_completion_length": 20, "generation_kwargs": {"suppress_tokens": [1]}, "max_steps": 1}


def longrope(limit: int = LIMIT) -> Phi3ForCausalLM:
    """Return a tiny Phi-3 whose two sets of factors differ, with weights large enough to see it."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 4.0, 8.0, 16.0]}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Phi3Config(
        **sizes,
        **{"vocab_size": len(tiny.WORDS), "num_hidden_layers": 2, "max_position_embeddings": 128},
        **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "original_max_position_embeddings": limit},
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": limit,
            **factors,
        },
    )
    torch.manual_seed(0)
    model = Phi3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)
    return model.eval()


def dynamic(limit: int = LIMIT) -> LlamaForCausalLM:
    parameters = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4}
    return tiny.model(max_position_embeddings=limit, rope_parameters=parameters).eval()


MODELS = [longrope, dynamic]


@torch.no_grad()
@pytest.mark.parametrize("make", MODELS)
def test_a_fixed_model_reads_a_token_alike_in_rows_of_any_length(make, tmp_path):
    ids = torch.randint(3, len(tiny.WORDS), (2, 2 * LIMIT), generator=torch.Generator().manual_seed(1))
    whole, begun = make()(ids).logits, make()(ids[:, :LIMIT]).logits
    assert (whole[:, :LIMIT] - begun).abs().max() > 1e-3
    model = make()
    assert (growing(model.config), unchanged_until(model.config)) == (make.__name__, LIMIT)
    assert fix_rotary(model, 2 * LIMIT)
    assert growing(model.config) is None
    assert torch.equal(model(ids).logits, whole)
    assert torch.allclose(model(ids[:, :LIMIT]).logits, whole[:, :LIMIT], atol=1e-5)
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path).eval()(ids).logits, whole)


@pytest.mark.parametrize("make", MODELS)
def test_a_run_that_crosses_the_change_draws_and_scores_by_the_same_frequencies(make, tmp_path, caplog):
    trainer = build(make(), tmp_path, **LONG)
    (line,) = [text for text in caplog.messages if "rotary embeddings change beyond 16 tokens" in text]
    assert "lower max_completion_length and max_prompt_length to 16 tokens together" in line
    assert trainer.sharing.possible
    trainer.train()
    assert trainer.state.log_history[0]["sampling/mismatch"] < 1e-5


@pytest.mark.parametrize("make", MODELS)
def test_a_run_that_cannot_cross_it_keeps_the_model_as_it_is(make, tmp_path, caplog):
    model = make(64)
    config = copy.deepcopy(model.config.rope_parameters)
    trainer = build(model, tmp_path, **LONG)
    assert model.config.rope_parameters == config
    trainer.train()
    assert "change beyond" not in caplog.text
    assert trainer.state.log_history[0]["sampling/mismatch"] < 1e-5  # transformers' own generate has drawn


@pytest.mark.parametrize("make", MODELS)
def test_an_adapter_is_refused_where_its_base_would_change(make, tmp_path):
    """It is saved without the base's frequencies, and would be another policy wherever it is loaded."""
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    with pytest.raises(ConfigError, match=r"beyond 16 tokens.*an adapter.*short_factor equal to long_factor"):
        build(make(), tmp_path, peft_config=lora, **LONG)
    build(make(64), tmp_path, peft_config=lora, **LONG)


def test_generate_is_refused_where_it_would_forget_a_row(tmp_path):
    trainer = build(longrope(), tmp_path, rollout_engine="generate", **LONG)
    with pytest.raises(ConfigError, match=r"generate.: rows may have 24 tokens.*auto, or keep .* within 16 tokens"):
        trainer.train()
