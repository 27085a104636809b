"""Shares of groups that are all right, all wrong, or mixed."""

import math

import pytest
import torch

from grpo_ext.trainer.advantages import GroupMeans, group_shares

NONE = math.nan
KINDS = {
    "all right": ([[1.0, 1.0]], (1, 0, 0)),
    "more than 1 is right too": ([[1.0, 3.0]], (1, 0, 0)),
    "all wrong": ([[0.0, 0.0]], (0, 1, 0)),
    "alike below 1": ([[0.5, 0.5]], (0, 1, 0)),
    "mixed": ([[0.0, 1.0]], (0, 0, 1)),
    "partial credit": ([[0.2, 0.5]], (0, 0, 1)),
    "one is not scored beside a right one": ([[1.0, NONE]], (0, 0, 1)),
    "one is not scored beside a wrong one": ([[0.0, NONE]], (0, 1, 0)),
    "a group without a score is left out": ([[NONE, NONE], [1.0, 1.0]], (1, 0, 0)),
    "each kind": ([[1.0, 1.0], [0.0, 0.0], [-1.0, 1.0], [0.0, 0.0]], (0.25, 0.5, 0.25)),
}


@pytest.mark.parametrize(("rewards", "expected"), KINDS.values(), ids=KINDS.keys())
def test_kinds_of_groups(rewards, expected):
    found = group_shares(torch.tensor(rewards).unsqueeze(-1), ["mine"])
    assert found == dict(zip(("groups/all_right", "groups/all_wrong", "groups/mixed"), expected, strict=True))


def test_accuracy_judges_if_there_is_one_and_else_the_first_reward():
    rewards = torch.tensor([[[0.0, 1.0], [1.0, 1.0]]])  # one group: the first reward mixed, the second all right
    assert group_shares(rewards, ["format", "accuracy"])["groups/all_right"] == 1
    assert group_shares(rewards, ["format", "other"])["groups/mixed"] == 1


def test_groups_without_a_score_have_no_shares():
    assert group_shares(torch.full((2, 2, 1), NONE), ["mine"]) == {}


def test_a_history_that_is_restored_has_nothing_of_before():
    means = GroupMeans(4)
    means.remember(torch.rand(2, 4, 1), torch.rand(2, 4))
    kept = means.to_list()
    means.load(kept)
    assert means.to_list() == kept
