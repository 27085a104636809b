"""Settings by which nothing would be trained are refused, with or without being written down."""

import pytest

from grpo_ext import GRPOExtConfig
from grpo_ext.config.loss import idle_clip
from grpo_ext.errors import ConfigError

CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "gradient_checkpointing": False}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"advantage_estimator": "pass_at_k", "num_generations": 2},
            ["advantage_kwargs.k=2", "num_generations=2", "Set k <= 1, or num_generations > 2"],
        ),
        (
            {"advantage_estimator": "pass_at_k", "eval_strategy": "steps", "num_generations_eval": 2},
            ["advantage_kwargs.k=2", "num_generations_eval=2"],
        ),
        (
            {"loss_type": "minimind", "advantage_kwargs": {"clamp": 0}},
            ["advantage_kwargs.clamp=0: must be above 0: at 0 every advantage is 0", "default is 10.0"],
        ),
        ({"loss_type": "beta_bnpo", "advantage_kwargs": {"cap": 0.0}}, ["advantage_kwargs.cap=0.0: must be above 0"]),
        ({"loss_type": "minimind", "advantage_kwargs": {"clamp": -1.0}}, ["advantage_kwargs.clamp=-1.0"]),
    ],
)
def test_a_setting_that_trains_nothing_is_refused(settings, words):
    with pytest.raises(ConfigError) as error:
        GRPOExtConfig(**CPU | {"num_generations": 4} | settings)
    (problem,) = map(str, error.value.problems)
    for word in words:
        assert word in problem


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({}, True),
        ({"gradient_accumulation_steps": 4}, True),
        ({"num_iterations": 2}, False),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 8}, False),
        ({"loss_type": "reinforce_pp"}, True),
        ({"loss_type": "rloo"}, False),  # it has no clip
        ({"rollout_ahead": 1, "rollout_engine": "process"}, True),
        ({"rollout_ahead": 1, "rollout_engine": "process", "old_logps": "sampler"}, False),
        ({"rollout_ahead": 1, "rollout_engine": "process", "old_logps": "interpolated"}, True),
    ],
)
def test_a_clip_that_cannot_act_is_known(settings, idle):
    assert bool(idle_clip(GRPOExtConfig(**CPU | {"loss_type": "grpo", "num_generations": 4} | settings))) is idle
