"""Laws of the weight of a prompt by its pass rate."""

import sys
from pathlib import Path

import pytest

from grpo_ext.objective import advantages as package

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "claims"))

import difficulty


@pytest.mark.parametrize(("name", "value"), [("loo", 1.0), ("none", 7 / 8)])
def test_without_a_division_all_prompts_weigh_the_same(name, value):
    assert difficulty.weights(name) == pytest.approx([value] * len(difficulty.RATES), abs=1e-12)


def test_the_std_favours_both_ends_alike_and_more_in_large_groups():
    small, large = difficulty.weights("group"), difficulty.weights("group", 64)
    assert small == pytest.approx(small[::-1], rel=1e-9)
    middle = difficulty.RATES.index(0.5)
    assert all(w > small[middle] for i, w in enumerate(small) if i != middle)
    assert large[1] / large[middle] > small[1] / small[middle] > 1.2
    assert small[0] == pytest.approx(7 / 8**0.5, rel=0.05)  # one right of eight: (G - 1) / sqrt(G)


@pytest.mark.slow
def test_a_std_of_the_batch_favours_them_less():
    batch, group = (difficulty.weights(name) for name in ("batch", "group"))
    assert max(batch) / min(batch) < 1.1 < 1.3 < max(group) / min(group)


def test_maxrl_weighs_hard_prompts_by_a_geometric_sum():
    wanted = [(1 - (1 - p) ** 7) / p for p in difficulty.RATES]
    assert difficulty.weights("maxrl") == pytest.approx(wanted, rel=1e-4)


def test_the_law_fails_without_the_std(monkeypatch):
    std = package._std
    monkeypatch.setattr(package, "_std", lambda *args, **named: std(*args, **named) * 0 + 1)
    found = difficulty.weights("group")
    assert max(found) == pytest.approx(min(found))


def test_no_estimator_is_left_out():
    credit = {"turn_return", "gigpo", "gtpo", "tpo", "iw_opd"}  # which see more than rewards
    assert set(difficulty.ESTIMATORS) == set(package.estimators) - credit
