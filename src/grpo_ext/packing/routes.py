"""Routes: a token is sent to the experts that the sampler chose for it, with the policy's own gate weights.

Only the router's choice (its `topk`) is replaced. Gate weights and their gradient are those of the present logits over
the given experts, by the model's own formula. R3, arXiv:2510.11370.

Routes travel as an argument of the forward to its layers, so that gradient checkpointing replays them when it
recomputes a layer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from grpo_ext.packing.obstacles import text_model

ROUTES: Final = "routes"
"""Name of the routes in a micro-batch: a list with one tensor [tokens, layers, experts] for each row.

Its tokens are those of prompt and completion but for the last one, which predicts nothing and which no other sees.
"""
_ARGUMENT: Final = "grpo_ext_routes"

Choose: TypeAlias = Callable[[int, Tensor], Tensor]
"""Returns the experts of each token, [tokens, experts], given the number of a layer and its router's own choice."""


def mixtures_of(base: PreTrainedModel) -> dict[int, Any]:
    """Return the modules that choose among experts, by the number of their layer."""
    return {
        number: module
        for number, layer in enumerate(_layers(base))
        for module in layer.modules()
        if getattr(getattr(module, "experts", None), "num_experts", 0)
    }


def _layers(base: PreTrainedModel) -> Any:
    return getattr(text_model(base).base_model, "layers", ())


class Replayed:
    """Routes of the tokens of one forward, [tokens, layers, experts]; -1 leaves the choice to the router.

    Attributes:
        tally: choices that differ from the router's own, over tokens and layers, and all.
    """

    def __init__(self, experts: Int[Tensor, "tokens layers experts"]) -> None:
        self.experts, self.tally = experts, torch.zeros(2, device=experts.device)

    def __call__(self, layer: int, own: Int[Tensor, "tokens experts"]) -> Int[Tensor, "tokens experts"]:
        """Return the given experts of a layer.

        Raises:
            RuntimeError: they are not as many as the router chooses.
        """
        experts = self.experts[:, layer].long()
        if experts.shape != own.shape:
            raise RuntimeError(f"replay_routes: {[*experts.shape]} experts where layer {layer} chooses {[*own.shape]}")
        replayed = experts[:, :1] >= 0
        differs = (experts.sort(dim=1).values != own.sort(dim=1).values).any(dim=1, keepdim=True)
        self.tally += torch.stack([(differs & replayed).sum(), replayed.sum()])
        return torch.where(replayed, experts, own)


class _Choosing(TorchFunctionMode):
    """Replaces the choice of a router while its forward runs."""

    def __init__(self, choose: Choose, layer: int, count: int) -> None:
        super().__init__()
        self.choose, self.layer, self.count = choose, layer, count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].dim() != 2 or args[0].shape[1] != self.count:
            return result
        chosen = self.choose(self.layer, result.indices)
        return torch.return_types.topk((args[0].gather(1, chosen), chosen))


@contextmanager
def routed(base: PreTrainedModel, choose: Choose) -> Iterator[None]:
    """Let routers choose by `choose` in the forward of a `with` block, and in its recomputation."""
    if not hasattr(base, _ARGUMENT):  # the hooks stay: a recomputation comes with the backward
        mixtures = mixtures_of(base)
        for number, layer in enumerate(_layers(base)):
            _follow(layer, number, mixtures.get(number))
        setattr(base, _ARGUMENT, True)

    def hand_out(module: nn.Module, args: object, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {_ARGUMENT: choose}

    with text_model(base).base_model.register_forward_pre_hook(hand_out, with_kwargs=True):
        yield


def _follow(layer: nn.Module, number: int, mixture: Any) -> None:
    """Let a layer's mixture of experts, if it has one, choose by what the layer is handed."""
    modes: list[_Choosing] = []

    def take(module: nn.Module, args: object, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        choose = kwargs.pop(_ARGUMENT, None)
        handed = choose is not None and mixture is not None
        modes[:] = [_Choosing(choose, number, mixture.experts.num_experts)] if handed else []
        return args, kwargs

    def enter(module: nn.Module, args: object) -> None:
        for mode in modes:
            mode.__enter__()

    def leave(module: nn.Module, args: object, output: object) -> None:
        for mode in modes:
            mode.__exit__(None, None, None)

    layer.register_forward_pre_hook(take, with_kwargs=True)
    if mixture is not None:
        mixture.register_forward_pre_hook(enter)
        mixture.register_forward_hook(leave, always_call=True)


def padded(
    rows: Sequence[Tensor], mask: Int[Tensor, "rows width"], completion: int
) -> Int[Tensor, "rows width layers experts"]:
    """Return the routes of rows at their columns in the padded batch, -1 elsewhere.

    Completions may have been cut in the loss, so a row may have more routes than tokens.

    Raises:
        ValueError: a row has fewer routes than tokens.
    """
    active = mask.bool().cpu()
    routes = torch.full((*active.shape, *rows[0].shape[1:]), -1, dtype=torch.int16)
    for number, (row, columns) in enumerate(zip(rows, active, strict=True)):
        places = columns.nonzero()[:, 0]
        if len(row) < len(places) - bool(columns[-completion:].any()):
            raise ValueError(f"replay_routes: {len(row)} routes for {len(places)} tokens of row {number}")
        routes[number, places[: len(row)]] = row[: len(places)].cpu().short()
    return routes.to(mask.device)


# Where replay is exact.


def no_routes(base: PreTrainedModel) -> str | None:
    """Return why a model has no routes, by its modules only."""
    layers = sum(hasattr(module, "experts") for module in text_model(base).modules())
    if not layers:
        return f"{type(base).__name__} has no experts"
    unknown = layers - len(mixtures_of(base))
    return f"{unknown} layers of {type(base).__name__} have experts of unknown form" if unknown else None


@torch.no_grad()
def replay_obstacle(base: PreTrainedModel) -> str | None:
    """Return why routes cannot be replayed, after a forward of a few tokens: other routes do not reach the experts."""
    if reason := no_routes(base):
        return reason
    mixtures, sent, arrived = mixtures_of(base), dict[int, Tensor](), set[int]()

    def others(layer: int, own: Tensor) -> Tensor:
        sent[layer] = (own + 1) % mixtures[layer].experts.num_experts
        return sent[layer]

    def look(layer: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and layer in sent]
        weights = [x for x in tensors if x.is_floating_point() and x.shape == sent[layer].shape]
        if any(torch.equal(x, sent[layer]) for x in tensors) and all((x.isfinite() & (x != 0)).all() for x in weights):
            arrived.update([layer] * len(weights))

    ids = torch.arange(2, 14, device=base.device).view(2, 6) % base.config.get_text_config().vocab_size
    with ExitStack() as stack:
        for layer, mixture in mixtures.items():
            stack.enter_context(mixture.experts.register_forward_pre_hook(partial(look, layer), with_kwargs=True))
        stack.enter_context(routed(base, others))
        try:
            base(input_ids=ids, use_cache=False)
        except TypeError as error:
            return f"{type(base).__name__} does not hand routes to its layers ({error})"
    if arrived != mixtures.keys():
        return f"the experts of {type(base).__name__} do not get given routes, each with a weight"
    return None
