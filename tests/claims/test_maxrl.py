"""Law of MaxRL: the mean gradient is that of sum pass@k / k up to G - 1."""

import sys
from pathlib import Path

import pytest

from grpo_ext.objective import advantages as package

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "claims"))

import maxrl
from enumeration import enumerated, estimator, moments, objective, prompt


def errors(group, order):
    found = []
    for rate in maxrl.RATES:
        at = prompt(rate, 4, 4)
        found.append(maxrl.error(moments(estimator("maxrl", eps=0.0), [at], group)[0].mean, maxrl.target(at, order)))
    return max(found)


@pytest.mark.parametrize("group", [2, 4, 8, 16])
def test_the_gradient_is_that_of_pass_at_k_over_k_up_to_one_below_the_group(group):
    assert errors(group, group - 1) < 1e-12
    assert errors(group, group) > 1e-2


@pytest.mark.parametrize("group", [2, 8])
def test_the_mean_score_of_the_right_has_all_orders(group):
    for rate in maxrl.RATES:
        at = prompt(rate, 4, 4)
        assert maxrl.error(maxrl.successes(at, group), maxrl.target(at, group)) < 1e-12


def test_the_whole_loss_has_that_gradient_on_every_sequence_of_completions():
    at = prompt(0.3, 1, 2)
    of = objective("maxrl", advantage_kwargs={"eps": 0.0})
    assert maxrl.error(enumerated(of, [at], 4)[0].mean, maxrl.target(at, 3)) < 1e-12


def test_the_law_fails_for_another_divisor(monkeypatch):
    means = package.group_means
    monkeypatch.setattr(package, "group_means", lambda rewards: means(rewards).sqrt())
    assert errors(4, 3) > 1e-2
