"""What holds for every estimator is seen to in one place, whatever an estimator returns."""

import math

import pytest
import torch

from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.estimate import BrokenRule, estimate
from support.pure import objective

NAN = math.nan
REWARDS = torch.tensor([[1.0, 0.0, NAN], [0.3, 0.3, 0.3], [2.0, NAN, NAN]], dtype=torch.float64)


@pytest.fixture
def named():
    """File an estimator as 'mine' for the time of a test."""
    before = dict(estimators._entries)

    def add(function, **traits):
        estimators.register("mine", **traits)(function)

    yield add
    estimators._entries.clear()
    estimators._entries.update(before)


def test_groups_without_signal_are_exactly_0(named):
    named(lambda rewards: torch.full_like(rewards, 7.0).masked_fill(rewards.isnan(), NAN))
    assert estimate("mine", REWARDS).tolist() == [[7.0, 7.0, 0.0], [0.0] * 3, [0.0] * 3]


def test_without_a_group_baseline_only_unscorable_completions_are_0(named):
    named(lambda rewards: torch.full_like(rewards, 7.0), group_baseline=False)
    assert estimate("mine", REWARDS).tolist() == [[7.0, 7.0, 0.0], [7.0] * 3, [7.0, 0.0, 0.0]]


def test_a_token_that_is_not_active_is_exactly_0(named):
    named(lambda rewards, mask: torch.where(mask.bool(), 7.0, NAN))
    mask = torch.tensor([[1, 0], [0, 1], [1, 1]]).repeat(3, 1, 1)
    out = estimate("mine", REWARDS, {"mask": mask})
    assert out[0].tolist() == [[7.0, 0.0], [0.0, 7.0], [0.0, 0.0]]
    assert out[1:].eq(0).all()
    assert out.dtype == torch.float64


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda rewards: rewards.mean(dim=1), r"\[3\]"),
        (lambda rewards: rewards.mean(), r"\[\]"),
        (lambda rewards: rewards.T[:2], r"\[2, 3\]"),
        (lambda rewards: rewards[..., None].expand(-1, -1, 5), r"\[3, 3, 5\]"),
        (lambda rewards, mask: rewards[..., None].expand(-1, -1, 5), r"\[3, 3, 5\]"),
        (lambda rewards: rewards.tolist(), "a list"),
        (lambda rewards: None, "a NoneType"),
    ],
)
def test_an_advantage_of_another_shape_is_refused(function, what, named):
    named(function)
    offered = {"mask": torch.ones(3, 3, 4)} if function.__code__.co_argcount == 2 else {}
    with pytest.raises(BrokenRule, match=rf"estimator='mine': it returned {what} for rewards \[3, 3\]\. Return"):
        estimate("mine", REWARDS, offered)


@pytest.mark.parametrize("combination", ["sum_then_normalize", "average_advantages", "normalize_then_sum"])
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_a_non_finite_advantage_is_refused_with_name_value_and_cure(value, combination, named):
    named(lambda rewards: torch.where(rewards == 0, value, rewards))
    mine = objective("grpo", advantage_estimator="mine", multi_objective_aggregation=combination)
    rewards = torch.stack([torch.tensor([[1.0, 0.5], [0.0, 2.0]])] * 2, dim=-1).double()
    message = rf"advantage_estimator='mine': an advantage of {value:g} for the rewards \[0\.0, .*Leave NaN"
    with pytest.raises(BrokenRule, match=message):
        mine.advantages(rewards, torch.tensor([0.5, 1.5]).double())


def test_non_finite_advantages_of_a_group_without_signal_are_zeroed(named):
    """0 / 0 in a group without a signal is no fault: it has no advantage anyway."""
    named(lambda rewards: (rewards - rewards.nanmean(dim=1, keepdim=True)) / rewards.nansum(dim=1, keepdim=True))
    assert estimate("mine", torch.tensor([[0.0, 0.0], [1.0, 0.0]])).tolist() == [[0.0, 0.0], [0.5, -0.5]]


def test_a_none_of_one_function_keeps_the_rewards_of_the_others(named):
    """In a combination each function's own completions obey the rules before they are combined."""
    named(lambda rewards: rewards - rewards.nanmean(dim=1, keepdim=True))
    mine = objective("grpo", advantage_estimator="mine", multi_objective_aggregation="average_advantages")
    rewards = torch.tensor([[[1.0, 4.0], [0.0, NAN], [0.5, 2.0]]]).double()
    out = mine.advantages(rewards, torch.tensor([1.0, 3.0]).double())
    assert out[0].tolist() == pytest.approx([(0.5 + 3 * 1) / 4, -0.5 / 4, (0.0 - 3 * 1) / 4])
