"""Layers with a state, such as linear attention, Mamba 2 and short convolutions, over packed segments.

A layer runs its own forward on segments, not on the packed row: first those that begin a row, then those after them,
each from a copy of the state at the end of its parent segment. The state travels in the layer's cache argument, and
gradients flow back through it. So a prompt is computed once, and no segment sees the state of a sibling.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from grpo_ext.packing.attention import LAYOUT, ForeignAttention
from grpo_ext.packing.kernels import Segments, Span

CARRIED = {
    "BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "Lfm2MoeShortConv", "Lfm2ShortConv", "Mamba2Mixer",
    "NemotronHMamba2Mixer", "OlmoHybridGatedDeltaNet", "Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeGatedDeltaNet", "Zamba2MambaMixer",
}  # fmt: skip
"""transformers' layers that continue from their cache, however many tokens follow."""
CACHE = "cache", "cache_params", "past_key_values"
"""Names of the cache's argument: since transformers 5.24, and before."""
LAYER_TYPES = frozenset({"conv", "hybrid", "linear_attention", "mlp", "moe"})
"""Names in configs of layers with such a state, and, beside them, of layers that mix no tokens."""
TILE = 64
"""Segments without successors run together if their lengths differ by less; the delta rule pads to as many tokens."""


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a module is a layer of `CARRIED`."""
    kind = type(module)
    return kind.__name__ in CARRIED and kind.__module__.startswith("transformers.models.")


# The calls of a layer.


class Call(NamedTuple):
    """Segments of one depth that a layer computes at once, as the rows of a batch."""

    tokens: Int[Tensor, "rows length"]
    """Packed tokens; the last one of a shorter row is repeated."""
    parents: list[Span]
    """The segment whose state each row starts from; empty: rows start without a state."""
    ends: list[Span]
    """The segment at the end of each row; empty: no other segment needs their states."""


class Plan(NamedTuple):
    """The calls of one layout, parents first."""

    calls: list[Call]
    places: Int[Tensor, " tokens"]
    """Where each packed token lies among the outputs of all calls."""


class _Row(NamedTuple):
    span: Span
    tokens: list[int]
    parent: Span | None


@lru_cache(maxsize=4)
def plan(segments: Segments, device: torch.device) -> Plan:
    """Return the calls of a layout.

    Layers compute a single token after a state in place, without a gradient. So a segment of one token that others
    follow is computed at the beginning of each of them, and a last segment of one token is repeated to two.
    """
    inner = {run.prefix for run in segments.runs}
    depth: dict[Span | None, int] = {None: -1}
    single: dict[Span, _Row] = {}
    alike: defaultdict[tuple[int, bool, int], list[_Row]] = defaultdict(list)
    for run in segments.runs:
        for span in run.segments:
            before = single.get(cast(Span, run.prefix), _Row(span, [], run.prefix))
            row = _Row(span, [*before.tokens, *range(*span)], before.parent)
            if span in inner and len(row.tokens) == 1 and row.parent is not None:
                single[span] = row
                continue
            depth[span] = depth[row.parent] + 1
            length = len(row.tokens)
            alike[depth[span], span in inner, length if span in inner else (length - 1) // TILE].append(row)
    calls, places, first = [], [0] * segments.runs[-1].stop, 0
    for (_, leads, _), rows in sorted(alike.items(), key=lambda item: item[0][0]):
        width = max(1 if rows[0].parent is None else 2, *(len(row.tokens) for row in rows))
        for number, row in enumerate(rows):
            for column, token in enumerate(row.tokens):
                places[token] = first + number * width + column
        first += len(rows) * width
        tokens = [row.tokens + row.tokens[-1:] * (width - len(row.tokens)) for row in rows]
        parents = [row.parent for row in rows if row.parent is not None]
        ends = [row.span for row in rows] if leads else []
        calls.append(Call(torch.tensor(tokens, device=device), parents, ends))
    return Plan(calls, torch.tensor(places, device=device))


class State(LinearAttentionLayer):
    """State of a batch of segments that gradients flow through; transformers' writes in place."""

    def __init__(self, parents: list[tuple["State", int]]) -> None:
        """Start each row from a row of another state; an empty list: from none."""
        super().__init__()
        self.record_past = True  # layers then ask `update_conv_state` for a single token too
        for ours in ("conv_states", "recurrent_states"):
            first = getattr(parents[0][0], ours)[0] if parents else None
            if first is not None:
                rows = [getattr(state, ours)[0][row] for state, row in parents]
                getattr(self, ours)[0] = torch.stack(rows)
        self.has_previous_state[0] = bool(parents)

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: object
    ) -> Tensor:
        """Return the inputs of the convolution after those of the parent; keep the last ones."""
        before = self.conv_states[0]
        assert state_idx == 0
        assert conv_kernel_size is not None
        whole = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        short = max(0, conv_kernel_size - whole.shape[-1])
        self.conv_states[0] = nn.functional.pad(whole, (short, 0))[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: object) -> Tensor:
        """Keep the state after the last token."""
        assert state_idx == 0
        self.recurrent_states[0] = recurrent_states
        return recurrent_states


