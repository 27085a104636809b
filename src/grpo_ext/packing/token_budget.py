"""Pieces of a micro-batch whose forward computes at most a number of tokens (`micro_batch_tokens`).

Where prompts are shared, a piece has whole groups or parts of them, and a prompt counts once; elsewhere it has rows of
about the same length, and padding counts too. Cutting a piece again leaves it whole, so that old log-probabilities and
the loss compute the same pieces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from grpo_ext.objective.trajectory import paths
from grpo_ext.packing.layout import groups_of
from grpo_ext.packing.micro_batches import PARENTS, TOKENS, MicroBatch, active_columns, rows_of
from grpo_ext.packing.policy import PrefixSharing, Scores

Piece = list[int]
"""Numbers of rows, ascending."""


@dataclass(frozen=True)
class Part:
    """Rows of a micro-batch that one forward computes."""

    inputs: MicroBatch
    active: Tensor | None = None
    """Rows of it that have a gradient; None: all."""
    rows: Tensor | None = None
    """Their numbers in the micro-batch; None: all."""

    @property
    def is_spare(self) -> bool:
        """Whether it only makes up the number of forwards."""
        return self.rows is not None and not len(self.rows)


@dataclass(frozen=True)
class TokenBudget:
    """Cuts micro-batches.

    Args:
        tokens: the most that a forward computes, unless a single row has more.
        sharing: decides which rows share their prompts.
        agreed: returns the largest number of forwards of any process; None: they need not be the same.
    """

    tokens: int
    sharing: PrefixSharing
    agreed: Callable[[int], int] | None = None

    def cut(self, input_ids: Tensor, mask: Tensor, completion: int, parents: Tensor | None = None) -> list[Tensor]:
        """Return the rows of each piece of a batch, whose last `completion` columns are completions."""

        def computed(piece: Piece) -> int:
            rows = torch.tensor(piece, device=input_ids.device)
            left, right = self.columns(mask[rows], completion)
            of_rows = None if parents is None else parents[rows, :right]
            columns = slice(left, start + right)
            layout, _ = self.sharing.arranged(input_ids[rows, columns], mask[rows, columns], right, of_rows)
            return padded.tokens(piece) if layout is None else layout.tokens

        def fits(piece: Piece) -> bool:
            return len(piece) <= 1 or computed(piece) <= self.tokens

        active, start = mask.bool().cpu().numpy(), mask.shape[1] - completion
        padded = Padded.of(active, completion, parents, trimmed=self.sharing.possible)
        every = list(range(len(active)))
        pieces = [every]
        if not fits(every):
            pieces = []
            if self.sharing.possible:
                ids = input_ids.cpu().numpy()
                groups = groups_of(ids[:, :start], active[:, :start])
                packed = by_group(groups, active[:, :start].sum(axis=1) - 1, padded.lengths, self.tokens)
                pieces = [piece for piece in packed if fits(piece)]
            missing = sorted(set(every).difference(*pieces))
            pieces += padded.by_length(missing, self.tokens)
        return [torch.tensor(sorted(piece), dtype=torch.long, device=input_ids.device) for piece in pieces]

    def columns(self, mask: Tensor, completion: int) -> tuple[int, int]:
        """Return the first column that some row of a piece has, and the columns of its completions.

        Before prompts of a model with absolute positions no column is left out.
        """
        left, right = active_columns(mask[:, :-completion], mask[:, -completion:])
        return left if self.sharing.possible else 0, right

    def parts(self, inputs: MicroBatch, active: Tensor | None) -> list[Part]:
        """Cut a micro-batch by its `active` rows; the last part has the others too."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        at = torch.arange(len(ids), device=ids.device) if active is None else active.nonzero()[:, 0]
        parents = inputs[PARENTS][at] if PARENTS in inputs else None
        pieces = [at[rows] for rows in self.cut(ids[at], mask[at], inputs["completion_ids"].shape[1], parents)]
        spare = 0 if self.agreed is None else self.agreed(len(pieces)) - len(pieces)
        if len(pieces) == 1 and not spare:
            return [Part(inputs, active)]
        if active is not None:
            pieces[-1] = torch.cat([pieces[-1], (~active).nonzero()[:, 0]]).sort().values
        parts = [Part(rows_of(inputs, rows), None if active is None else active[rows], rows) for rows in pieces]
        token = cast(MicroBatch, {name: value[:1] for name, value in cast(dict, inputs).items() if name in TOKENS})
        none = torch.zeros_like(token["completion_ids"][:, 0], dtype=torch.bool)
        return [*[Part(token, none, at[:0])] * spare, *parts]


