"""Distinct advantages of all groups of completions with 0/1 rewards, counted."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "claims"))
import gdpo

COUNTS = {(2, 2): (2, 3, 3), (2, 3): (4, 6, 6), (2, 4): (7, 10, 14), (3, 2): (2, 4, 4)}
"""Rewards and completions: summed first, without the std, GDPO."""


def counts(functions, completions, **kwargs):
    rewards = gdpo.all_groups(functions, completions)
    methods = ("sum_then_normalize", "without std", "normalize_then_sum")
    return tuple(gdpo.distinct(gdpo.advantages(rewards, method, **kwargs)) for method in methods)


@pytest.mark.parametrize("size", COUNTS)
def test_gdpo_keeps_more_distinct_advantages_than_the_sum(size):
    assert counts(*size) == COUNTS[size]


def test_the_paper_s_two_groups_of_two():
    rewards = torch.tensor([[[0, 0], [0, 1]], [[0, 0], [1, 1]]], dtype=torch.float64)
    root = 0.5**0.5
    summed = gdpo.advantages(rewards, "sum_then_normalize")
    torch.testing.assert_close(summed, torch.tensor([[-root, root]] * 2, dtype=torch.float64), rtol=0, atol=1e-12)
    alone = 2 * gdpo.advantages(rewards, "average_advantages")  # a sum, before the batch is normalised
    expected = torch.tensor([[-root, root], [-2 * root, 2 * root]], dtype=torch.float64)
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-12)


def test_a_batch_of_one_prompt_collapses_again():
    assert counts(2, 2, one_by_one=True)[2] == 2


def test_the_law_fails_if_rewards_are_summed_first(monkeypatch):
    monkeypatch.setitem(gdpo.METHODS, "normalize_then_sum", ("sum_then_normalize", "group"))
    assert counts(2, 4)[2] == 7
