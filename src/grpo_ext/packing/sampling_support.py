"""Kept sets: the tokens that a truncated sampler (top_p, top_k, min_p) left to draw from, for each token it drew.

The sampler's probabilities are normalised over these tokens, so the policy's have to be too: the set is fixed when the
token is drawn, and the mean importance ratio over draws is 1 for any policy. DeepSeek-V3.2, arXiv:2512.02556.

A completion's sets are one tensor of whole numbers, so that batches, checkpoints and dumps hold them as they are:
the number of tokens, a count for each, and the ids of all. A positive count is that of the set's ids; of a larger set
the ids that were left out are stored, with a negative count. 0: no token was left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

SUPPORTS: Final = "sampling_supports"
"""Name of the sets in a micro-batch: a list with one tensor for each row."""


def encoded(counts: Int[Tensor, " tokens"], ids: Int[Tensor, " ids"]) -> Int[Tensor, " numbers"]:
    """Return the sets of a completion as one tensor."""
    return torch.cat([torch.tensor([len(counts)]), counts.cpu(), ids.cpu()]).int()


def decoded(
    sets: Int[Tensor, " numbers"], most: int | None = None
) -> tuple[Int[Tensor, " tokens"], Int[Tensor, " ids"]]:
    """Return counts and ids of the sets of a completion, or of its first tokens, at `most` so many."""
    tokens = int(sets[0])
    counts = sets[1 : tokens + 1][:most]
    return counts, sets[tokens + 1 :][: int(counts.abs().sum())]


@dataclass(frozen=True)
class SamplingSupport:
    """Sets of the positions of one forward."""

    ids: Int[Tensor, " ids"]
    begins: Int[Tensor, " positions"]
    """Place of each position's first id."""
    counts: Int[Tensor, " positions"]
    """Number of ids at each position, negative where they are those left out."""

    @classmethod
    def of(cls, rows: Sequence[Tensor], time: int, device: torch.device) -> "SamplingSupport":
        """Join the sets of completions [rows, time]; padding and tokens without a set keep everything."""
        counts = torch.zeros(len(rows), time, dtype=torch.long)
        begins, ids, first = torch.zeros_like(counts), list[Tensor](), 0
        for row, sets in enumerate(rows):
            of_row, ids_of_row = decoded(sets.cpu(), time)
            ends = of_row.abs().long().cumsum(dim=0)
            counts[row, : len(of_row)] = of_row
            begins[row, : len(of_row)] = first + (ends - of_row.abs())
            ids.append(ids_of_row)
            first += len(ids_of_row)
        joined = torch.cat(ids) if ids else torch.zeros(0, dtype=torch.int32)
        return cls(joined.to(device), begins.flatten().to(device), counts.flatten().to(device))

    def of_positions(
        self, mask: Shaped[Tensor, "rows width"], completion: int, positions: int
    ) -> "SamplingSupport":  # fmt: skip
        """Return the sets of the positions that TRL's LM head computes for these padded rows, in their order.

        It computes the active tokens of completions, or, without a kernel that selects them, all predictions of a row.

        Raises:
            ValueError: it computes another number of positions.
        """
        (count, width), active = mask.shape, mask[:, -completion:].bool()
        place = torch.arange(count * completion, device=active.device).view(count, completion)
        if positions == int(active.sum()):
            places = place[active]
        elif positions == count * (width - 1):
            places = torch.nn.functional.pad(place, (width - 1 - completion, 0), value=-1).flatten()
        else:
            what = f"{positions} positions for rows of {width} tokens, {int(active.sum())} of them completions"
            raise ValueError(f"TRL's LM head computes {what}: the tokens that the sampler kept cannot be assigned.")
        return self.at(places)

    def moved(self, places: Int[Tensor, "rows completion"], sizes: Sequence[int]) -> list["SamplingSupport"]:
        """Return the sets of batches of so many positions, where tokens have `places` in all of them, or -1."""
        active = places.flatten() >= 0
        source = places.new_full((sum(sizes),), -1)
        source[places.flatten()[active]] = active.nonzero()[:, 0]
        return [self.at(part) for part in source.split(list(sizes))]

    def at(self, places: Int[Tensor, " positions"]) -> "SamplingSupport":
        """Return the sets at `places` among these; a negative place has no set."""
        counts = torch.where(places >= 0, self.counts[places.clamp(min=0)], 0)
        return SamplingSupport(self.ids, self.begins[places.clamp(min=0)], counts)

    def left_out(self, rows: slice, vocabulary: int) -> Bool[Tensor, "positions vocabulary"]:
        """Return which tokens of the vocabulary the sampler could not have drawn, at the positions `rows`."""
        begins, counts = self.begins[rows], self.counts[rows]
        sizes = counts.abs()
        of_position = torch.repeat_interleave(sizes)
        within = torch.arange(len(of_position), device=sizes.device) - (sizes.cumsum(dim=0) - sizes)[of_position]
        listed = torch.zeros(len(counts), vocabulary, dtype=torch.bool, device=sizes.device)
        listed[of_position, self.ids[begins[of_position] + within].long()] = True
        return listed ^ (counts > 0)[:, None]
