"""Means over prompts, with confidence intervals for the mean over all prompts of this kind."""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from scipy.stats import t as student


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
