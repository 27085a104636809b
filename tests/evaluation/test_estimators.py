"""Estimators against the mean over all subsets, and intervals against how often they cover."""

import itertools
import random

import numpy as np
import pytest

from grpo_ext.evaluation.estimators import maj_at_k, mean_of, mean_of_shares, pass_at_k


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_mean_over_all_subsets(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-14)


def majority_by_enumeration(answers, correct, k):
    total = []
    for subset in itertools.combinations(range(len(answers)), k):
        votes = [answers[i] for i in subset if answers[i] is not None]
        if not votes:
            total.append(0.0)
            continue
        most = max(map(votes.count, votes))
        winners = [a for a in dict.fromkeys(votes) if votes.count(a) == most]
        right = [[correct[i] for i in range(len(answers)) if answers[i] == a] for a in winners]
        total.append(sum(sum(r) / len(r) for r in right) / len(winners))
    return sum(total) / len(total)


def test_maj_at_k_is_the_mean_over_all_subsets():
    rng = random.Random(0)
    for _ in range(150):
        n = rng.randint(1, 8)
        answers = [rng.choice(["a", "b", "c", "d", None]) for _ in range(n)]
        right = rng.choice([{"a"}, {"b", "d"}, set()])
        correct = [a in right if rng.random() < 0.9 else a not in right for a in answers]
        for k in range(1, n + 1):
            expected = majority_by_enumeration(answers, correct, k)
            assert maj_at_k(answers, correct, k) == pytest.approx(expected, abs=1e-13), (answers, correct, k)


@pytest.mark.parametrize("k", [0, 5, -1])
def test_k_beyond_the_samples_is_refused(k):
    for estimate in (lambda: pass_at_k(4, 2, k), lambda: maj_at_k("abcd", [True] * 4, k)):
        with pytest.raises(ValueError, match=f"k={k} of 4 samples"):
            estimate()


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("prompts", "a", "b", "n"),
    [(30, 2, 2, 1), (30, 0.5, 0.5, 4), (100, 0.3, 3, 8), (100, 20, 0.5, 4), (500, 0.1, 5, 1), (50, 0.1, 5, 4)],
)
def test_intervals_cover_at_their_rate(prompts, a, b, n):
    rng = np.random.default_rng(0)
    draws, truth = 10_000, a / (a + b)
    shares = rng.binomial(n, rng.beta(a, b, (draws, prompts))) / n
    covered = 0
    for row in shares.tolist():
        found = mean_of_shares(row)
        covered += found.low <= truth <= found.high
    assert 0.93 <= covered / draws <= 0.975


def test_hand_values():
    found = mean_of_shares([1.0, 0.0, 0.5, 0.5])  # v = 1/6, N = max(4, 4 * .25 * 6) = 6, t = 3.18245
    assert (found.mean, found.prompts) == (0.5, 4)
    assert found.low == pytest.approx(0.5 - 3.182446305284263 / (2 * (6 + 3.182446305284263**2) ** 0.5))
    assert found.high == pytest.approx(1 - found.low)
    whole = mean_of_shares([1.0, 1.0, 0.0])  # v = 1/3 is above m (1 - m): N = 3, not 3 * (2/9) * 3 = 2; t = 4.30265
    assert whole.high - whole.low == pytest.approx(
        2 * 4.302652729749464 * (2 / 27 + 4.302652729749464**2 / 36) ** 0.5 / (1 + 4.302652729749464**2 / 3), abs=1e-9
    )
    assert mean_of([1.0, 3.0]).high == pytest.approx(2 + 12.706204736432095)
    assert (mean_of_shares([1.0]).low, mean_of_shares([1.0]).high) == (0, 1)
    assert mean_of_shares([1.0] * 20).low == pytest.approx(20 / (20 + 2.093024054408263**2))
