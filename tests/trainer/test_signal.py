"""Groups without a signal are those without an advantage, whatever their totals: logged, evaluated and replaced so."""

import pytest
import torch

from grpo_ext import GRPOExtConfig
from grpo_ext.errors import ConfigError
from support import tiny
from support.trainers import build, scripted_rollout, scripted_trajectories


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"))


def same_total(trajectory, **_):
    """1 for each completion, earned at another turn from row to row, for every second group at the last."""
    earned = [[0.0] * len(attempt.turns) for attempt in trajectory]
    for i, turns in enumerate(earned):
        turns[i % len(turns) if i // 4 % 2 == 0 else -1] = 1.0
    return earned


def group_number(completions, **_):
    """The same within a group of four, another for each group."""
    return [float(i // 4) for i in range(len(completions))]


def then_alike(trainer_state, **more):
    """Rewards that differ at the first step, after which the policy is not the reference any more."""
    found = group_number(**more)
    return [r + i % 2 for i, r in enumerate(found)] if trainer_state.global_step == 0 else found


KL = {"beta": 0.5, "learning_rate": 0.01, "kl_placement": "reward", "kl_estimator": "k1"}
CASES = {
    "turns that differ": ({"advantage_estimator": "turn_return"}, same_total, scripted_trajectories),
    "turns of states": ({"advantage_estimator": "gigpo"}, same_total, scripted_trajectories),
    "the batch's baseline": ({"loss_type": "reinforce_pp"}, group_number, scripted_rollout),
    "KL in the reward": ({"loss_type": "rloo"} | KL, then_alike, scripted_rollout),
    "the group's baseline": ({"loss_type": "grpo"}, group_number, scripted_rollout),
    "stock TRL": ({"loss_type": "grpo", "loss_defaults": "trl"}, group_number, scripted_rollout),
}
SILENT = {"turns that differ": 0.5, "the group's baseline": 1.0, "stock TRL": 1.0}
"""Share of silent groups at the last step, where it is not 0. GiGPO discounts, so an early 1 is worth less."""


@pytest.mark.parametrize("case", CASES)
def test_a_group_without_a_signal_is_one_without_an_advantage(case, model, tmp_path):
    settings, reward, rollout = CASES[case]
    settings = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 4} | settings
    trainer = build(model, tmp_path, [reward], rollout=rollout, evaluated=tiny.prompts(3), **settings)
    found, make = {"train": [], "eval": []}, trainer._generate_and_score_completions

    def keep(inputs):
        output = make(inputs)
        found["train" if trainer.model.training else "eval"].append(~output["advantages"].view(2, -1).any(dim=1))
        return output

    trainer._generate_and_score_completions = keep
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    for row, silent in zip(logs, found["train"], strict=True):
        assert row["advantages/zero_variance_groups"] == silent.double().mean().item()
        assert (row["grad_norm"] > 0) is not bool(silent.all())
    assert logs[-1]["advantages/zero_variance_groups"] == SILENT.get(case, 0.0)
    (evaluated,) = (row for row in trainer.state.log_history if "eval_loss" in row)
    groups = torch.cat(found["eval"])[: None if case == "stock TRL" else 3]  # the fourth fills up the last batch
    assert evaluated["eval_advantages/zero_variance_groups"] == pytest.approx(groups.double().mean().item())


@pytest.mark.parametrize("loss", [{"advantage_estimator": "gigpo"}, {"loss_type": "beta_bnpo"}], ids=str)
def test_figures_of_an_estimator_are_those_of_training(loss, model, tmp_path):
    """An evaluation counts each completion once, and an estimator's figures would count those that fill up a batch."""
    settings = {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 4} | loss
    kwargs = {"advantage_kwargs": {"reward_range": [0.0, 9.0]}} if "loss_type" in loss else {}
    reward = group_number if kwargs else same_total
    trainer = build(
        model, tmp_path, [reward], rollout=scripted_trajectories, evaluated=tiny.prompts(3), **settings, **kwargs
    )
    trainer.train()
    names = {name for row in trainer.state.log_history for name in row if "advantages/" in name}
    trained = {name for name in names if not name.startswith("eval_")}
    assert {"advantages/zero_variance_groups"} == {name.removeprefix("eval_") for name in names - trained}
    assert trained & {"advantages/shared_states", "advantages/beta_a", "advantages/beta_alpha"}


@pytest.mark.parametrize(("estimator", "rounds"), [("turn_return", 1), ("gigpo", 0)])
def test_dynamic_sampling_keeps_groups_that_have_an_advantage(estimator, rounds, model, tmp_path):
    """All totals are equal: judged by these, all groups of every round would be replaced.

    By `turn_return` the group whose last turns pay has no advantage and is replaced by one of other turns.
    """
    settings = {"advantage_estimator": estimator, "dynamic_sampling": "reward", "dynamic_sampling_max_rounds": 2}
    trainer = build(model, tmp_path, [same_total], 64, rollout=scripted_trajectories, max_steps=1, **settings)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["dynamic_sampling/rounds"] == rounds
    assert log["dynamic_sampling/kept_groups"] == 2
    assert log["dynamic_sampling/waste"] == pytest.approx(rounds / 3)
    assert log["advantages/zero_variance_groups"] == 0
    assert log["grad_norm"] > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss_type": "reinforce_pp"}, "advantage_estimator='reinforce_pp' compares rewards over the whole batch"),
        ({"loss_type": "rloo", "beta": 0.1}, "kl_placement='reward' lowers each completion's reward by its own KL"),
    ],
)
def test_dynamic_sampling_by_advantages_is_refused_where_every_group_has_one(settings, words):
    by = {"use_cpu": True, "bf16": False, "report_to": "none"} | settings
    reason = "dynamic_sampling='reward': it replaces groups without an advantage"
    with pytest.raises(ConfigError, match=reason) as refused:
        GRPOExtConfig(dynamic_sampling="reward", **by)
    assert words in str(refused.value)
    GRPOExtConfig(dynamic_sampling="accuracy", **by)
