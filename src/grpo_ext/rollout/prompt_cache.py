"""Key-value cache and recurrent states of a batch: computed once per prompt, then copied to each of its rows."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

ROOM = 64
"""Positions by which a full cache grows."""


class Unsupported(RuntimeError):
    """The grouped engine cannot decode this model or setting exactly; the message has the reason."""


class RoomyLayer(DynamicLayer):
    """`DynamicLayer` that writes new positions into spare room; transformers' copies the whole cache at each step.

    Args:
        keys: of shape [prompts, heads, positions, dimensions].
        values: the same.
        rows: index of each row's prompt.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, rows: Int[Tensor, " batch"]) -> None:
        super().__init__()
        keys, values = _as_computed(keys), _as_computed(values)
        self.lazy_initialization(keys, values)
        self.length = keys.shape[2]
        self._keys, self._values = (_with_room(x, rows, 0, self.length) for x in (keys, values))
        self._show()

    def _show(self) -> None:
        self.keys, self.values = self._keys[:, :, : self.length], self._values[:, :, : self.length]

    def get_seq_length(self) -> int:
        """Return the number of positions in the cache."""
        return self.length

    def take(self, rows: Int[Tensor, " batch"], first: int) -> None:
        """Keep only these rows, from position `first` on."""
        self._keys, self._values = (_with_room(x, rows, first, self.length) for x in (self._keys, self._values))
        self.length -= first
        self._show()

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append positions; return all keys and values."""
        end = self.length + key_states.shape[2]
        if end > self._keys.shape[2]:
            every = torch.arange(len(self._keys), device=self._keys.device)
            self._keys, self._values = (_with_room(x, every, 0, self.length) for x in (self._keys, self._values))
        self._keys[:, :, self.length : end] = key_states
        self._values[:, :, self.length : end] = value_states
        self.length = end
        self._show()
        return self.keys, self.values


class RoomySlidingLayer(RoomyLayer):
    """`DynamicSlidingWindowLayer` with spare room: holds the last positions that a window reaches, of all `seen`."""

    is_sliding = True

    def __init__(self, layer: Any, rows: Int[Tensor, " batch"]) -> None:
        self.window, self.seen = layer.sliding_window, layer.get_seq_length()
        super().__init__(layer.keys, layer.values, rows)

    def get_seq_length(self) -> int:
        """Return the number of positions that the layer has seen."""
        return self.seen

    def get_max_length(self) -> int:
        """Return the window."""
        return self.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys of the next queries, and how many positions are before these."""
        return self.length + query_length, self.seen - self.length

    def take(self, rows: Int[Tensor, " batch"], first: int) -> None:
        """Keep only these rows, from position `first` on."""
        super().take(rows, max(0, first - (self.seen - self.length)))
        self.seen -= first

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append positions; return the keys and values that their window reaches."""
        keys, values = super().update(key_states, value_states)
        self.seen += key_states.shape[2]
        if (out := self.length - (self.window - 1)) > 0:
            self._keys, self._values = self._keys[:, :, out:], self._values[:, :, out:]
            self.length -= out
            self._show()
        return keys, values


class RowStates(LinearAttentionLayer):
    """Recurrent states of every row; they have no positions."""

    def __init__(self, layer: LinearAttentionLayer, rows: Int[Tensor, " batch"]) -> None:
        super().__init__()
        vars(self).update(vars(layer))
        self.take(rows, 0)

    def take(self, rows: Int[Tensor, " batch"], first: int) -> None:
        """Keep only these rows."""
        self.reorder_cache(rows)  # type: ignore[arg-type]


class RowKeysAndStates(RoomyLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc,override]
    """`RoomyLayer` and `RowStates` of a layer with attention and recurrence."""

    def __init__(self, layer: Any, rows: Int[Tensor, " batch"]) -> None:
        super().__init__(layer.keys, layer.values, rows)
        vars(self).update((name, value) for name, value in vars(layer).items() if name not in ("keys", "values"))
        LinearAttentionLayer.reorder_cache(self, rows)  # type: ignore[arg-type]

    def take(self, rows: Int[Tensor, " batch"], first: int) -> None:
        """Keep only these rows, and keys from position `first` on."""
        super().take(rows, first)
        LinearAttentionLayer.reorder_cache(self, rows)  # type: ignore[arg-type]


Nothing: Any = getattr(cache_utils, "DummyLayer", object)
"""transformers' layer without a cache, since 5.23."""


class NoRows(Nothing):
    """A layer without a cache."""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def take(self, *_: object) -> None:
        """Keep no tokens."""


_ROWS: dict[type, Callable[[Any, Tensor], RoomyLayer | RowStates | NoRows]] = {
    Nothing: NoRows,
    DynamicLayer: lambda layer, rows: RoomyLayer(layer.keys, layer.values, rows),
    DynamicSlidingWindowLayer: RoomySlidingLayer,
    LinearAttentionAndFullAttentionLayer: RowKeysAndStates,
    LinearAttentionLayer: RowStates,
}
"""The layer of rows for each layer of prompts that transformers makes."""


def _as_computed(states: Tensor) -> Tensor:
    """Round float32 to the precision of an autocast, which would cast the whole cache again at each token."""
    device = states.device.type
    mixed = torch.is_autocast_enabled(device) and states.dtype == torch.float32
    return states.to(torch.get_autocast_dtype(device)) if mixed else states


def _with_room(states: Tensor, rows: Int[Tensor, " batch"], first: int, length: int) -> Tensor:
    """Return a buffer that begins with `states[rows, :, first:length]`."""
    _, heads, _, dimensions = states.shape
    buffer = states.new_empty(len(rows), heads, length - first + ROOM, dimensions)
    torch.index_select(states[:, :, first:length], 0, rows, out=buffer[:, :, : length - first])
    return buffer


class RowCache:
    """Key-value cache and attention mask of every row.

    Args:
        cache: cache of the prompts; its layers are replaced.
        of_row: index of each row's prompt.
        mask: attention mask of the prompts.

    Raises:
        Unsupported: a layer has an empty cache.
    """

    def __init__(self, cache: DynamicCache, of_row: Int[Tensor, " batch"], mask: Tensor | None) -> None:
        layers: list[Any] = cache.layers
        if any(isinstance(layer, DynamicLayer) and layer.keys is None for layer in layers):
            raise Unsupported("some of its layers have an empty cache")
        self.layers = [_ROWS[type(layer)](layer, of_row) for layer in layers]
        cache.layers[:] = self.layers
        self.mask = None if mask is None or bool(mask.all()) else mask[of_row]

    def next_mask(self) -> Tensor | None:
        """Extend the mask by one position and return it; None without padding, as attention is then faster."""
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        return self.mask

    def take(self, rows: Int[Tensor, " batch"]) -> None:
        """Keep only these rows, without the left padding that they share."""
        first = 0
        if self.mask is not None:
            mask = self.mask[rows]
            first = int(mask.any(dim=0).int().argmax())
            self.mask = None if bool(mask[:, first:].all()) else mask[:, first:]
        for layer in self.layers:
            layer.take(rows, first)


def check_layers(cache: DynamicCache) -> None:
    """Raise `Unsupported` unless rows can take copies of every layer."""
    for layer in cache.layers:
        if type(layer) not in _ROWS:
            raise Unsupported(f"its cache has a {type(layer).__name__}")
