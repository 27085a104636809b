"""The rules of settings for vLLM that the table of bad recipes does not hold."""

import pytest

from grpo_ext import ConfigError, GRPOExtConfig
from grpo_ext.config.precision import coarse_options
from grpo_ext.objective.sampler_correction import SamplerRule, trl_rule

CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "use_vllm": True}


NAME = "vllm_importance_sampling_"


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({}, SamplerRule(upper=2.0)),
        ({"clip_max": None}, SamplerRule(upper=2.0)),
        ({"clip_max": 3.0}, trl_rule("sequence_mask", None, 3.0)),
        ({"clip_max": 2.0}, trl_rule("sequence_mask", None, 2.0)),
        ({"mode": "token_truncate"}, trl_rule("token_truncate", None, 3.0)),
        ({"mode": "token_mask", "clip_min": 0.5, "clip_max": 4}, trl_rule("token_mask", 0.5, 4.0)),
    ],
)
def test_trls_bound_chooses_its_correction_also_at_its_default(given, rule):
    config = GRPOExtConfig(**CPU, **{NAME + name: value for name, value in given.items()})
    assert config.sampler_rules == config.changed(seed=1).sampler_rules == (rule,)


def test_stock_trls_bound_is_its_default():
    assert GRPOExtConfig(**CPU, loss_defaults="trl").sampler_rules == (trl_rule("sequence_mask", None, 3.0),)


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_a_cache_of_fewer_bits_is_the_only_quantization_of_a_colocated_engine(mode):
    """A trainer on a CPU says nothing about its server, which may have GPUs."""
    GRPOExtConfig(**CPU, vllm_mode=mode, vllm_engine_kwargs={"kv_cache_dtype": "fp8"})
    quantized = CPU | {"vllm_mode": mode, "vllm_engine_kwargs": {"quantization": "fp8"}}
    if mode == "colocate":
        with pytest.raises(ConfigError, match="a push to a colocated engine writes weights in place"):
            GRPOExtConfig(**quantized)
    else:
        assert coarse_options(GRPOExtConfig(**quantized)) == {"quantization": "fp8"}


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "fp8", "nvfp4", "turboquant_3bit_nc"])
def test_a_cache_of_fewer_than_16_bits_makes_the_sampler_coarser(dtype):
    config = GRPOExtConfig(**CPU, vllm_engine_kwargs={"kv_cache_dtype": dtype})
    assert bool(coarse_options(config)) == (dtype not in ("auto", "bfloat16", "float16"))
