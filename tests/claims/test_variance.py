"""Laws of the claim of variance, and of the exact moments that other claims use."""

import math
import sys
from pathlib import Path

import pytest
import torch

from grpo_ext.objective import advantages as package

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "claims"))

import variance
from enumeration import enumerated, estimator, moments, objective, prompt, weight

SMALL = [prompt(0.3, 1, 2), prompt(0.7, 1, 2)]


@pytest.mark.parametrize("name", [*variance.ESTIMATORS][::3])
def test_moments_are_those_of_every_sequence_of_completions(name):
    for found, wanted in zip(moments(estimator(name), SMALL, 2), enumerated(estimator(name), SMALL, 2), strict=True):
        torch.testing.assert_close(found.mean, wanted.mean, rtol=0, atol=1e-12)
        assert found.variance == pytest.approx(wanted.variance, abs=1e-12)


@pytest.mark.parametrize("loss_type", ["grpo", "gspo", "topr"])
def test_moments_of_whole_losses_are_those_of_every_sequence_of_completions(loss_type):
    found, wanted = moments(objective(loss_type), SMALL, 2)[0], enumerated(objective(loss_type), SMALL, 2)[0]
    torch.testing.assert_close(found.mean, wanted.mean, rtol=0, atol=1e-12)
    assert found.variance == pytest.approx(wanted.variance, abs=1e-12)


def bias():
    return max(abs(weight(moments(estimator("loo"), [at], 4)[0], at) - 1) for at in map(prompt, variance.RATES))


def test_leave_one_out_is_unbiased():
    assert bias() < 1e-12


def test_a_mean_that_holds_the_completion_itself_is_not(monkeypatch):
    monkeypatch.setattr(package, "_centred", lambda rewards: (rewards - rewards.mean(-1, keepdim=True)) * 0.9)
    assert bias() == pytest.approx(0.1)


def test_a_baseline_has_less_noise_than_none_from_middle_pass_rates_on():
    for rate in (0.25, 0.5, 0.75, 0.95):
        plain, loo = (moments(of, [prompt(rate)], 8)[0].noise for of in (None, estimator("loo")))
        assert loo < plain
    plain, loo = (moments(of, [prompt(0.02)], 8)[0].noise for of in (None, estimator("loo")))
    assert loo > plain


def log_beta(a, b):
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def mean_square(alpha, beta, a, b):
    """E[A^2] where A = (r - p) / BetaPDF(p; alpha, beta) and p ~ Beta(a, b)."""
    return math.exp(2 * log_beta(alpha, beta) + log_beta(a + 3 - 2 * alpha, b + 3 - 2 * beta) - log_beta(a, b))


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (2.0, 2.0), (1.0, 4.0)])
def test_the_beta_of_bnpo_has_the_least_mean_square(a, b):
    fit = package.fit_beta(variance.quantiles(a, b, 4000))
    assert (fit.alpha, fit.beta) == pytest.approx((1 + a / 3, 1 + b / 3), rel=2e-3)
    least = mean_square(fit.alpha, fit.beta, a, b)
    for x in (-0.1, 0.0, 0.1):
        for y in (-0.1, 0.0, 0.1):
            assert x == y == 0 or mean_square(fit.alpha + x, fit.beta + y, a, b) > least
    found = variance.population(a, b)["beta"][0]
    assert found == pytest.approx(least, rel=2e-2)


def test_another_fit_has_more(monkeypatch):
    least = variance.population(2.0, 2.0)["beta"][0]
    fit = package.fit_beta
    monkeypatch.setattr(package, "fit_beta", lambda means: fit(means, flatten=1.5))
    assert variance.population(2.0, 2.0)["beta"][0] > 1.02 * least


def test_at_equal_progress_no_division_has_less_noise_than_none():
    for a, b in variance.POPULATIONS:
        found = variance.population(a, b)
        assert found["none"][1] < min(found["group"][1], found["beta"][1])


def test_the_bias_of_a_batch_falls_as_it_grows():
    two, four = (abs(variance.tilt("reinforce_pp_baseline", n) - 1) for n in (2, 4))
    assert four < 0.7 * two
    assert variance.tilt("group", 2) == pytest.approx(variance.tilt("group", 4), rel=1e-12)
