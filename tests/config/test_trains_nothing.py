"""Settings by which nothing would be trained are refused, with or without being written down."""

import pytest

from grpo_ext import GRPOExtConfig
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
