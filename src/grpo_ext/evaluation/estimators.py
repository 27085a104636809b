"""avg@k, pass@k and maj@k of one prompt from n >= k samples, without replacement and so without bias."""

from collections.abc import Hashable, Sequence
from math import comb


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
