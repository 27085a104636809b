"""A run in which every advantage is zero warns once, with the values of its rewards."""

import logging
import math

import pytest
import torch
from transformers import TrainerCallback

from grpo_ext.trainer.advantages import PATIENCE, AdvantageMonitor
from support import tiny
from support.trainers import build

TWO = torch.tensor([[[0.0, 1.0], [0.0, 1.0]], [[0.0, 0.5], [0.0, 0.5]]])


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "grpo_ext.trainer.advantages"]


UNSCORED = torch.tensor([[[math.nan, 1.0], [math.nan, math.nan]]])


@pytest.mark.parametrize(
    ("rewards", "values"),
    [
        (TWO, f"{4 * PATIENCE} completions: accuracy 0 throughout, format 0.5 to 1, equal in each group."),
        (UNSCORED, "accuracy None throughout (not scored), format 1 throughout (5 not scored)."),
    ],
)
def test_the_warning_comes_once_with_the_values_of_each_reward(rewards, values, caplog):
    monitor = AdvantageMonitor(["accuracy", "format"])
    for _ in range(3 * PATIENCE):
        monitor.add(rewards, True)
    (sentence,) = warnings(caplog)
    assert f"no signal in {PATIENCE} generations in a row" in sentence
    assert values in sentence


def test_the_warning_names_rewards_that_scored_nothing(caplog):
    monitor = AdvantageMonitor(["accuracy", "format"])
    for _ in range(PATIENCE):
        monitor.add(torch.full_like(TWO, torch.nan), True)
    (sentence,) = warnings(caplog)
    assert f"none of these {4 * PATIENCE} completions was scored" in sentence
    assert "equal" not in sentence


def test_the_warning_of_groups_whose_rewards_differ_names_what_leaves_them_without_advantages(caplog):
    monitor = AdvantageMonitor(["accuracy"])
    for _ in range(PATIENCE):
        monitor.add(torch.tensor([[[0.0], [1.0], [1.0]], [[1.0], [1.0], [1.0]]]), True)
    (sentence,) = warnings(caplog)
    assert "although rewards differ within groups, every advantage was zero" in sentence
    assert "accuracy 0 to 1. Rewards that cancel" in sentence
    assert "pass_at_k" in sentence


@pytest.mark.parametrize(("warns", "every"), [(True, PATIENCE), (False, 1000)])
def test_no_warning_with_an_advantage_in_between_or_on_other_processes(warns, every, caplog):
    monitor = AdvantageMonitor(["accuracy", "format"], warns=warns)
    for i in range(3 * PATIENCE):
        monitor.add(TWO, i % every != 0)
    assert not warnings(caplog)


class StopAt(TrainerCallback):
    """Ends a call of `train` after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == self.step


def saved_steps(folder) -> int:
    return max((int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*")), default=0)


def same(completions, **_):
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("reward", "settings"), [(same, {}), (same, {"loss_defaults": "trl", "loss_type": "grpo"}), (tiny.count_a, {})]
)
def test_a_run_warns_only_if_all_advantages_are_zero(reward, settings, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        build(tiny.model(), tmp_path, [reward], max_steps=PATIENCE, **settings).train()
    assert ["same 1 throughout" in sentence for sentence in warnings(caplog)] == [True] * (reward is same)


def test_a_resumed_run_counts_on_and_warns_once(tmp_path, caplog):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": PATIENCE + 2}
    for stop in (PATIENCE - 2, PATIENCE, PATIENCE + 2):
        trainer = build(tiny.model(), tmp_path, [same], **settings)
        last = tmp_path / f"checkpoint-{saved_steps(tmp_path)}"
        trainer.add_callback(StopAt(stop))
        trainer.train(resume_from_checkpoint=str(last) if last.is_dir() else None)
        assert len(warnings(caplog)) == (stop >= PATIENCE)
