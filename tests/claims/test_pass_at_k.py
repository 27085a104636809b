"""Law of pass@k training: the mean gradient is that of pass@k, for every k below the size of the group."""

import sys
from pathlib import Path

import pytest

from grpo_ext.objective import advantages as package

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "claims"))

import pass_at_k
from enumeration import enumerated, estimator, moments, prompt


def error(group, k):
    found = []
    for rate in pass_at_k.RATES:
        at = prompt(rate, 2, 2)
        mean = moments(estimator("pass_at_k", k=k), [at], group)[0].mean / pass_at_k.slope(rate, k)
        found.append(((mean - at.rise).abs().max() / at.rise.abs().max()).item())
    return max(found)


@pytest.mark.parametrize(("group", "k"), [(g, k) for g in (2, 4, 8) for k in range(1, g)])
def test_the_gradient_is_that_of_pass_at_k(group, k):
    assert error(group, k) < 1e-10


def test_it_is_so_on_every_sequence_of_completions():
    at = prompt(0.3, 1, 2)
    mean = enumerated(estimator("pass_at_k", k=2), [at], 4)[0].mean
    assert ((mean - pass_at_k.slope(0.3, 2) * at.rise).abs().max()).item() < 1e-12


def test_the_law_fails_without_the_others(monkeypatch):
    rate = package._pass_rate
    monkeypatch.setattr(package, "_pass_rate", lambda n, c, k: rate(n + (n > 3), c, k))
    assert error(4, 2) > 1e-2


def test_the_best_policy_for_pass_at_8_is_not_that_for_pass_at_1():
    one, many = pass_at_k.best(1), pass_at_k.best(8)
    assert one == pytest.approx((0.4, 0.4), abs=1e-2)
    assert many[0] < 0.33
    assert many[1] > 0.8
