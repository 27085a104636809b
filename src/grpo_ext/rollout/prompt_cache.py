"""Keys and values of a batch of siblings, in one of two stores.

`Shared` holds those of a prompt once, by cache layers of transformers (`PromptLayer`) and the attention that goes with
them (`attend`): scores against the prompt are one product for all its completions, and one softmax runs over prompt
and completion. `Expanded` holds a copy for each row, for attention functions that want all keys in one tensor.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import AttentionMaskInterface

NAME = "grpo_ext_siblings"
"""Of the attention, in transformers' registry."""
SHARED_FROM = 256
"""Tokens of the prompt from which `Shared` is no slower than `Expanded`; measured on a CPU, with 2 and 8 layers."""
ROOM = 64
"""Positions by which a cache grows."""
_BIASES = ("softcap", "s_aux", "position_bias", "sliding_window")
"""What an attention may add to its scores, and `attend` does not."""


class Unsupported(RuntimeError):
    """This model or this setting is left to `generate`; the message says why."""


class RoomyLayer(DynamicLayer):
    """A `DynamicLayer` that writes new positions into spare room; transformers' copies the whole cache at each step.

    Args:
        keys: of shape [prompts, heads, positions, dimensions].
        values: the same.
        rows: which of them each row of the batch begins with.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, rows: Int[Tensor, " batch"]) -> None:
        """Lay out the batch."""
        super().__init__()
        self.lazy_initialization(keys, values)
        self.length = keys.shape[2]
        self._keys, self._values = (_with_room(x, rows, 0, self.length) for x in (keys, values))
        self._show()

    def _show(self) -> None:
        self.keys, self.values = self._keys[:, :, : self.length], self._values[:, :, : self.length]

    def get_seq_length(self) -> int:
        """Positions that are in the cache."""
        return self.length

    def take(self, rows: Int[Tensor, " batch"], first: int) -> None:
        """Keep these rows, and their positions from `first` on."""
        self._keys, self._values = (_with_room(x, rows, first, self.length) for x in (self._keys, self._values))
        self.length -= first
        self._show()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As transformers'."""
        end = self.length + key_states.shape[2]
        if end > self._keys.shape[2]:
            every = torch.arange(len(self._keys), device=self._keys.device)
            self._keys, self._values = (_with_room(x, every, 0, self.length) for x in (self._keys, self._values))
        self._keys[:, :, self.length : end] = key_states
        self._values[:, :, self.length : end] = value_states
        self.length = end
        self._show()
        return self.keys, self.values


def _with_room(states: Tensor, rows: Int[Tensor, " batch"], first: int, length: int) -> Tensor:
    """A buffer that begins with `states[rows, :, first:length]`."""
    _, heads, _, dimensions = states.shape
    buffer = states.new_empty(len(rows), heads, length - first + ROOM, dimensions)
    torch.index_select(states[:, :, first:length], 0, rows, out=buffer[:, :, : length - first])
    return buffer


