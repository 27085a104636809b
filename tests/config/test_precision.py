"""The formats of trainer and sampler: their line, what is expected to differ, and what is refused."""

import pytest

from grpo_ext import GRPOExtConfig
from grpo_ext.config.precision import coarse_warnings, expected_differences, precision

CPU = {"use_cpu": True, "bf16": False, "report_to": "none"}
VLLM = CPU | {"use_vllm": True}
FP8 = VLLM | {"vllm_engine_kwargs": {"kv_cache_dtype": "fp8"}}


@pytest.mark.parametrize(
    ("settings", "weights", "line", "differs"),
    [
        (CPU, "float32", "trainer: float32 weights | sampler: transformers, the trainer's own weights, float32", []),
        (VLLM, "bfloat16", "trainer: bfloat16 weights | sampler: vLLM colocate, bfloat16", ["correction"]),
        (
            VLLM | {"bf16": True, "cast_lm_head_to_fp32": True},
            "float32",
            "trainer: float32 weights, computed in bfloat16, float32 LM head | sampler: vLLM colocate, bfloat16",
            ["weights", "LM head", "correction"],
        ),
        (
            FP8 | {"vllm_dtype": "float16", "vllm_importance_sampling_correction": False},
            "bfloat16",
            "trainer: bfloat16 weights | sampler: vLLM colocate, float16, kv_cache_dtype fp8",
            ["dtype", "kv_cache_dtype", "correction"],
        ),
    ],
)
def test_the_formats_and_what_differs_by_them(settings, weights, line, differs):
    config = GRPOExtConfig(**settings)
    assert precision(config, weights) == line
    assert [name for name, _ in expected_differences(config, weights)] == ["kernels", *differs]


REJECT = {"level": "geometric", "statistic": "k1", "lower": -0.01, "upper": 0.01, "action": "reject"}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "token ratio up to 2 (truncate)"),
        (
            {"sampler_correction": [{"normalize": True}, REJECT]},
            "token ratio normalized; geometric k1 from -0.01 up to 0.01 (reject)",
        ),
        (
            {"loss_defaults": "trl"},
            "sequence ratio up to 3 (mask); a bound on a sum or product over tokens takes the gradient of long "
            "completions",
        ),
        ({"old_logps": "sampler"}, "none: the loss takes its ratio to the sampler (old_logps)"),
        (
            {"old_logps": "interpolated"},
            "token ratio up to 2 (truncate), by interpolated log-probabilities (old_logps)",
        ),
        ({"vllm_importance_sampling_correction": False}, "off: these differences bias the gradient"),
    ],
)
def test_check_names_the_correction_and_what_it_costs(settings, line):
    assert dict(expected_differences(GRPOExtConfig(**VLLM, **settings), "float32"))["correction"] == line


def test_a_coarse_sampler_without_the_correction_is_warned_of():
    assert list(coarse_warnings(GRPOExtConfig(**FP8))) == []
    off = FP8 | {"vllm_importance_sampling_correction": False}
    assert list(coarse_warnings(GRPOExtConfig(**off, old_logps="sampler"))) == []
    (found,) = coarse_warnings(GRPOExtConfig(**off))
    assert str(found).startswith("vllm_engine_kwargs.kv_cache_dtype='fp8': the sampler is another distribution")
