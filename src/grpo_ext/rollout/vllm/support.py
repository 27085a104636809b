"""vLLM's answers: log-probabilities of the sampled tokens, and the tokens that it kept, from the most likely ones."""

import math
from collections.abc import Sequence

from grpo_ext.rollout.samplers import Sampled
from grpo_ext.rollout.support_log import encoded_lists

TIES = 16
"""Tokens beyond top_k that vLLM is asked for: it may keep all that are as likely as the last one."""
MINUS_INFINITY = -9999.0
"""A server's way to write minus infinity."""

Values = Sequence[Sequence[float | None]]
"""Log-probabilities at each token of a completion; None for NaN."""


def returned_sets(logprobs: Values, token_ids: Sequence[Sequence[int]], asked: int) -> list[list[int]]:
    """Return the tokens that were kept at each token of a completion.

    Args:
        logprobs: normalised over the set; a token outside of it has none.
        token_ids: their tokens.
        asked: number of tokens that vLLM was asked for beside the sampled one; 0: it returned all there are.

    Raises:
        RuntimeError: a set may be larger than what vLLM returned.
    """
    sets = [
        [i for value, i in zip(values, tokens, strict=True) if value is None or value > MINUS_INFINITY]
        for values, tokens in zip(logprobs, token_ids, strict=True)
    ]
    if asked and (largest := max(map(len, sets), default=0)) >= asked:
        raise RuntimeError(
            f"vLLM kept {largest} tokens or more at one position, {TIES} beyond top_k: so many are as likely as the "
            "last one that the set is not known. Lower top_k, or leave top_k, top_p and min_p unset."
        )
    return sets


def sampled_first(
    ids: Sequence[int], logprobs: Values, token_ids: Sequence[Sequence[int]]
) -> list[list[float | None]]:  # fmt: skip
    """Return the log-probability of each token of a completion, as a list; TRL reads its first."""
    rows = zip(ids, logprobs, token_ids, strict=True)
    return [[values[tokens.index(sampled)]] for sampled, values, tokens in rows]


def read(ids: list[int], values: Values, tokens: Sequence[Sequence[int]] | None, *, bound: int | None) -> Sampled:
    """Return a completion from vLLM's answer.

    Args:
        ids: the sampled tokens.
        values: log-probabilities at each of them, the sampled one's first unless `tokens` are given.
        tokens: whose log-probabilities these are.
        bound: number of tokens that vLLM was asked for, as in `returned_sets`; None: the sets are not wanted.

    Raises:
        RuntimeError: a set may be larger than what vLLM returned.
    """
    kept = None
    if tokens is not None:
        kept = None if bound is None else encoded_lists(returned_sets(values, tokens, bound))
        values = sampled_first(ids, values, tokens)
    return Sampled(ids, [math.nan if known[0] is None else known[0] for known in values], kept)
