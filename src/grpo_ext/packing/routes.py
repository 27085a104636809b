"""Router replay: a token is sent to the experts that another forward chose for it, with the present router's weights.

Only the router's choice (its `topk`) is replaced. Gate weights and their gradient are those of the present logits over
the given experts, by the model's own formula. R3, arXiv:2510.11370, replays the choice of the sampler; the routing
replay of GSPO, arXiv:2507.18071, that of the old policy.

Routes travel as an argument of the forward to its layers, so that gradient checkpointing replays them when it
recomputes a layer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

ROUTES: Final = "routes"
"""Name of the routes in a micro-batch: a list with one tensor [tokens, layers, experts] for each row.

The tokens are those of prompt and completion but for the last one, which predicts nothing, and which no other sees.
"""
_ARGUMENT = "grpo_ext_routes"
_ROUTERS = "_grpo_ext_routers"
_MODE = "_grpo_ext_mode"


@dataclass(frozen=True)
class Router:
    """A module that chooses experts."""

    module: nn.Module
    layer: nn.Module
    """The decoder layer that contains it."""
    experts: nn.Module
    count: int
    """Number of experts."""


def routers_of(base: PreTrainedModel) -> list[Router]:
    """Return the routers of a model, in the order of its layers."""
    found = []
    for layer in _layers(base):
        for block in layer.modules():
            experts = getattr(block, "experts", None)
            gates = [gate for name in ("gate", "router") if isinstance(gate := getattr(block, name, None), nn.Module)]
            if isinstance(experts, nn.Module) and gates and (count := getattr(experts, "num_experts", 0)):
                found.append(Router(gates[0], layer, experts, count))
    return found


def _layers(base: PreTrainedModel) -> list[nn.Module]:
    return [module for module in base.base_model.modules() if isinstance(module, GradientCheckpointingLayer)]


# Choices of a router: recorded, or given.


class Use(Protocol):
    """A way to record or replace the choices of a forward's routers."""

    def choice(self, router: int, natural: Tensor) -> Tensor:
        """Return the experts of each token, [tokens, experts], in place of those that router number `router` chose."""


@dataclass
class Recorded:
    """Keeps the routers' choices."""

    seen: dict[int, list[Tensor]] = field(default_factory=dict)
    """Choices [tokens, experts] of each router, by its number, for each forward."""

    def choice(self, router: int, natural: Tensor) -> Tensor:
        """Record a choice and return it."""
        self.seen.setdefault(router, []).append(natural.detach().short())
        return natural

    def taken(self, rows: int) -> Int[Tensor, "rows time layers experts"]:
        """Return and forget the choices of forwards over some `rows`."""
        by_router = [self.seen[number] for number in sorted(self.seen)]
        self.seen = {}
        return torch.stack([torch.cat([c.unflatten(0, (rows, -1)) for c in cs], dim=1) for cs in by_router], dim=2)


@dataclass
class Replayed:
    """Gives each token the experts of an earlier forward, and counts how often the router would have chosen others."""

    experts: Int[Tensor, "tokens layers experts"]
    """-1 for padding, which keeps the router's choice."""
    agreed: Tensor = field(default_factory=lambda: torch.zeros(2))
    """Choices, over tokens and layers, that are the router's own too, and their number."""
    used: set[int] = field(default_factory=set)
    """Numbers of the routers that have got their routes."""

    def choice(self, router: int, natural: Tensor) -> Tensor:
        """Return the given experts."""
        given = self.experts[:, router].long()
        known = given[:, 0] >= 0
        self.used.add(router)
        same = (given.sort(dim=1).values == natural.sort(dim=1).values).all(dim=1)
        self.agreed = self.agreed.to(known.device) + torch.stack([(same & known).sum(), known.sum()])
        return torch.where(known[:, None], given, natural)


class _Choosing(TorchFunctionMode):
    """Replaces the choice of a router while its forward runs."""

    def __init__(self, use: Use, number: int, count: int) -> None:
        super().__init__()
        self.use, self.number, self.count = use, number, count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].dim() != 2 or args[0].shape[1] != self.count:
            return found
        chosen = self.use.choice(self.number, found.indices)
        return torch.return_types.topk((args[0].gather(1, chosen), chosen))


