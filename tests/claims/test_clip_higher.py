"""What one generation of clipped updates does to rare and to likely right tokens, by enumeration."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "claims"))
import clip_higher


def test_a_higher_border_lets_a_rare_right_token_grow_more():
    low, high, free = (clip_higher.growth(0.01, e, rate=1.0) for e in clip_higher.EPSILONS)
    assert 1.2 < low < high < free


def test_a_likely_token_is_never_clipped():
    assert clip_higher.growth(0.9, 0.2, rate=1.0) == clip_higher.growth(0.9, 10.0, rate=1.0)


def test_borders_that_the_first_update_passes_are_the_same():
    assert clip_higher.growth(0.05, 0.2, rate=4.0) == clip_higher.growth(0.05, 0.28, rate=4.0) > 1.28


def test_the_law_fails_if_the_surrogate_ignores_the_upper_border(monkeypatch):
    clip = clip_higher.surrogates["clip"]
    monkeypatch.setattr(clip_higher, "surrogates", {"clip": lambda *args, **options: clip(*args)})
    assert clip_higher.growth(0.01, 0.2, rate=1.0) == clip_higher.growth(0.01, 0.28, rate=1.0)


@pytest.mark.parametrize("success", [0.1, 0.5])
def test_expected_advantages_cancel(success):
    right, wrong = clip_higher.mean_advantages(success)
    assert right > 0 > wrong
    assert math.isclose(success * right, -(1 - success) * wrong, rel_tol=1e-10)


def test_entropy_falls_less_under_a_higher_border_where_updates_are_small():
    def after(epsilon_high):
        logits, rewarded = clip_higher.policy(0.2, 0.05, 0.01)
        for _ in range(2):
            logits = clip_higher.generation(logits, rewarded, epsilon_high, rate=1.0)
        return clip_higher.entropy(logits)

    start = clip_higher.entropy(clip_higher.policy(0.2, 0.05, 0.01)[0])
    assert after(10.0) < after(0.2) < after(0.28) < start


def test_pass_rate_of_samples():
    assert clip_higher.pass_rate(0, 8, 2) == 0
    assert clip_higher.pass_rate(7, 8, 2) == 1
    assert math.isclose(clip_higher.pass_rate(2, 4, 2), 1 - 1 / 6)
