"""A record of a sampler's draws: log-probabilities of the tokens, and the sets they were drawn from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_ext.packing.sampling_support import decoded, encoded


class SupportLog:
    """Records, step by step, which tokens the logits processors of `generate` left to draw from."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._counts: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._ids: list[Tensor] = []

    def add(self, scores: Float[Tensor, "active vocabulary"], rows: Int[Tensor, " active"] | None = None) -> None:
        """Add a token of the batch, or of its `rows`; a token of the vocabulary that was removed scores -inf."""
        support = scores > -torch.inf
        count, vocabulary = support.sum(dim=1), support.shape[1]
        inverted = 2 * count > vocabulary
        row, ids = (support ^ inverted[:, None]).nonzero(as_tuple=True)
        rows = torch.arange(self.rows, device=support.device) if rows is None else rows
        counts = count.new_zeros(self.rows)
        counts[rows] = torch.where(inverted, count - vocabulary, count)
        self._counts.append(counts.int())
        self._rows.append(rows[row].int())
        self._ids.append(ids.int())

    def sets(self, completions: Sequence[Sequence[int]]) -> list[Int[Tensor, " numbers"]]:
        """Return the sets of each completion, as in `packing.sampling_support`."""
        counts = torch.stack(self._counts, dim=1).cpu()
        rows, ids = torch.cat(self._rows).cpu(), torch.cat(self._ids).cpu()
        by_row = ids[rows.argsort(stable=True)].split(counts.abs().long().sum(dim=1).tolist())
        sets = map(encoded, counts, by_row)
        return [encoded(*decoded(of_row, len(ids))) for of_row, ids in zip(sets, completions, strict=True)]


class DrawLog:
    """The last logits processor of `generate`: records the log-probability of each token that it draws.

    Args:
        support: records the tokens that may be drawn too.
        draw: draws a token of each row by their probabilities, in a step of this number; None: `generate` does.
    """

    def __init__(self, support: SupportLog | None = None, draw: Callable[[Tensor, int], Tensor] | None = None) -> None:
        self.support, self.draw = support, draw
        self._drawn: list[Tensor] = []
        self._last: Tensor | None = None

    def __call__(self, ids: Int[Tensor, "rows tokens"], scores: Float[Tensor, "rows vocabulary"]) -> Tensor:
        """Note the last token, which was drawn by the scores before these; return these, or the token that is next."""
        self._note(ids)
        self._last = scores.float().log_softmax(dim=1)
        if self.support is not None:
            self.support.add(scores)
        if self.draw is None:
            return scores
        token = self.draw(self._last.exp(), len(self._drawn))
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)

    def _note(self, ids: Tensor) -> None:
        if self._last is not None:
            self._drawn.append(self._last.gather(1, ids[:, -1:]))

    def logps(self, output: Int[Tensor, "rows tokens"]) -> Float[Tensor, "rows drawn"]:
        """Return the log-probabilities of the tokens drawn, from what `generate` has returned."""
        self._note(output)
        return torch.cat(self._drawn, dim=1)


@dataclass
class SamplerRecord:
    """The record of one call of a sampler."""

    logps: list[Tensor] = field(default_factory=list)
    """Log-probabilities [batch, time], if the engine knows them."""
    log: SupportLog | None = None
    """The processor of transformers, if the sets are wanted."""

    def supports(self, completions: Sequence[Sequence[int]]) -> list[Int[Tensor, " numbers"]]:
        """Return the set of each token of the completions, or an empty list if they are not wanted."""
        return [] if self.log is None else self.log.sets(completions)


def encoded_lists(sets: Sequence[Sequence[int]]) -> Int[Tensor, " numbers"]:
    """Return the sets of a completion as one tensor, from the tokens that were left at each of its tokens."""
    counts, ids = [len(support) for support in sets], [i for support in sets for i in support]
    return encoded(torch.tensor(counts, dtype=torch.int32), torch.tensor(ids, dtype=torch.int32))
