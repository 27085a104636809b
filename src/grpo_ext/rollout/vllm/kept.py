"""The tokens that vLLM kept, read from the most likely ones, whose log-probabilities it returns."""

from collections.abc import Sequence

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
