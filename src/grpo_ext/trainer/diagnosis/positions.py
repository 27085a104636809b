"""Places in completions at which sampler and policy are compared: by depth, and by turn.

A sampler does not know where a completion will end, so its faults begin at a depth or at a turn, never at a share of
the length. Depth is absolute: completions of any length add to the same means. Where contexts were rewritten, both are
counted in the context that a token was sampled in.
"""

import torch
from jaxtyping import Int
from torch import Tensor

MISMATCH = "sampling/mismatch"
DEPTHS: dict[str, tuple[int, int | None]] = {
    f"{MISMATCH}_from_0": (0, 128),
    f"{MISMATCH}_from_128": (128, 1024),
    f"{MISMATCH}_from_1k": (1024, 8192),
    f"{MISMATCH}_from_8k": (8192, 65536),
    f"{MISMATCH}_from_64k": (65536, None),
}
"""By metric, the slice of a completion's tokens, those of tools and environments included."""
FIRST_TURN, LATER_TURNS = f"{MISMATCH}_first_turn", f"{MISMATCH}_later_turns"
DEFINITIONS: dict[str, str] = {
    **{
        name: f"the same over tokens {first + 1:,} {f'to {end:,}' if end else 'and deeper'} of each completion"
        for name, (first, end) in DEPTHS.items()
    },
    FIRST_TURN: "the same over the first turn of completions with several turns",
    LATER_TURNS: "the same over the later turns of these",
}
"""Names in the log, with their definitions."""


def later_turns(
    written: Int[Tensor, "rows time"], parents: Int[Tensor, "rows time"] | None = None
) -> Int[Tensor, "rows time"]:
    """Return 1 for tokens of each row's second and later turns, 0 for all others.

    Args:
        written: 1 for tokens that the policy wrote. A turn is a run of them, each behind the one before.
        parents: as in a micro-batch; None where each token is behind the one before.
    """
    goes_on = torch.nn.functional.pad(written.bool()[:, :-1], (1, 0))
    if parents is not None:
        goes_on &= parents == _before(parents)
    begins = written.bool() & ~goes_on
    return written * (begins.cumsum(dim=1) > 1)


def depths(parents: Int[Tensor, "rows time"]) -> Int[Tensor, "rows time"]:
    """Return the place of each token behind the prompt in its own context: 0 for the first, and inside the prompt."""
    places = (_before(parents) + 1).repeat(len(parents), 1)
    for row, column in (parents != _before(parents)).nonzero().tolist():
        parent = int(parents[row, column])
        depth = int(places[row, parent]) + 1 if parent >= 0 else parent + 1
        places[row, column:] += depth - places[row, column]
    return places.clamp(min=0)


def _before(parents: Tensor) -> Tensor:
    return torch.arange(-1, parents.shape[1] - 1, device=parents.device)


def by_place(
    values: Tensor, counted: Tensor, later: Tensor | None, parents: Tensor | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return values and masks of each place, always all of them, so that sums of different batches add up.

    Args:
        values: of each token, [rows, time].
        counted: tokens that count.
        later: what `later_turns` returned; None where no row has several turns.
        parents: as of `later_turns`.
    """
    if parents is None:
        by_name = {name: (values[:, first:end], counted[:, first:end]) for name, (first, end) in DEPTHS.items()}
    else:
        depth = depths(parents)
        inside = {name: (depth >= first) & (depth < (end or torch.inf)) for name, (first, end) in DEPTHS.items()}
        by_name = {name: (values, counted & here) for name, here in inside.items()}
    later = torch.zeros_like(counted) if later is None else later.bool()
    several = counted & later.any(dim=1, keepdim=True)
    return by_name | {FIRST_TURN: (values, several & ~later), LATER_TURNS: (values, several & later)}
