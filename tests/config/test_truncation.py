"""A truncated sampler is scored exactly, or refused; with `loss_defaults: trl` it is allowed, with a warning."""

import pytest

from grpo_ext import ConfigError, GRPOExtConfig
from grpo_ext.config.images import image_problems
from grpo_ext.config.truncation import adapter_problems, rollout_problems, scores_over_support, unbounded_problems
from grpo_ext.config.warnings import warnings

CPU = {"use_cpu": True, "bf16": False, "report_to": "none"}
VLLM = {"use_vllm": True}
CONTINUOUS = {"use_transformers_continuous_batching": True}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"top_p": 0.9} | CONTINUOUS, "top_p=0.9: .*continuous batching"),
        ({"top_k": 4, "torch_compile": True}, "top_k=4: .*compiled"),
        ({"top_k": 4, "generation_kwargs": {"remove_invalid_values": True}}, "top_k=4: .*finite score. Remove it."),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2: .*altered distribution.*Leave repetition_penalty"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs.num_beams=2: .*altered.*Leave num_beams"),
        ({"generation_kwargs": {"guidance_scale": 0}}, "generation_kwargs.guidance_scale=0: .*altered"),
        ({"generation_kwargs": {"thinking_token_budget": 0}} | VLLM, "thinking_token_budget=0: .*altered"),
    ],
)
def test_what_cannot_be_scored_is_refused_unless_it_is_to_be_as_stock_trl(settings, expected):
    with pytest.raises(ConfigError, match=f"^1 problem.*\n.*{expected}"):
        GRPOExtConfig(**CPU | settings)
    assert not scores_over_support(config := GRPOExtConfig(**CPU | settings, loss_defaults="trl"))
    assert any("altered distribution" in str(warning) for warning in warnings(config))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, False),
        ({"top_p": 1.0, "top_k": 0, "min_p": 0.0, "generation_kwargs": {"min_new_tokens": 0}}, False),
        ({"top_p": 0.9}, True),
        ({"top_k": 5}, True),
        ({"min_p": 0.1}, True),
        ({"generation_kwargs": {"min_new_tokens": 4}}, True),
        ({"generation_kwargs": {"forced_eos_token_id": 0}}, True),  # a token, not an option that is off
        ({"generation_kwargs": {"typical_p": 1.0, "suppress_tokens": [], "penalty_alpha": 0.0}}, False),
        ({"generation_kwargs": {"diversity_penalty": 0.0, "watermarking_config": None, "min_length": 0}}, False),
        *(({"top_p": 0.9, "top_k": top_k} | VLLM, True) for top_k in (0, 50)),
        ({"vllm_structured_outputs_regex": "a+"} | VLLM, True),
        ({"generation_kwargs": {"allowed_token_ids": [0]}} | VLLM, True),
    ],
)
def test_the_loss_is_over_the_kept_tokens_where_a_setting_leaves_some_out(settings, kept):
    config = GRPOExtConfig(**CPU | settings)
    assert scores_over_support(config) == kept
    assert not any("distribution" in str(warning) for warning in warnings(config))
    found = {
        "rollout_func": rollout_problems(config, print),
        "adapter": adapter_problems(config, True),
    }
    assert all(len([*problems]) == int(kept) for problems in found.values())
    quiet = [rollout_problems(config, None), image_problems(config, ["prompt"])]
    assert not [problem for problems in (*quiet, adapter_problems(config, False)) for problem in problems]


@pytest.mark.parametrize(("top_k", "vocabulary", "refused"), [(0, 1024, False), (0, 1025, True), (50, 150_000, False)])
def test_vllm_returns_a_support_that_top_k_bounds_or_a_small_vocabulary(top_k, vocabulary, refused):
    found = [str(problem) for problem in unbounded_problems(top_k, vocabulary)]
    assert [problem.startswith("top_k=0: the sampler leaves tokens out") for problem in found] == [True] * refused
