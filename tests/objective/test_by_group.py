"""What `overlap: step` relies on: groups that are scored alone, and a loss with one denominator."""

from functools import partial

import pytest
import torch

from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.aggregation import StepTotals, aggregations
from grpo_ext.objective.combinations import combinations
from grpo_ext.objective.estimate import estimate

GROUPS = 6


def scored():
    """Binary rewards of groups that differ, and the turns of their completions."""
    g = torch.Generator().manual_seed(3)
    rewards = (torch.rand(GROUPS, 4, generator=g) < torch.linspace(0.2, 0.9, GROUPS)[:, None]).double()
    turn_rewards = torch.rand(GROUPS, 4, 2, generator=g).double()
    turns = torch.tensor([0, 0, 1, 1, -1]).expand(GROUPS, 4, 5)
    states = torch.randint(0, 2, (GROUPS, 4, 2), generator=g)
    return rewards, {"mask": (turns >= 0).long(), "turn_rewards": turn_rewards, "turns": turns, "states": states}


def alone_and_together(compute, *tensors):
    """Advantages of each group computed by itself, and of all groups at once."""
    alone = torch.cat([compute(*(tensor[i : i + 1] for tensor in tensors)) for i in range(GROUPS)])
    return alone, compute(*tensors)


@pytest.mark.parametrize("name", estimators)
def test_an_estimator_is_by_group_exactly_if_a_group_alone_has_the_same_advantages(name):
    rewards, more = scored()

    def advantages(rewards, *values):
        return estimate(name, rewards, dict(zip(more, values, strict=True)))

    alone, together = alone_and_together(advantages, rewards, *more.values())
    assert torch.allclose(alone, together, rtol=0, atol=1e-12) is estimators.traits(name).by_group


@pytest.mark.parametrize("name", combinations)
def test_a_combination_is_by_group_exactly_if_it_leaves_a_group_alone(name):
    rewards, more = scored()
    both = torch.stack([rewards, more["turn_rewards"].mean(dim=-1)], dim=-1)
    combine = partial(combinations[name], weights=torch.tensor([1.0, 0.5]).double())

    def advantages(rewards):
        return combine(rewards, estimator=lambda values, _: estimate("group", values))

    alone, together = alone_and_together(advantages, both)
    assert torch.allclose(alone, together, rtol=0, atol=1e-12) is combinations.traits(name).by_group


@pytest.mark.parametrize("name", aggregations)
def test_a_share_is_a_sum_over_the_denominator_that_the_aggregation_names(name):
    g = torch.Generator().manual_seed(5)
    per_token, mask = torch.rand(3, 5, generator=g).double(), torch.rand(3, 5, generator=g) < 0.7
    options = {"max_completion_length": 7} if name.endswith("norm") else {}

    def share(**counts):
        totals = StepTotals(*(torch.tensor(float(counts.get(field, 1))) for field in StepTotals._fields))
        return aggregations[name](per_token, mask, totals, **options).item()

    moves = {field for field in StepTotals._fields if share(**{field: 11}) != share()}
    named = aggregations.traits(name).denominator
    assert moves == ({named} if named else {"micro_batches"})
    if named:
        assert share(**{named: 11}) == pytest.approx(share() / 11, rel=1e-12)
