"""Exact drift of the length of wrong answers: positive where a loss divides by the length, else 0."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "claims"))
import length

UNDIVIDED = ("dr_grpo", "luspo", "deepseek_v3", "rloo")


def drift(layout, loss, completions=3, **settings):
    return length.drift(length.Policy(layout, fillers=2), length.settled(loss, **settings), completions)


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_dividing_by_the_length_lengthens_wrong_answers_and_shortens_right_ones(loss):
    found = drift("after", loss)
    assert found["wrong"] > 0.01
    assert found["right"] < -0.01


@pytest.mark.parametrize("loss", UNDIVIDED)
def test_losses_without_that_division_do_neither(loss):
    assert max(map(abs, drift("after", loss).values())) < 1e-12


@pytest.mark.parametrize("loss", ["grpo", "dapo", *UNDIVIDED])
def test_no_loss_does_where_the_model_cannot_know_yet_that_it_is_wrong(loss):
    assert max(map(abs, drift("before", loss).values())) < 1e-12


def test_a_token_mean_does_less_the_more_completions_it_counts():
    divided = drift("after", "grpo")["wrong"]
    shares = [drift("after", "dapo", g)["wrong"] / divided for g in (2, 4)]
    assert 0.4 < shares[0] < 0.6
    assert 0.2 < shares[1] < 0.3


def test_the_law_fails_if_dr_grpo_divides_by_the_length():
    assert drift("after", "dr_grpo", loss_aggregation="seq-mean-token-mean")["wrong"] > 0.01
