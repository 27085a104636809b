"""Advantages where they arrive: of tokens, lowered by the KL, and never anything but a number for each."""

import math
from statistics import fmean, pstdev

import pytest
import torch

from grpo_ext.config import checks
from grpo_ext.objective import estimate
from support.trainers import binary, build, scripted_rollout, weights

BETA = 0.5


def second_step(model_path, tmp_path, **settings):
    """Rewards, k1 of each token (None where none is active), the advantages that train and those that are logged."""
    settings = {"beta": BETA, "max_steps": 2, "learning_rate": 0.01, "mask_truncated_completions": True} | settings
    trainer = build(model_path, tmp_path, [binary], rollout=scripted_rollout, **settings)
    outputs, penalties = [], []

    def keep(method, kept):
        def spy(*args):
            kept.append(method(*args))
            return kept[-1]

        return spy

    trainer._generate_and_score_completions = keep(trainer._generate_and_score_completions, outputs)
    trainer._reward_kl = keep(trainer._reward_kl, penalties)
    trainer.train()
    output = outputs[1]
    k1 = (penalties[1] if penalties else torch.zeros(output["completion_mask"].shape)).tolist()
    kl = [
        [x if m else None for x, m in zip(*row, strict=True)]
        for row in zip(k1, output["completion_mask"].tolist(), strict=True)
    ]
    rewards = list(trainer._logs["rewards"]["binary"])
    return rewards, kl, output["advantages"], list(trainer._logs["advantages"]), trainer


def test_reinforce_pp_whitens_what_is_to_come_of_reward_and_kl(model_path, tmp_path):
    rewards, kl, trained, logged, trainer = second_step(model_path, tmp_path, loss_type="reinforce_pp")
    returns = [
        [None if x is None else r - BETA * sum(y for y in row[t:] if y is not None) for t, x in enumerate(row)]
        for r, row in zip(rewards, kl, strict=True)
    ]
    active = [x for row in returns for x in row if x is not None]
    assert max(active) - min(active) > 1.01  # more than the rewards alone
    centre, scale = fmean(active), pstdev(active)
    expected = [[0.0 if x is None else (x - centre) / scale for x in row] for row in returns]
    torch.testing.assert_close(trained, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    means = [fmean([a for a, x in zip(e, r, strict=True) if x is not None] or [0.0])
             for e, r in zip(expected, returns, strict=True)]  # fmt: skip
    assert logged == pytest.approx(means, abs=1e-5)
    of_each = [sum(x for x in row if x is not None) for row in kl if any(x is not None for x in row)]
    assert trainer.state.log_history[1]["kl"] == pytest.approx(fmean(of_each), abs=1e-5)


def test_a_masked_truncated_completion_has_no_kl_and_no_part_in_its_groups_baseline(model_path, tmp_path):
    """Rows 0 and 5 are cut: with a KL of 0 they would stand out of groups whose others pay for theirs."""
    rewards, kl, trained, _, trainer = second_step(model_path, tmp_path, loss_type="rloo")
    cut = [all(x is None for x in row) for row in kl]
    assert [i for i, c in enumerate(cut) if c] == [0, 5]
    totals = [r - BETA * sum(x for x in row if x is not None) for r, row in zip(rewards, kl, strict=True)]
    for g in (range(4), range(4, 8)):
        active = [totals[i] for i in g if not cut[i]]
        expected = [0.0 if cut[i] else totals[i] - (sum(active) - totals[i]) / (len(active) - 1) for i in g]
        assert trained[list(g)].tolist() == pytest.approx(expected, abs=1e-5)
    assert trainer.state.log_history[1]["reward"] == pytest.approx(fmean(rewards))  # which says what was earned


def nearly(rewards):
    return rewards - rewards.mean(dim=1, keepdim=True)


def of_groups(rewards):
    return rewards.mean(dim=1)


def sometimes_none(completions, **_):
    return [None if i == 2 else float(i) for i in range(len(completions))]


@pytest.mark.parametrize("combination", ["sum_then_normalize", "average_advantages"])
@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (
            "nearly",
            r"advantage_estimator='test_advantages_arrive:nearly': an advantage of nan for the rewards \[0\.0, 1\.0",
        ),
        (
            "of_groups",
            r"advantage_estimator='test_advantages_arrive:of_groups': it returned \[2\] for rewards \[2, 4\]",
        ),
    ],
)
def test_an_estimator_that_breaks_a_rule_ends_the_run_before_a_step(
    estimator, message, combination, model_path, tmp_path, monkeypatch
):
    """Before, one None made all weights NaN beside a logged loss of 0, and a wrong shape died in the shuffle."""
    monkeypatch.setattr(checks, "dry_run_problems", lambda config: [])
    settings = {"loss_type": "grpo", "advantage_estimator": f"test_advantages_arrive:{estimator}", "max_steps": 1}
    settings["multi_objective_aggregation"] = combination
    trainer = build(model_path, tmp_path, [sometimes_none], rollout=scripted_rollout, **settings)
    before = weights(trainer.model)
    with pytest.raises(estimate.BrokenRule, match=message):
        trainer.train()
    assert torch.equal(weights(trainer.model), before)
    assert math.isfinite(before.sum())


def half_of_it(rewards, mask, kl_rewards, *, share: float = 0.5):
    """An estimator of one's own that sees tokens."""
    return (rewards[..., None] + share * kl_rewards) * mask


def test_a_custom_estimator_sees_mask_and_kl_of_tokens(model_path, tmp_path):
    settings = {"loss_type": "rloo", "advantage_estimator": "test_advantages_arrive:half_of_it"}
    rewards, kl, trained, _, _ = second_step(model_path, tmp_path, **settings)
    active = [[i for i in range(4 * j, 4 * j + 4) if any(x is not None for x in kl[i])] for j in (0, 1)]
    silent = [len({rewards[i] for i in rows}) == 1 for rows in active]
    assert not all(silent)
    expected = [
        [0.0 if x is None or silent[i // 4] else r - 0.5 * BETA * x for x in row]
        for i, (r, row) in enumerate(zip(rewards, kl, strict=True))
    ]
    torch.testing.assert_close(trained, torch.tensor(expected), rtol=1e-5, atol=1e-6)
