"""Trajectories with rewritten contexts: rows that are trees, with each distinct token packed once, or as plain rows.

`parents` [rows, completion] is the index of the token before each token of a completion: its column among the
completions; negative indices count from the end of the prompt (-1 = its last token). A plain row has the column before
throughout.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from jaxtyping import Int

from grpo_ext.objective.trajectory import paths
from grpo_ext.packing.kernels import Run, Segments, Span
from grpo_ext.packing.layout import Layout

Ids = Int[np.ndarray, "rows width"]
Parents = Int[np.ndarray, "rows completion"]
ROOT = -1


def is_plain(parents: Parents, active: Int[np.ndarray, "rows completion"]) -> bool:
    """Return whether every active token follows the column before."""
    return bool(((parents == np.arange(parents.shape[1]) - 1) | (active == 0)).all())


def pack_tree(input_ids: Ids, mask: Ids, parents: Parents, *, whole: bool = False) -> Layout | None:
    """Return the layout of a padded batch whose rows share equal beginnings, or None if no position has a label.

    `whole` keeps tokens that predict no label, for figures that count every token.
    """
    width, completion = input_ids.shape[1], parents.shape[1]
    start, vocabulary = width - completion, int(input_ids.max()) + 1
    nodes: dict[int, int] = {}
    before: list[int] = []
    source: list[int] = []
    weight: list[int] = []
    scored: list[int] = []
    labels: list[int] = []

    def node(parent: int, token: int, place: int) -> int:
        index = nodes.setdefault((parent + 1) * vocabulary + token, len(before))
        if index == len(before):
            before.append(parent)
            source.append(place)
            weight.append(0)
        weight[index] += 1
        return index

    for row, (ids, active) in enumerate(zip(input_ids.tolist(), mask, strict=True)):
        length, first = int(active[start:].sum()), row * width
        if not (length or whole):
            continue
        prompt = [ROOT]
        for column in np.flatnonzero(active[:start]).tolist():
            prompt.append(node(prompt[-1], ids[column], first + column))
        own: list[int] = []
        for column, parent in enumerate(parents[row, :length].tolist(), start):
            previous = own[parent] if parent >= 0 else prompt[parent]
            own.append(node(previous, ids[column], first + column))
            if previous != ROOT:
                scored.append(previous)
                labels.append(first + column)
    if not labels:
        return None
    kept = np.ones(len(before), bool) if whole else np.isin(np.arange(len(before)), before)
    order, position, runs = _linear(before, kept)
    at = np.zeros(len(before), int)
    at[order] = np.arange(len(order))
    return Layout(
        source=np.array(source)[order],
        position=np.array(position),
        weight=np.array(weight)[order],
        scored=at[scored],
        labels=np.array(labels),
        segments=Segments(tuple(runs)),
        shape=(len(input_ids), width),
    )


@dataclass
class _Segment:
    """Consecutive tokens without a branch."""

    prefix: int
    """Parent segment."""
    position: int
    """Position of its first token."""
    tokens: list[int]
    behind: list[int]
    """Child segments."""


def _segments(before: list[int], kept: np.ndarray) -> list[_Segment]:
    """Split a tree into segments; `before` holds the token before each, and the first segment, the root, is empty."""
    followers = Counter(parent for parent, k in zip(before, kept, strict=True) if k)
    segments, of = [_Segment(ROOT, 0, [], [])], {ROOT: 0}
    for token in np.flatnonzero(kept).tolist():
        number = of[before[token]]
        if before[token] == ROOT or followers[before[token]] > 1:
            prefix, number = number, len(segments)
            position = segments[prefix].position + len(segments[prefix].tokens)
            segments.append(_Segment(prefix, position, [], []))
            segments[prefix].behind.append(number)
        of[token] = number
        segments[number].tokens.append(token)
    return segments


def _linear(before: list[int], kept: np.ndarray) -> tuple[list[int], list[int], list[Run]]:
    """Return tokens, positions and runs in packed order: each segment before its descendants."""
    segments = _segments(before, kept)
    order: list[int] = []
    position: list[int] = []
    runs: list[Run] = []
    spans: dict[int, Span] = {}

    def emit(numbers: list[int]) -> None:
        """Append segments of one length after one prefix."""
        first = segments[numbers[0]]
        runs.append(Run(len(order), len(numbers), len(first.tokens), spans.get(first.prefix)))
        for number in numbers:
            spans[number] = len(order), len(order) + len(first.tokens)
            order.extend(segments[number].tokens)
            position.extend(range(first.position, first.position + len(first.tokens)))

    def length(number: int) -> int:
        return len(segments[number].tokens)

    waiting = [0]
    while waiting:
        number = waiting.pop()
        if number:
            emit([number])
        inner = [n for n in segments[number].behind if segments[n].behind]
        leaves = sorted((n for n in segments[number].behind if not segments[n].behind), key=length)
        for _, alike in groupby(leaves, key=length):
            emit(list(alike))
        waiting += inner[::-1]
    return order, position, runs


# Where a model does not share.


@dataclass(frozen=True)
class PlainRows:
    """Contexts as padded rows for one forward."""

    input_ids: Ids
    mask: Ids
    completion: int
    """Number of last columns whose log-probabilities are wanted."""
    sources: list[int]
    """The row that each is a context of."""


def plain_rows(
    input_ids: Ids, mask: Ids, parents: Parents, rows: int | None = None
) -> tuple[list[PlainRows], Int[np.ndarray, "rows completion"]]:
    """Return each path to a leaf as a padded row, in batches, and the place of each token in them.

    A batch has at most as many positions as `rows` of the longest contexts; None: one batch. A place is an index into
    the flat completions of all batches, -1 for padding; a token in several rows has the place of the last one.
    """
    start = input_ids.shape[1] - parents.shape[1]
    ways: list[tuple[int, np.ndarray, np.ndarray]] = []
    for row, active in enumerate(mask.astype(bool)):
        prompt = np.flatnonzero(active[:start])
        for kept, path in paths(parents[row, : active[start:].sum()].tolist(), len(prompt)):
            columns = np.concatenate([prompt[:kept], np.array(path, int) + start])
            first = max(1, kept)  # the first token of a row has no prediction
            ways.append((row, columns[:first], columns[first:]))
    batches, places, base = [], np.full(parents.shape, -1), 0
    for part in _parts([len(rest) for *_, rest in ways], start, rows):
        right = max(1, *(len(ways[i][2]) for i in part))
        ids, active = (np.zeros((len(part), start + right), input_ids.dtype) for _ in range(2))
        for number, (row, lead, rest) in enumerate(ways[i] for i in part):
            columns = np.arange(start - len(lead), start + len(rest))
            ids[number, columns] = input_ids[row, np.concatenate([lead, rest])]
            active[number, columns] = 1
            places[row, rest - start] = base + number * right + np.arange(len(rest))
        batches.append(PlainRows(ids, active, right, [ways[i][0] for i in part]))
        base += len(part) * right
    return batches, places


def _parts(lengths: list[int], start: int, rows: int | None) -> list[list[int]]:
    """Split rows into batches, longest first, so that those of one batch are about equally long."""
    if rows is None:
        return [list(range(len(lengths)))]
    waiting = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    most = rows * (start + lengths[waiting[0]])
    parts = []
    while waiting:
        count = max(1, most // max(1, start + lengths[waiting[0]]))
        parts.append(sorted(waiting[:count]))
        waiting = waiting[count:]
    return parts
