"""What a sampler says about its draws beside the tokens: their log-probabilities, and the sets it drew them from."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_ext.packing.kept import encoded

TIES = 16
"""Tokens beyond top_k that vLLM is asked for: it may keep all that are as likely as the last one."""
ABSENT_LOGPROB = -9999.0
"""A vLLM server writes this for minus infinity."""


class KeptLog:
    """Records, step by step, which tokens the logits processors of `generate` left to draw from.

    Args:
        rows: rows of the batch.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._counts: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._ids: list[Tensor] = []

    def add(self, scores: Float[Tensor, "live vocabulary"], rows: Int[Tensor, " live"] | None = None) -> None:
        """Add a token of the batch, or of its `rows`; a token of the vocabulary that was removed scores -inf."""
        kept = scores > -torch.inf
        count, vocabulary = kept.sum(dim=1), kept.shape[1]
        inverted = 2 * count > vocabulary
        row, ids = (kept ^ inverted[:, None]).nonzero(as_tuple=True)
        rows = torch.arange(self.rows, device=kept.device) if rows is None else rows
        counts = count.new_zeros(self.rows)
        counts[rows] = torch.where(inverted, count - vocabulary, count)
        self._counts.append(counts.int())
        self._rows.append(rows[row].int())
        self._ids.append(ids.int())

    def sets(self, completions: Sequence[Sequence[int]]) -> list[Int[Tensor, " numbers"]]:
        """Return the sets of each completion, as in `packing.kept`."""
        counts = torch.stack(self._counts, dim=1).cpu()
        rows, ids = torch.cat(self._rows).cpu(), torch.cat(self._ids).cpu()
        sizes = counts.abs().long().sum(dim=1)
        by_row = ids[rows.argsort(stable=True)].split(sizes.tolist())
        found = []
        for of_row, all_ids, completion in zip(counts, by_row, completions, strict=True):
            of_row = of_row[: len(completion)]
            found.append(encoded(of_row, all_ids[: int(of_row.abs().sum())]))
        return found


@dataclass
class Drawn:
    """What is known about one call of a sampler.

    Args:
        keeps: whether the sets are wanted.
    """

    keeps: bool = False
    logps: list[Tensor] = field(default_factory=list)
    """Log-probabilities [batch, time], if the engine knows them."""
    log: KeptLog | None = None
    """Of transformers."""
    sets: list[Tensor] = field(default_factory=list)
    """Of vLLM."""

    def kept(self, completions: Sequence[Sequence[int]]) -> list[Int[Tensor, " numbers"]]:
        """Return the set of each token of the completions, or an empty list if they are not wanted."""
        return self.log.sets(completions) if self.log is not None else self.sets


def returned_sets(
    logprobs: Sequence[Sequence[float | None]], token_ids: Sequence[Sequence[int]], asked: int
) -> Int[Tensor, " numbers"]:
    """Return the sets of a completion from the most likely tokens that vLLM returned for each of its tokens.

    Args:
        logprobs: normalised over the set; a token outside of it has none.
        token_ids: their tokens.
        asked: number of tokens that vLLM was asked for beside the sampled one; 0: it returned all there are.

    Raises:
        RuntimeError: a set may be larger than what vLLM returned.
    """
    ids, counts = list[int](), list[int]()
    for values, tokens in zip(logprobs, token_ids, strict=True):
        inside = [i for value, i in zip(values, tokens, strict=True) if value is None or value > ABSENT_LOGPROB]
        if asked and len(inside) >= asked:
            raise RuntimeError(
                f"vLLM kept {len(inside)} tokens or more at one position, {TIES} beyond top_k: so many are as likely "
                "as the last one that the set is not known. Lower top_k, or leave top_k, top_p and min_p unset."
            )
        ids += inside
        counts.append(len(inside))
    return encoded(torch.tensor(counts, dtype=torch.int32), torch.tensor(ids, dtype=torch.int32))


def sampled_first(
    ids: Sequence[int], logprobs: Sequence[Sequence[float | None]], token_ids: Sequence[Sequence[int]]
) -> list[list[float | None]]:
    """Return the log-probability of each token of a completion, as a list of which TRL reads the first."""
    rows = zip(ids, logprobs, token_ids, strict=True)
    return [[values[tokens.index(sampled)]] for sampled, values, tokens in rows]