class Siblings:
    """Which rows share a prompt; one for all layers.

    Args:
        of_row: the prompt of each row, in ascending order.
        mask: of the prompts, 0 where they are padded.
    """

    def __init__(self, of_row: Int[Tensor, " batch"], mask: Int[Tensor, "prompts time"] | None) -> None:
        """Number the rows of each prompt."""
        padded = mask is not None and not bool(mask.all())
        self.padding: Bool[Tensor, "prompts 1 1 time"] | None = (mask == 0)[:, None, None] if padded else None  # type: ignore
        self._number(of_row)

    def _number(self, of_row: Tensor) -> None:
        counts = torch.bincount(of_row)
        self.of_row, self.prompts, self.most = of_row, len(counts), int(counts.max())
        starts = counts.cumsum(0) - counts
        self.places = of_row * self.most + torch.arange(len(of_row), device=of_row.device) - starts[of_row]
        self.even = len(of_row) == self.prompts * self.most

    def take(self, rows: Int[Tensor, " batch"]) -> Int[Tensor, " prompts"] | None:
        """Keep these rows; which prompts are still needed, None for all."""
        live, of_row = self.of_row[rows].unique(return_inverse=True)
        fewer = len(live) < self.prompts
        self._number(of_row)
        if not fewer:
            return None
        if self.padding is not None:
            self.padding = self.padding[live]
        return live

    def together(
        self, rows: Float[Tensor, "batch heads queries *rest"]
    ) -> Float[Tensor, "prompts heads most_queries ..."]:
        """By prompt: the siblings' queries side by side, zeros where a prompt has fewer than others."""
        _, heads, queries, last = rows.shape
        if not self.even:
            padded = rows.new_zeros(self.prompts * self.most, heads, queries, last)
            rows = padded.index_copy_(0, self.places, rows)
        grouped = rows.view(self.prompts, self.most, heads, queries, last).transpose(1, 2)
        return grouped.reshape(self.prompts, heads, self.most * queries, last)

    def apart(self, grouped: Tensor, queries: int) -> Tensor:
        """By row again."""
        _, heads, _, last = grouped.shape
        rows = grouped.view(self.prompts, heads, self.most, queries, last).transpose(1, 2)
        rows = rows.reshape(self.prompts * self.most, heads, queries, last)
        return rows if self.even else rows.index_select(0, self.places)


class PromptLayer(DynamicLayer):
    """A cache layer that holds a prompt once for all its completions; `attend` reads it.

    Args:
        keys: of the prompts, of shape [prompts, heads, time, dimensions].
        values: the same.
        siblings: whose completions they are.
    """

    def __init__(self, keys: Tensor, values: Tensor, siblings: Siblings) -> None:
        """Nothing but prompts yet."""
        super().__init__()
        self.lazy_initialization(keys, values)
        self.prompt_keys, self.prompt_values, self.siblings = keys, values, siblings
        self.own = RoomyLayer(keys[:, :, :0], values[:, :, :0], siblings.of_row)
        self.unread = 0

    def get_seq_length(self) -> int:
        """Positions that are in the cache, the prompt's among them."""
        return self.prompt_keys.shape[2] + self.own.length

    def take(self, rows: Int[Tensor, " batch"], prompts: Int[Tensor, " prompts"] | None) -> None:
        """Keep these rows and these prompts."""
        self.own.take(rows, 0)
        if prompts is not None:
            self.prompt_keys, self.prompt_values = self.prompt_keys[prompts], self.prompt_values[prompts]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The completions' keys and values; the keys say where the prompts' are."""
        keys, values = self.own.update(key_states, value_states)
        keys.prompt_layer = self  # type: ignore[attr-defined]
        self.unread += 1
        return keys, values


def attend(
    module: Any,
    query: Float[Tensor, "batch query_heads 1 dim"],
    key: Float[Tensor, "batch heads time dim"],
    value: Float[Tensor, "batch heads time value_dim"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch 1 query_heads value_dim"], None]:
    """softmax([q k_prompt, q k_completion] scaling) [v_prompt, v_completion], for the next token of every row.

    Raises:
        Unsupported: the keys do not come straight from a `PromptLayer`, or the scores have an extra term.
    """
    layer: PromptLayer | None = getattr(key, "prompt_layer", None)
    if layer is None:
        raise Unsupported("the model changes its keys between cache and attention")
    if extra := [name for name in _BIASES if kwargs.get(name) is not None]:
        raise Unsupported(f"its attention takes {', '.join(extra)}")
    layer.unread -= 1
    siblings, heads = layer.siblings, key.shape[1]
    batch, query_heads, _, dimensions = query.shape
    queries = query_heads // heads
    query = query.reshape(batch, heads, queries, dimensions) * (dimensions**-0.5 if scaling is None else scaling)
    shared = siblings.together(query) @ layer.prompt_keys.transpose(2, 3)
    if siblings.padding is not None:
        shared = shared.masked_fill(siblings.padding, torch.finfo(shared.dtype).min)
    scores = torch.cat([siblings.apart(shared, queries), query @ key.transpose(2, 3)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    prompt = layer.prompt_keys.shape[2]
    output = siblings.apart(siblings.together(weights[..., :prompt]) @ layer.prompt_values, queries)
    output = output + weights[..., prompt:] @ value
    return output.reshape(batch, 1, query_heads, value.shape[-1]), None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """`attend` needs none: a row's padding is all in its prompt."""


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, no_mask)


