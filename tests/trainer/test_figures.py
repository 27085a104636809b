"""Logged and evaluated figures: of a step's tokens and completions, however they are split."""

import pytest
import torch

from grpo_ext.objective.aggregation import aggregations, step_totals
from grpo_ext.trainer.evaluating import batch_weight
from support.figures import evaluated, trainer
from support.pure import objective
from support.trainers import scripted_rollout

LOSS_FIGURES = ("loss", "kl", "entropy", "policy_loss", "clip_ratio/low_mean", "clip_ratio/high_mean")
LOSS_FIGURES += ("ratio/ess_completions",)
SPLITS = ((8, 2), (4, 4), (2, 8), (16, 1))
"""Rows of a micro-batch, micro-batches of a step."""


@pytest.mark.cases(1)
@pytest.mark.parametrize("loss", ["dapo", "gspo"])
def test_a_step_logs_the_same_however_it_is_split(loss, tmp_path):
    """Two windows to a generation, so that the second is off-policy and clips."""
    logs = []
    for rows, parts in SPLITS:
        settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": parts, "beta": 0.1}
        settings |= {"loss_type": loss, "num_iterations": 2, "learning_rate": 0.3, "optim": "sgd"}
        settings |= {"entropy_coef": 0.01, "entropy_coef_max": 0.02} if loss == "dapo" else {}
        one = trainer(tmp_path, scripted_rollout, **settings, lr_scheduler_type="constant")
        one.train()
        logs.append([row for row in one.state.log_history if "loss" in row])
    assert logs[0][1]["kl"] > 0
    assert logs[0][1]["ratio/ess_completions"] < 0.9 < logs[0][0]["ratio/ess_completions"] == pytest.approx(1.0)
    for log in logs[1:]:
        for row, other in zip(log, logs[0], strict=True):
            assert row.keys() == other.keys()
            for name in set(LOSS_FIGURES) & row.keys():
                assert row[name] == pytest.approx(other[name], rel=1e-6, abs=1e-7), name


@pytest.mark.cases(1)
@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_an_evaluation_gives_the_same_in_any_batches(loss, tmp_path):
    """6 prompts of 4 completions in batches of 24, 8, 16 (the last one of 8) and 4."""
    whole, *others = (evaluated(tmp_path, batch, loss_type=loss, beta=0.1) for batch in (24, 8, 16, 4))
    assert {"eval_loss", "eval_reward", "eval_kl", "eval_completions/mean_length"} <= whole.keys()
    for other in others:
        assert other == pytest.approx(whole, rel=1e-5, abs=1e-6)


def test_with_stock_defaults_an_evaluation_is_stocks(tmp_path):
    stock = evaluated(tmp_path, 16, loss_type="dapo", loss_defaults="trl")
    ours = evaluated(tmp_path, 16, loss_type="dapo")
    assert stock["eval_reward"] != pytest.approx(ours["eval_reward"], rel=1e-3)


@pytest.mark.parametrize("aggregation", aggregations)
def test_a_batch_of_an_evaluation_without_an_active_token_weighs_nothing(aggregation):
    """Its loss of 0 would otherwise lower the mean over batches."""
    settled, mask = objective("grpo", loss_aggregation=aggregation), torch.ones(4, 3)
    assert batch_weight(settled, step_totals([mask])) > 0
    assert batch_weight(settled, step_totals([0 * mask])) == 0