@contextmanager
def routed(base: PreTrainedModel, use: Use) -> Iterator[None]:
    """Let `use` have the choices of all routers in the forwards of a `with` block, and in their recomputations.

    Raises:
        RuntimeError: a router did not get the routes that were meant for it.
    """
    routers = _followed(base)

    def given(module: nn.Module, args: object, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {_ARGUMENT: use}

    handle = base.base_model.register_forward_pre_hook(given, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if isinstance(use, Replayed) and len(use.used) != routers:
        raise RuntimeError(f"{len(use.used)} of {routers} routers of {type(base).__name__} replayed their routes")


def _followed(base: PreTrainedModel) -> int:
    """Make the layers of a model hand routes to their routers; return the number of these."""
    routers = routers_of(base)
    for layer in _layers(base):
        if hasattr(layer, _ROUTERS):
            continue
        own = [(number, router) for number, router in enumerate(routers) if router.layer is layer]
        setattr(layer, _ROUTERS, own)
        layer.register_forward_pre_hook(_hand_out, with_kwargs=True)
        layer.register_forward_hook(_take_back, always_call=True)
        for _, router in own:
            router.module.register_forward_pre_hook(_enter)
            router.module.register_forward_hook(_leave, always_call=True)
    return len(routers)


def _hand_out(layer: nn.Module, args: object, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    use = kwargs.pop(_ARGUMENT, None)
    for number, router in getattr(layer, _ROUTERS) if use is not None else ():
        setattr(router.module, _MODE, _Choosing(use, number, router.count))
    return args, kwargs


def _take_back(layer: nn.Module, args: object, output: object) -> None:
    for _, router in getattr(layer, _ROUTERS):
        router.module.__dict__.pop(_MODE, None)


def _enter(router: nn.Module, args: object) -> None:
    if (mode := getattr(router, _MODE, None)) is not None:
        mode.__enter__()


def _leave(router: nn.Module, args: object, output: object) -> None:
    if (mode := getattr(router, _MODE, None)) is not None:
        mode.__exit__(None, None, None)


# Routes of rows.


def split(
    choices: Int[Tensor, "rows width layers experts"], mask: Int[Tensor, "rows width"]
) -> list[Int[Tensor, "tokens layers experts"]]:
    """Return the routes of padded rows, without padding and the last token."""
    choices, mask = choices.cpu(), mask.bool().cpu()
    return [row[live][:-1].clone() for row, live in zip(choices, mask, strict=True)]


def padded(
    rows: Sequence[Tensor], mask: Int[Tensor, "rows width"], completion: int
) -> Int[Tensor, "rows width layers experts"]:
    """Return the routes of rows at their columns in the padded batch, -1 elsewhere.

    Completions may have been cut in the loss, so a row may have more routes than tokens.

    Raises:
        ValueError: a row has fewer routes than tokens.
    """
    live = mask.bool().cpu()
    found = torch.full((*live.shape, *rows[0].shape[1:]), -1, dtype=torch.int16)
    for number, (row, columns) in enumerate(zip(rows, live, strict=True)):
        places = columns.nonzero()[:, 0]
        if columns[-completion:].any():
            places = places[:-1]
        if len(row) < len(places):
            raise ValueError(f"router replay: {len(row)} routes for {len(places)} tokens of row {number}")
        found[number, places] = row[: len(places)].cpu()
    return found.to(mask.device)


def prompts_apart(rows: Sequence[Tensor], prompt_mask: np.ndarray) -> np.ndarray:
    """Return a number for each row, another one where the routes of its prompt are others."""
    known: dict[bytes, int] = {}
    keys = [row[: int(live.sum())].numpy().tobytes() for row, live in zip(rows, prompt_mask, strict=True)]
    return np.array([known.setdefault(key, len(known)) for key in keys])


# Where replay is exact.


def without_routers(base: PreTrainedModel) -> str | None:
    """Return why a model has no routes, by its modules only."""
    blocks = sum(1 for module in base.modules() if isinstance(getattr(module, "experts", None), nn.Module))
    if not blocks:
        return f"{type(base).__name__} has no experts"
    if len(routers_of(base)) != blocks:
        return f"{type(base).__name__} has experts without a router that is known"
    return None


@torch.no_grad()
def replay_obstacle(base: PreTrainedModel) -> str | None:
    """Return why the routes of a model cannot be replayed exactly, after a few forwards over a few tokens.

    The router's own choice, when it is given, has to reproduce the logits as well as the same forward again does: on
    most devices to the bit. Any other choice has to arrive at the experts, each with a weight.
    """
    if reason := without_routers(base):
        return reason
    routers, trained = routers_of(base), base.training
    ids = torch.arange(2, 14, device=base.device).view(2, 6) % base.config.get_text_config().vocab_size
    router = f"a {type(routers[0].module).__name__}"

    def logits(use: Use) -> Tensor:
        with routed(base, use):
            return base(input_ids=ids, use_cache=False).logits

    base.eval()
    try:
        recorded = Recorded()
        expected = logits(recorded)
        if [len(recorded.seen.get(number, ())) for number in range(len(routers))] != [1] * len(routers):
            return f"{router} does not choose its experts by one topk"
        natural = recorded.taken(1)[0]
        noise = (logits(Recorded()) - expected).abs().max()
        if not (logits(Replayed(natural)) - expected).abs().max() <= 3 * noise:
            return f"{router} does not reproduce its output from its own choice"
        others = _others(natural, [router.count for router in routers])
        if not _arrive(routers, others, lambda: logits(Replayed(others))):
            return f"the experts behind {router} do not get given routes, each with a weight"
    except (TypeError, RuntimeError) as error:
        return f"{type(base).__name__} does not hand routes to its routers ({error})"
    finally:
        base.train(trained)
    return None


def _others(natural: Tensor, counts: Sequence[int]) -> Tensor:
    """Return distinct experts of each token, in a fixed order that is not the router's."""
    shift = torch.arange(len(natural), device=natural.device)[:, None]
    step = torch.arange(natural.shape[2], device=natural.device)
    return torch.stack([(shift + step) % count for count in counts], dim=1).short()


def _arrive(routers: Sequence[Router], given: Tensor, forward: Callable[[], Tensor]) -> bool:
    """Return whether the experts of a forward get the routes that were `given`, each with a weight."""
    arrived: list[bool] = []

    def look(number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        routes = given[:, number]
        alike = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.shape == routes.shape]
        sent = any(torch.equal(x.short(), routes) for x in alike if not x.is_floating_point())
        weights = [x for x in alike if x.is_floating_point()]
        arrived.append(sent and any(bool((x.isfinite() & (x != 0)).all()) for x in weights))

    handles = [
        router.experts.register_forward_pre_hook(partial(look, number), with_kwargs=True)
        for number, router in enumerate(routers)
    ]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return arrived == [True] * len(routers)