# Stores: all layers together.


class Store(Protocol):
    """What a batch keeps between two tokens."""

    def next_mask(self) -> Tensor | None:
        """The attention mask of the next forward."""

    def reading(self, config: Any) -> Any:
        """What that forward runs under."""

    def take(self, rows: Int[Tensor, " batch"]) -> None:
        """Keep these rows."""


class Expanded:
    """The prompt copied for each row.

    Args:
        cache: with the prompts in it; its layers are replaced.
        of_row: the prompt of each row.
        mask: of the prompts.
    """

    def __init__(self, cache: DynamicCache, of_row: Int[Tensor, " batch"], mask: Tensor | None) -> None:
        """Copy."""
        self.layers = [RoomyLayer(*_states(layer), of_row) for layer in cache.layers]
        cache.layers[:] = self.layers
        self.mask = None if mask is None else mask[of_row]

    def next_mask(self) -> Tensor | None:
        """One more position for each row."""
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        return self.mask

    @contextmanager
    def reading(self, config: Any) -> Iterator[None]:
        """Nothing special."""
        yield

    def take(self, rows: Int[Tensor, " batch"]) -> None:
        """Keep these rows, without the padding that none of them needs."""
        first = 0
        if self.mask is not None:
            self.mask = self.mask[rows]
            first = int(self.mask.any(dim=0).int().argmax())
            self.mask = self.mask[:, first:]
        for layer in self.layers:
            layer.take(rows, first)


class Shared:
    """The prompt once for all its rows; arguments as `Expanded`, `of_row` in ascending order."""

    def __init__(self, cache: DynamicCache, of_row: Int[Tensor, " batch"], mask: Tensor | None) -> None:
        """Share."""
        self.siblings = Siblings(of_row, mask)
        self.layers = [PromptLayer(*_states(layer), self.siblings) for layer in cache.layers]
        cache.layers[:] = self.layers

    def next_mask(self) -> None:
        """`attend` knows the padding."""

    @contextmanager
    def reading(self, config: Any) -> Iterator[None]:
        """With `attend` as the model's attention.

        Raises:
            Unsupported: a layer went another way.
        """
        before = config._attn_implementation
        config._attn_implementation = NAME
        try:
            yield
        finally:
            config._attn_implementation = before
        if any(layer.unread for layer in self.layers):
            raise Unsupported("its attention is not to be replaced")

    def take(self, rows: Int[Tensor, " batch"]) -> None:
        """Keep these rows, and the prompts that they have."""
        prompts = self.siblings.take(rows)
        for layer in self.layers:
            layer.take(rows, prompts)


def store_for(
    model: Any, device: torch.device, prompt_length: int, rows_per_prompt: float
) -> type[Expanded] | type[Shared]:
    """`Shared` where the attention computes what `attend` does and reading a prompt once outweighs its overhead."""
    pays = device.type == "cpu" and prompt_length >= SHARED_FROM and rows_per_prompt >= 2
    known = model.config.get_text_config(decoder=True)._attn_implementation in ("eager", "sdpa")
    return Shared if pays and known and getattr(model, "_supports_attention_backend", False) else Expanded


def check_layers(cache: DynamicCache) -> None:
    """Raise `Unsupported` unless every layer grows by one position for each token."""
    for layer in cache.layers:
        if type(layer) is not DynamicLayer:
            raise Unsupported(f"its cache has a {type(layer).__name__}")


def _states(layer: Any) -> tuple[Tensor, Tensor]:
    if layer.keys is None:
        raise Unsupported("some of its layers keep nothing in the cache")
    return layer.keys, layer.values
