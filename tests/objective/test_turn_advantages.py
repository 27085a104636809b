"""Advantages by turn: worked out by hand, and GRPO where only last turns pay."""

import math

import pytest
import torch

from grpo_ext.objective.estimate import estimate
from grpo_ext.objective.turn_advantages import returns_to_go
from support.pure import objective

NAN = math.nan
HALF = 0.5**0.5
"""1/2 over the std, with ddof 1, of two numbers that are 1 apart."""


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


EARNED = tensor([[[1.0, 0.0, 0.0], [0.0, 0.0, NAN]]])
REWARDS = tensor([[3.0, 1.0]])
"""One group: a completion of three turns that pays 1, 0, 2, and one of two that pays 0, 1; the last by the whole."""
TURNS = torch.tensor([[[0, 0, -1, 1, 2], [0, -1, 1, 1, -1]]])
MASK = (TURNS >= 0).long()


def credit(name, rewards=REWARDS, earned=EARNED, turns=TURNS, states=None, mask=MASK, **options):
    offered = {"turn_rewards": earned, "turns": turns, "states": states, "mask": mask}
    return estimate(name, rewards, offered, **{"eps": 0.0} | options)


@pytest.mark.parametrize(
    ("gamma", "expected"),
    [(1.0, [[3, 2, 2], [1, 1, 1]]), (0.5, [[1.5, 1, 2], [0.5, 1, 1]]), (0.0, [[1, 0, 2], [0, 1, 1]])],
)
def test_returns_to_go_by_hand(gamma, expected):
    """Behind its last turn a completion stands with that."""
    assert returns_to_go(REWARDS, EARNED, gamma)[0].tolist() == expected


def test_turn_returns_by_hand():
    """At gamma 1/2 the first turns come to 1.5 and .5, the second to 1 and 1, the third to 2 against a last of 1."""
    assert credit("turn_return", gamma=0.5)[0].tolist() == [
        pytest.approx([HALF, HALF, 0, 0, HALF]),
        pytest.approx([-HALF, 0, 0, 0, 0]),
    ]
    assert credit("turn_return", gamma=0.5, ddof=0, eps=0.5)[0, 0].tolist() == pytest.approx([0.5, 0.5, 0, 0, 0.5])


STATES = torch.tensor([[[7, 8, 8], [7, 9, -1]]])
"""Both begin in 7; the first is in 8 twice."""


def test_gigpo_by_hand():
    """Episodes 3 and 1: +-1/sqrt(2). At gamma 1/2, in 7: 1.5 and .5, +-1/sqrt(2); in 8: 1 and 2; in 9 nothing else."""
    assert credit("gigpo", states=STATES, gamma=0.5, step_weight=0.5)[0].tolist() == [
        pytest.approx([1.5 * HALF, 1.5 * HALF, 0, 0.5 * HALF, 1.5 * HALF]),
        pytest.approx([-1.5 * HALF, 0, -HALF, -HALF, 0]),
    ]
    centred = credit("gigpo", states=STATES, gamma=0.5, step_weight=0.5, scale=False)
    assert centred[0].tolist() == [[1.25, 1.25, 0, 0.75, 1.25], [-1.25, 0, -1, -1, 0]]


def test_gigpo_logs_the_share_of_turns_whose_state_another_turn_has():
    logged = {}
    offered = {"turn_rewards": EARNED, "turns": TURNS, "mask": MASK, "log_metric": logged.__setitem__}
    estimate("gigpo", REWARDS, offered | {"states": STATES})
    assert logged == {"advantages/shared_states": 4 / 5}  # all but the turn in 9
    estimate("gigpo", REWARDS, offered | {"states": torch.arange(6).view(1, 2, 3)})
    assert logged == {"advantages/shared_states": 0.0}


def test_states_are_compared_within_their_group():
    both = [torch.cat([x, x]) for x in (REWARDS, EARNED, TURNS, STATES, MASK)]
    both[0][1] *= 10
    alone = credit("gigpo", states=STATES, scale=False)
    assert torch.equal(credit("gigpo", *both, scale=False)[0], alone[0])


def last_pays(groups=5, completions=4, turns=6, time=30):
    """Random rewards at the ends of completions of any number of turns; some cannot be scored."""
    g = torch.Generator().manual_seed(0)
    rewards = torch.randn(groups, completions, generator=g, dtype=torch.float64)
    rewards[0, 1], rewards[1] = NAN, rewards[1, :1]
    count = torch.randint(1, turns + 1, (groups, completions, 1), generator=g)
    number = torch.arange(turns)
    earned = torch.where(number < count, 0.0, NAN).double()
    at_turn = torch.minimum(torch.randint(-1, turns, (groups, completions, time), generator=g), count - 1)
    states = torch.randperm(groups * completions * turns, generator=g).view(groups, completions, turns)
    return rewards, earned, at_turn, torch.where(number < count, states, -1), (at_turn >= 0).long()


@pytest.mark.parametrize(
    ("name", "options"),
    [("turn_return", {}), ("gigpo", {"gamma": 1.0}), ("gigpo", {"gamma": 0.5, "step_weight": 0.0})],
    ids=["turn_return", "gigpo, no state twice", "gigpo, no weight on states"],
)
@pytest.mark.parametrize("paid", ["by the whole", "by the last turn"])
def test_with_rewards_at_last_turns_turn_return_equals_group_exactly(name, options, paid):
    rewards, earned, turns, states, mask = last_pays()
    if paid == "by the last turn":
        last = (~earned.isnan()).sum(-1, keepdim=True) - 1
        earned = earned.scatter(-1, last, rewards.nan_to_num()[..., None])
    found = credit(name, rewards, earned, turns, states, mask, eps=1e-4, **options)
    expected = estimate("group", rewards)[..., None].expand_as(found) * mask
    assert torch.equal(found, expected)
    assert expected.abs().max() > 1