def by_segments(
    forward: Callable[..., Tensor],
    layer: nn.Module,
    segments: Segments,
    hidden_states: Float[Tensor, "1 tokens hidden"],
    **kwargs: Any,
) -> Float[Tensor, "1 tokens hidden"]:
    """Compute a layer over packed segments by its own forward.

    Every packed token is real, so its mask of padding goes, which the auxiliary loss fills with weights.
    """
    kwargs.pop(LAYOUT, None)
    kwargs["attention_mask"] = None
    argument = next(name for name in CACHE if name in inspect.signature(type(layer).forward).parameters)
    calls, places = plan(segments, hidden_states.device)
    outputs, states = [], dict[Span, tuple[State, int]]()
    for call in calls:
        state = State([states[span] for span in call.parents])
        kwargs[argument] = Cache([state] * (cast(int, layer.layer_idx) + 1))
        outputs.append(forward(hidden_states[0][call.tokens], **kwargs).flatten(0, 1))
        states |= {span: (state, row) for row, span in enumerate(call.ends)}
    return torch.cat(outputs)[places][None]


# The module that holds a layer gets the segments, also when gradient checkpointing calls it again.


@contextmanager
def carried(model: nn.Module) -> Iterator[None]:
    """Run the recurrent layers of `model` by segments for a `with` block.

    Raises:
        ForeignAttention: a layer is called without segments.
    """
    with ExitStack() as checked:
        for parent in model.modules():
            layers = _recurrent_children(parent)
            if layers and _split not in parent._forward_pre_hooks.values():
                parent.register_forward_pre_hook(_split, with_kwargs=True)
                parent.register_forward_hook(_restore, with_kwargs=True, always_call=True)
            for layer in layers:
                checked.enter_context(layer.register_forward_pre_hook(_must_be_split))
        yield


def _recurrent_children(parent: nn.Module) -> list[nn.Module]:
    return [child for child in parent.children() if is_recurrent(child)]


def _split(parent: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
    if LAYOUT not in kwargs:
        return
    _give(parent, kwargs[LAYOUT])
    if checkpoint := vars(parent).get("_gradient_checkpointing_func"):
        ours = partial(_checkpointed, checkpoint, parent, kwargs[LAYOUT])
        vars(parent).update(_grpo_ext_checkpoint=checkpoint, _gradient_checkpointing_func=ours)


def _give(parent: nn.Module, segments: Any) -> bool:
    """Have the recurrent layers of a module run by segments; return False if they do already."""
    layers = [layer for layer in _recurrent_children(parent) if "_grpo_ext_before" not in vars(layer)]
    for layer in layers:
        vars(layer)["_grpo_ext_before"] = vars(layer).get("forward")
        layer.forward = partial(by_segments, layer.forward, layer, segments)
    return bool(layers)


def _checkpointed(checkpoint: Callable[..., Any], parent: nn.Module, segments: Any, run: Any, *args: Any) -> Any:
    """Checkpoint `run` with the segments: newer transformers recompute `forward` without the hooks of the module."""

    def by_its_segments(*args: Any) -> Any:
        has_segments = _give(parent, segments)
        try:
            return run(*args)
        finally:
            if has_segments:
                _take(parent)

    return checkpoint(by_its_segments, *args)


def _restore(parent: nn.Module, args: object, kwargs: object, output: object) -> None:
    _take(parent)
    if checkpoint := vars(parent).pop("_grpo_ext_checkpoint", None):
        vars(parent)["_gradient_checkpointing_func"] = checkpoint


def _take(parent: nn.Module) -> None:
    for layer in _recurrent_children(parent):
        if "_grpo_ext_before" in vars(layer):
            before = vars(layer).pop("_grpo_ext_before")
            if before is None:
                del layer.forward
            else:
                layer.forward = before


def _must_be_split(layer: nn.Module, args: object) -> None:
    if "_grpo_ext_before" not in vars(layer):
        raise ForeignAttention(f"{type(layer).__name__} is called without the segments of shared_prefix")
