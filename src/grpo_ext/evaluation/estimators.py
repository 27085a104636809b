"""avg@k, pass@k and maj@k of one prompt, without replacement and so without bias; means over prompts and intervals."""

import math
from collections.abc import Hashable, Sequence
from functools import cache
from math import comb
from typing import NamedTuple

from scipy.stats import t as student


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that one of k samples is right, 1 - C(n - c, k) / C(n, k).

    Unbiased: the mean over all subsets of k of the n samples. Drawing k of them with replacement, 1 - (1 - c/n)^k,
    is below it wherever 0 < c < n and k > 1. Codex, arXiv:2107.03374.

    Raises:
        ValueError: k is not between 1 and the number of samples.
    """
    _check(samples, k)
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def maj_at_k(answers: Sequence[Hashable], correct: Sequence[bool], k: int) -> float:
    """Probability that the most frequent answer of k samples is right; ties are broken at random.

    The mean over all subsets of k of the n samples, in closed form. With n_a samples of answer a, a share w_a of them
    right, it is sum_a w_a sum_j C(n_a, j) P_a(j) / C(n, k), where P_a(j) counts the ways to take the k - j others
    with no answer above j, each divided by 1 + the number of answers that also have j. An answer of None (none could
    be read) has no vote, and a subset without votes is wrong. Self-consistency, arXiv:2203.11171.

    Raises:
        ValueError: k is not between 1 and the number of samples.
    """
    _check(len(answers), k)
    votes: dict[Hashable, list[bool]] = {}
    for answer, right in zip(answers, correct, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(right)
    unread = sum(answer is None for answer in answers)
    ways = 0.0
    for answer, judged in votes.items():
        if any(judged):
            count, others = len(judged), [len(theirs) for other, theirs in votes.items() if other != answer]
            wins = sum(comb(count, j) * _ways_below(others, unread, j, k - j) for j in range(1, min(k, count) + 1))
            ways += wins * sum(judged) / count
    return ways / comb(len(answers), k)


def _ways_below(others: Sequence[int], unread: int, most: int, draws: int) -> float:
    """Ways to draw from the other answers, none above `most`, each divided by 1 + the number that reach it."""
    ways = {(0, 0): 1}  # by (samples drawn, answers that reach `most`)
    for count in others:
        further: dict[tuple[int, int], int] = {}
        for (drawn, ties), number in ways.items():
            for taken in range(min(count, most, draws - drawn) + 1):
                key = drawn + taken, ties + (taken == most)
                further[key] = further.get(key, 0) + number * comb(count, taken)
        ways = further
    return sum(number * comb(unread, draws - drawn) / (1 + ties) for (drawn, ties), number in ways.items())


def _check(samples: int, k: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} of {samples} samples: give a k between 1 and the number of samples.")


# Means over prompts, with confidence intervals for the mean over all prompts of this kind.


class Mean(NamedTuple):
    """A mean over prompts with its interval."""

    mean: float
    low: float
    high: float
    prompts: int


def mean_of_shares(values: Sequence[float], confidence: float = 0.95) -> Mean:
    r"""Mean of values in [0, 1], one for each prompt, with Wilson's interval for the effective sample size.

    With mean m, variance v over P prompts and t the quantile of Student's distribution with P - 1 degrees of freedom:
    (m + t^2 / 2N +- t sqrt(m (1 - m) / N + t^2 / 4N^2)) / (1 + t^2 / N), N = max(P, P m (1 - m) / v). For shares that
    are 0 or 1, N is P and this is Wilson's interval; unlike m +- t sqrt(v / P) it covers near 0 and 1 as well.
    """
    prompts, mean, variance = _moments(values)
    if prompts < 2:
        return Mean(mean, 0.0, 1.0, prompts)
    t = _quantile(confidence, prompts - 1)
    size = max(prompts, prompts * mean * (1 - mean) / variance) if variance > 0 else prompts
    centre, scale = mean + t * t / (2 * size), 1 + t * t / size
    half = t * math.sqrt(mean * (1 - mean) / size + t * t / (4 * size * size))
    return Mean(mean, max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale), prompts)


def mean_of(values: Sequence[float], confidence: float = 0.95) -> Mean:
    """Mean of unbounded values, one for each prompt, m +- t sqrt(v / P)."""
    prompts, mean, variance = _moments(values)
    if prompts < 2:
        return Mean(mean, -math.inf, math.inf, prompts)
    half = _quantile(confidence, prompts - 1) * math.sqrt(variance / prompts)
    return Mean(mean, mean - half, mean + half, prompts)


@cache
def _quantile(confidence: float, degrees: int) -> float:
    return float(student.ppf(0.5 + confidence / 2, degrees))


def _moments(values: Sequence[float]) -> tuple[int, float, float]:
    """Return the number, mean and unbiased variance of values."""
    if not values:
        return 0, math.nan, math.nan
    mean = math.fsum(values) / len(values)
    return len(values), mean, math.fsum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)