def test_equal_totals_from_different_turns_have_a_signal():
    earned = tensor([[[1.0, 0.0], [0.0, 1.0]]])
    turns = torch.tensor([[[0, 1], [0, 1]]])
    out = credit("turn_return", tensor([[1.0, 1.0]]), earned, turns, mask=torch.ones(1, 2, 2))
    assert out[0].tolist() == [[0.0, pytest.approx(-HALF)], [0.0, pytest.approx(HALF)]]


ROUNDED = [[0.1, 0.2, 0.0], [0.3, 0.0, 0.0], [0.0, 0.1, 0.2], [0.2, 0.1, 0.0]]
"""Turns whose sum is .3, or .30000000000000004."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-4])
@pytest.mark.parametrize("total", ["added up", "as given"])
def test_returns_that_differ_by_rounding_have_no_advantage(total, scale, dtype):
    """At turn 1 all returns are .3; at turn 2 they are .2, 0, .3, .1; without an eps any rounding becomes 1."""
    earned = (tensor(ROUNDED) * scale).to(dtype).double()[None]
    rewards = earned.sum(-1) if total == "added up" else torch.full((1, 4), 0.3 * scale).to(dtype).double()
    turns = torch.arange(3).expand(1, 4, 3)
    first, second, third = credit("turn_return", rewards, earned, turns, mask=torch.ones(1, 4, 3))[0].T
    assert (first == 0).all()
    expected = tensor([0.2, 0.0, 0.3, 0.1]) - 0.15
    assert second.tolist() == pytest.approx((expected / expected.std()).tolist(), abs=1e-5)
    assert third.tolist() == pytest.approx([-0.5, -0.5, 1.5, -0.5], abs=1e-5)  # 0, 0, .2, 0
    states = torch.tensor([[[0, 1, 2]] * 4])
    level = rewards[:, :1].expand(1, 4)  # as `weighted_total` gives it
    of_states = credit("gigpo", level, earned, turns, states, torch.ones(1, 4, 3), gamma=1.0)[0]
    assert (of_states[:, 0] == 0).all()
    torch.testing.assert_close(of_states, torch.stack([first, second, third], dim=1), rtol=1e-5, atol=1e-5)


def test_several_functions_are_weighed_turn_by_turn():
    """2 x [1, 0, 2] + 1 at the end; of the second completion the first function, of weight 2 of 3, alone."""
    rewards = tensor([[[3.0, 1.0], [1.0, NAN]]])
    earned = torch.stack([tensor([[[1.0, 0, 2], [0, 1.0, NAN]]]), tensor([[[0.0, 0, 1], [0, 0, NAN]]])], dim=2)
    tokens = {"turn_rewards": earned, "turns": TURNS, "states": STATES, "mask": MASK}
    settled = objective("grpo", advantage_estimator="turn_return", advantage_kwargs={"eps": 0.0, "gamma": 0.0})
    out = settled.advantages(rewards, tensor([2.0, 1.0]), **tokens)
    assert out[0].tolist() == [  # turns pay 2, 0, 5 and 0, 3: compared 2 with 0, 0 with 3, 5 with 3
        pytest.approx([HALF, HALF, 0, -HALF, HALF]),
        pytest.approx([-HALF, 0, HALF, HALF, 0]),
    ]
    apart = objective(
        "grpo",
        advantage_estimator="turn_return",
        advantage_kwargs={"eps": 0.0, "gamma": 0.0},
        multi_objective_aggregation="average_advantages",
    )
    out = apart.advantages(rewards[..., :1].repeat(1, 1, 2), tensor([1.0, 1.0]), **tokens)
    assert out.shape == MASK.shape


def test_a_kl_in_the_reward_is_paid_at_the_last_turn():
    """It takes 1 of the first completion's 3, whose turns then pay 1, 0, 1 beside 0, 1."""
    options = {"advantage_estimator": "turn_return", "advantage_kwargs": {"eps": 0.0, "gamma": 0.0}}
    settled, weights = objective("rloo", beta=0.5, **options), tensor([1.0])
    kl = 0.5 * MASK * tensor([[[1.0], [0.0]]])
    lowered = settled.less_kl(REWARDS[..., None], weights, MASK, kl)
    tokens = {"turn_rewards": EARNED.unsqueeze(-2), "turns": TURNS, "states": STATES, "mask": MASK, "kl": kl}
    assert settled.advantages(lowered, weights, **tokens)[0].tolist() == [
        pytest.approx([HALF, HALF, 0, -HALF, 0]),
        pytest.approx([-HALF, 0, HALF, HALF, 0]),
    ]


@pytest.mark.parametrize(
    ("name", "sees_turns"), [("turn_return", True), ("gigpo", True), ("group", False), ("reinforce_pp", False)]
)
def test_estimators_that_use_turns(name, sees_turns):
    settled = objective("grpo", advantage_estimator=name)
    assert settled.sees_turns is sees_turns
    assert settled.sees_tokens is (sees_turns or name == "reinforce_pp")
