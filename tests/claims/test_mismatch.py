"""Laws of the claim on the sampler's mismatch: the weight that each rule leaves, by the length of a completion."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "claims"))

import mismatch
from mismatch import CAP, LENGTHS, RULES, closed_form, kept, two_points

from grpo_ext.objective import sampler_correction


def by_hand(rule: str, n: int, s: float) -> float:
    """Return the expected weight of a completion by its number of pluses, from its product alone."""
    total = 0.0
    for ups in range(n + 1):
        product = math.exp(s * (2 * ups - n)) / math.cosh(s) ** n
        cut = min(product, CAP) if rule == "sequence TIS" else product * (product <= CAP)
        total += math.comb(n, ups) / 2**n * cut
    return total


@pytest.mark.parametrize("n", [1, 16, 256])
@pytest.mark.parametrize("s", [0.05, 0.2])
def test_the_noise_is_a_ratio(n, s):
    log_ratio, probability = two_points(n, s)
    assert probability.sum().item() == pytest.approx(1, abs=1e-11)
    assert (probability * log_ratio.sum(1).exp()).sum().item() == pytest.approx(1, abs=1e-10)


@pytest.mark.parametrize("rule", mismatch.SEQUENCE)
@pytest.mark.parametrize("n", [1, 16, 256])
def test_sequence_rules_leave_what_their_bound_leaves(rule, n):
    assert kept(RULES[rule], n, 0.1) == pytest.approx(by_hand(rule, n, 0.1), abs=1e-10)


@pytest.mark.parametrize("rule", mismatch.SEQUENCE)
def test_the_closed_form_is_the_limit_of_small_noise(rule):
    for n, s in ((256, 0.1), (1024, 0.1), (1024, 0.05)):
        assert kept(RULES[rule], n, s) == pytest.approx(closed_form(rule, n, s), abs=0.03)


def starves(rule: str) -> bool:
    """Return whether a rule leaves less to completions of 1024 tokens than to those of 4."""
    return kept(RULES[rule], LENGTHS[-1], 0.1) < 0.9 * kept(RULES[rule], LENGTHS[0], 0.1)


def test_only_rules_on_the_product_starve_long_completions():
    assert {rule: starves(rule) for rule in RULES} == {
        "token TIS": False,
        "token mask": False,
        "geometric rejection": False,
        "sequence TIS": True,
        "sequence mask": True,
    }
    assert kept(RULES["token TIS"], 1024, 0.1) == pytest.approx(kept(RULES["token TIS"], 1, 0.1), abs=1e-10)


def test_the_law_fails_if_the_product_becomes_a_mean(monkeypatch):
    whole = sampler_correction.ratio_of

    def mean(level, log_ratio, active):
        return whole("geometric" if level == "sequence" else level, log_ratio, active)

    monkeypatch.setattr(sampler_correction, "ratio_of", mean)
    assert not starves("sequence mask")
    assert abs(kept(RULES["sequence mask"], 16, 0.1) - by_hand("sequence mask", 16, 0.1)) > 1e-3


def test_noise_of_more_than_the_bound_rejects_by_the_mean():
    log_ratio, _ = two_points(64, 0.5)
    found = sampler_correction.corrected(
        RULES["geometric rejection"], log_ratio, torch.zeros_like(log_ratio), torch.ones_like(log_ratio)
    )
    assert found.counted.any(1).double().mean() < 0.1
