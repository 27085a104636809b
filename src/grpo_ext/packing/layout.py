"""Layout of packed rows: rows with the same prompt follow one copy of it, so that a group's prompt has one forward.

The packed row of a micro-batch holds real tokens only,

    [prompt_1[:-1] | prompt_2[:-1] | ... | last token of prompt_1 + completion[:-1] | ... ],

so that every position after a prompt has exactly one label. `attention` lets each completion see its prompt and
itself; positions are those of the padded batch; only labelled positions reach the LM head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from jaxtyping import Int

from grpo_ext.packing.kernels import Run, Segments


@dataclass(frozen=True)
class Layout:
    """Source of the tokens of a packed row, and target of the scores of its labelled positions."""

    source: np.ndarray
    """Flat index into the padded batch [rows, width], for each packed token."""
    position: np.ndarray
    """Position id of each packed token."""
    weight: np.ndarray
    """Number of tokens of the padded batch that each packed token represents."""
    scored: np.ndarray
    """Packed positions that have a label."""
    labels: np.ndarray
    """Flat index of each label into the padded batch."""
    segments: Segments
    shape: tuple[int, int]
    """Rows and width of the padded batch."""

    @property
    def tokens(self) -> int:
        """Number of tokens that the model computes."""
        return len(self.source)


def groups_of(prompt_ids: np.ndarray, mask: np.ndarray) -> list[list[int]]:
    """Group rows with equal prompts, in the order of their first ones."""
    groups: dict[bytes, list[int]] = {}
    for i, row in enumerate(np.ascontiguousarray(np.where(mask, prompt_ids, -1))):
        groups.setdefault(row.tobytes(), []).append(i)
    return list(groups.values())


def pack(
    input_ids: Int[np.ndarray, "rows width"],
    mask: Int[np.ndarray, "rows width"],
    completion: int,
    *,
    whole: bool = False,
) -> Layout | None:
    """Return the layout of a padded batch whose last `completion` columns are completions, or None.

    None if a mask has holes, a prompt's last column is padding, or no position has a label. `whole` keeps tokens that
    predict no label, for figures that count every token.
    """
    rows, width = input_ids.shape
    start = width - completion
    lengths = mask[:, start:].sum(axis=1)
    prompts = mask[:, :start].sum(axis=1, keepdims=True)
    column = np.arange(width) - start
    contiguous = (mask == ((column >= -prompts) & (column < lengths[:, None]))).all()
    if not contiguous or start == 0 or not mask[:, start - 1].all() or not lengths.any():
        return None
    pieces: list[_Piece] = []
    for number, group in enumerate(groups_of(input_ids[:, :start], mask[:, :start])):
        pieces += _pieces(number, group, np.flatnonzero(mask[group[0], : start - 1]), start - 1, lengths, whole)
    pieces.sort(key=lambda p: (p.owner is not None, -1 if p.owner is None else p.owner, len(p.columns)))
    source = np.concatenate([p.row * width + p.columns for p in pieces])
    starts = np.cumsum([0, *(len(p.columns) for p in pieces)])
    labelled = [
        np.arange(p.labels) + begin + p.first_label for p, begin in zip(pieces, starts, strict=False) if p.labels
    ]
    scored = np.concatenate(labelled)
    return Layout(
        source=source,
        position=source % width,
        weight=np.concatenate([np.full(len(p.columns), p.weight) for p in pieces]),
        scored=scored,
        labels=source[scored] + 1,
        segments=_segments(pieces, starts),
        shape=(rows, width),
    )


@dataclass(frozen=True)
class _Piece:
    """A segment: columns of a row of the padded batch, and the group whose shared prompt it follows, if any."""

    row: int
    columns: np.ndarray
    weight: int
    first_label: int
    labels: int
    owner: int | None = None
    provides: int | None = None


def _pieces(
    number: int, group: list[int], lead: np.ndarray, last: int, lengths: np.ndarray, whole: bool
) -> Iterator[_Piece]:
    """Yield a group's prompt without its last token, then each completion preceded by that token."""
    active = [row for row in group if lengths[row] or whole]
    shared = len(lead) > 0 and len(active) > 1
    if shared:
        yield _Piece(group[0], lead, len(group), 0, 0, provides=number)
    for row in active:
        tail = np.arange(last, last + int(lengths[row]) + whole)
        columns = tail if shared else np.concatenate([lead, tail])
        owner = number if shared else None
        yield _Piece(row, columns, 1, len(columns) - len(tail), int(lengths[row]), owner=owner)


def _segments(pieces: list[_Piece], starts: np.ndarray) -> Segments:
    """Join neighbours of one length and one prompt to runs."""
    prompts = {
        p.provides: (int(begin), int(begin) + len(p.columns))
        for p, begin in zip(pieces, starts, strict=False)
        if p.provides is not None
    }
    runs, at = [], 0
    for (owner, length), same in groupby(pieces, key=lambda p: (p.owner, len(p.columns))):
        count = len(list(same))
        runs.append(Run(at, count, length, None if owner is None else prompts[owner]))
        at += count * length
    return Segments(tuple(runs))
