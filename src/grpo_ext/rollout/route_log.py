"""A record of the experts to which a sampler sent the tokens of its rows, for router replay."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from grpo_ext.packing.routes import Recorded


class RouteLog:
    """Records the routes of a batch, forward by forward: its prompts first, then a token of each unfinished row.

    Args:
        mask: mask [rows, prompt] of the padded prompts.

    Attributes:
        recorded: gets the choices of the routers in the next forward.
    """

    def __init__(self, mask: Int[Tensor, "rows prompt"]) -> None:
        self.mask, self.recorded = mask.bool().cpu(), Recorded()
        self._prompts: Tensor | None = None
        self._tokens: list[Tensor] = []

    def add(self, rows: Int[Tensor, " live"] | None = None) -> None:
        """Add the last forward.

        Args:
            rows: of the first forward, the one that each row of the batch takes; later, the numbers of the rows that
                were computed. None: all, in their order.
        """
        count = len(self.mask)
        if self._prompts is None:
            found = self.recorded.taken(count if rows is None else int(rows.max()) + 1)
            self._prompts = found if rows is None else found[rows]
            return
        found = self.recorded.taken(count if rows is None else len(rows))[:, -1]
        step = found.new_full((count, *found.shape[1:]), -1)
        step[slice(None) if rows is None else rows] = found
        self._tokens.append(step)

    def routes(self, completions: Sequence[Sequence[int]]) -> list[Int[Tensor, "tokens layers experts"]]:
        """Return the routes of each row, as in `packing.routes`, without padding and the completion's last token.

        Raises:
            RuntimeError: a token was not computed, or is unknown.
        """
        assert self._prompts is not None
        prompts, found = self._prompts.cpu(), []
        tokens = torch.stack(self._tokens, dim=1).cpu() if self._tokens else prompts[:, :0]
        for number, ids in enumerate(completions):
            own = tokens[number, : max(0, len(ids) - 1)]
            if len(own) < len(ids) - 1 or (own < 0).any():
                raise RuntimeError(f"router replay: the sampler has no routes for some tokens of row {number}")
            found.append(torch.cat([prompts[number][self.mask[number]], own]))
        return found