@dataclass(frozen=True)
class Padded:
    """Sizes of the rows of a batch in a padded forward."""

    spans: Int[np.ndarray, " rows"]
    """Columns of the prompt."""
    lengths: Int[np.ndarray, " rows"]
    """Live tokens of the completion."""
    contexts: Int[np.ndarray, " rows"]
    """Rows of the forward: several for a trajectory whose context was rewritten."""

    @classmethod
    def of(
        cls, active: Bool[np.ndarray, "rows width"], completion: int, parents: Tensor | None, *, trimmed: bool
    ) -> "Padded":
        """Measure rows; a forward of fewer rows has fewer columns of padding before prompts if it may be `trimmed`."""
        start, lengths = active.shape[1] - completion, active[:, -completion:].sum(axis=1)
        first = active[:, :start].argmax(axis=1) if trimmed else np.zeros(len(active), int)
        contexts = np.ones(len(active), int)
        if parents is not None:
            known = parents.cpu().numpy()
            contexts = np.array([len(paths(row[:n].tolist(), start)) for row, n in zip(known, lengths, strict=True)])
        return cls(start - first, lengths, contexts)

    def tokens(self, piece: Piece) -> int:
        """Return the tokens that the padded forward of some rows computes."""
        width = self.spans[piece].max() + max(1, self.lengths[piece].max())
        return int(width * self.contexts[piece].sum())

    def by_length(self, rows: Piece, most: int) -> list[Piece]:
        """Cut rows into pieces of at most `most` tokens, the longest together."""
        pieces: list[Piece] = []
        for row in sorted(rows, key=lambda row: -(self.spans[row] + self.lengths[row])):
            if pieces and self.tokens([*pieces[-1], row]) <= most:
                pieces[-1].append(row)
            else:
                pieces.append([row])
        return pieces


def by_group(
    groups: Sequence[Piece], leads: Int[np.ndarray, " rows"], lengths: Int[np.ndarray, " rows"], most: int
) -> list[Piece]:
    """Cut groups of rows with one prompt into pieces that compute at most `most` tokens, if prompts are shared.

    Args:
        groups: rows with the same prompt.
        leads: tokens of each row's prompt that its group shares: all but the last.
        lengths: tokens of each row's completion.
        most: tokens of a piece with more than one row.
    """
    parts: list[tuple[int, Piece]] = []
    for group in groups:
        total, part = int(leads[group[0]]), list[int]()
        for row in group:
            if part and total + lengths[row] > most:
                parts.append((total, part))
                total, part = int(leads[row]), []
            total += int(lengths[row])
            part.append(row)
        parts.append((total, part))
    pieces: list[tuple[int, Piece]] = []
    for size, part in sorted(parts, key=lambda part: -part[0]):
        place = next((i for i, (total, _) in enumerate(pieces) if total + size <= most), len(pieces))
        total, rows = pieces[place] if place < len(pieces) else (0, [])
        pieces[place : place + 1] = [(total + size, [*rows, *part])]
    return [sorted(rows) for _, rows in pieces]


def within_budget(
    limit: TokenBudget,
    score: Callable[..., Scores],
    input_ids: Tensor,
    mask: Tensor,
    completion: int,
    parents: Tensor | None,
    support: Sequence[Tensor] | None,
    routes: Sequence[Tensor] | None,
) -> Scores:
    """Score the last `completion` columns of rows [rows, width] piece by piece, by `PrefixSharing.scores`.

    A piece has no column that is padding in all of its rows (`TokenBudget.columns`). Processes agree on the number of
    forwards before the first one, since forwards hold collectives too.
    """
    pieces, start = limit.cut(input_ids, mask, completion, parents), input_ids.shape[1] - completion
    logps: list[Tensor] = []
    entropies: list[Tensor] = []
    alone = limit.agreed is None or torch.is_grad_enabled()  # with a gradient, `parts` has agreed on them
    spare = 0 if alone else cast(Callable[[int], int], limit.agreed)(len(pieces)) - len(pieces)
    for rows in pieces:
        left, right = limit.columns(mask[rows], completion)
        part = input_ids[rows, left : start + right], mask[rows, left : start + right], right, len(rows)
        of_rows = None if parents is None else parents[rows, :right]
        sets, ways = (None if x is None else [x[row] for row in rows.tolist()] for x in (support, routes))
        scores = score(*part, parents=of_rows, support=sets, routes=ways)
        for found, values in zip((logps, entropies), scores, strict=False):
            if values is not None:
                found.append(torch.nn.functional.pad(values, (0, completion - right)))
    one = input_ids[:1, start - 1 : start + 1]
    for _ in range(spare):
        score(one, torch.ones_like(one), 1, 1)
    order = torch.cat(pieces).argsort()
    return torch.cat(logps)[order], torch.cat(entropies)[order] if entropies else None, None
