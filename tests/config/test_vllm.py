"""The rules of settings for vLLM that the table of bad recipes does not hold."""

import pytest

from grpo_ext import ConfigError, GRPOExtConfig

CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "use_vllm": True}


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_a_correction_without_bounds_corrects_nothing(mode):
    settings = CPU | {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": None}
    with pytest.raises(
        ConfigError, match=rf"^1 problem.*\n.*mode='{mode}': it {mode.split('_')[1]}s .*clip_max is set"
    ):
        GRPOExtConfig(**settings)
    GRPOExtConfig(**settings, vllm_importance_sampling_correction=False)
    for bound in ("clip_min", "clip_max"):
        GRPOExtConfig(**settings | {f"vllm_importance_sampling_{bound}": 0.5})
