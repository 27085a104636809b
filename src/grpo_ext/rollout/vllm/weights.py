"""The weights that a sampler gets of a policy with adapters, or of one whose base is quantised.

A policy with a LoRA computes with W + scaling B A, where W may be packed into 4 bits, but never forms that sum. The
sampler needs it as one weight. It is formed here in float32, one module at a time and beside the policy, whose own
weights are not written, and rounded once: to the dtype of the sampler.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from peft import PeftModel
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_bnb_weight
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Gather: TypeAlias = Callable[[list[nn.Parameter]], AbstractContextManager[None]]
"""Context in which parameters that DeepSpeed ZeRO-3 has split are whole."""

PACKED = ("Params4bit", "Int8Params")
"""Classes of bitsandbytes' parameters, whose values `whole` unpacks."""
ROWS = 1024
"""Rows of a weight that are compared at a time."""


@dataclass
class Rounding:
    """Loss of the adapters' update by the rounding to the sampler's dtype, over the weights of a push.

    Attributes:
        lost: sum of (pushed - exact)^2.
        update: sum of (exact - base)^2.
    """

    lost: float | Tensor = 0.0
    update: float | Tensor = 0.0

    def add(self, pushed: Tensor, exact: Tensor, base: Tensor) -> None:
        """Count one weight."""
        self.lost += _squared_distance(pushed, exact)
        self.update += _squared_distance(exact, base)

    @property
    def share(self) -> float:
        """Norm of the loss by the norm of the update: 0 if the sampler gets all of it, 1 if it gets none of it."""
        return float(self.lost / self.update) ** 0.5 if self.update else 0.0


def _squared_distance(a: Tensor, b: Tensor) -> Tensor:
    rows = zip(a.split(ROWS), b.split(ROWS), strict=True)
    return torch.stack([(x.float() - y.float()).square().sum(dtype=torch.float64) for x, y in rows]).sum()


def is_quantised(model: nn.Module) -> bool:
    """Return whether `model` has weights that bitsandbytes has packed."""
    return any(type(p).__name__ in PACKED for p in model.parameters())


def effective_weights(
    model: nn.Module,
    dtype: torch.dtype,
    rounding: Rounding,
    gather: Gather = lambda parameters: nullcontext(),
    device: torch.device | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with which `model` computes, under the names of the model without adapters.

    Args:
        model: the policy, which is only read.
        dtype: of the sampler, to which a sum is rounded. Weights without an adapter keep their own.
        rounding: counts what is lost.
        gather: makes weights whole that DeepSpeed ZeRO-3 has split.
        device: where weights that FSDP2 keeps on the CPU are gathered.
    """
    seen: set[int] = set()  # a weight that is tied has one name in the sampler
    for prefix, layers, module in places(base_model(model)):
        own = {name: p for name, p in module.named_parameters(recurse=False) if id(p) not in seen}
        seen |= {id(p) for p in own.values()}
        if not layers:
            for name, parameter in own.items():
                with gather([parameter]):
                    yield prefix + name, whole(module, parameter, device)
        elif own:
            with gather([*cast(nn.Module, layers[0]).parameters()]):
                for name, (exact, base) in _sums(layers, module, device).items():
                    pushed = exact.to(dtype)
                    rounding.add(pushed, exact, base)
                    yield prefix + name, pushed


def policy_dtype(model: Any) -> torch.dtype:
    """Return the dtype of the weights of `model`; an LM head that was cast to float32 does not count."""
    head = model.get_output_embeddings()
    cast_head = None if head is None else head.weight
    return next(p.dtype for p in model.parameters() if p.is_floating_point() and p is not cast_head)


def base_model(model: nn.Module) -> nn.Module:
    """Return the model that PEFT has wrapped."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def places(
    module: nn.Module, prefix: str = "", layers: tuple[BaseTunerLayer, ...] = ()
) -> Iterator[tuple[str, tuple[BaseTunerLayer, ...], nn.Module]]:
    """Yield the modules of the model without adapters, each with its prefix and the layers that adapt it, outside in.

    PEFT wraps a mixture's experts once for each of their parameters that it adapts.
    """
    if isinstance(module, AuxiliaryTrainingWrapper):
        yield from places(_in_use(module), prefix, layers)
    elif isinstance(module, BaseTunerLayer):
        yield from places(cast(nn.Module, module.base_layer), prefix, (*layers, module))
    else:
        yield prefix, layers, module
        for name, child in module.named_children():
            yield from places(child, f"{prefix}{name}.", ())


def _in_use(wrapper: AuxiliaryTrainingWrapper) -> nn.Module:
    """Return the module that computes in the place of one that is trained whole, or in some of its rows."""
    if not isinstance(wrapper, ModulesToSaveWrapper):
        return cast(nn.Module, wrapper.token_adapter)
    copies, active = wrapper.modules_to_save, wrapper.active_adapters
    trained = not wrapper.disable_adapters and bool(active) and active[0] in copies
    return copies[active[0]] if trained else cast(nn.Module, wrapper.original_module)


def whole(owner: nn.Module, parameter: Tensor, device: torch.device | None = None) -> Tensor:
    """Return the values of a parameter: those of all processes under FSDP2, unpacked ones of a quantised weight."""
    if type(parameter).__name__ in PACKED:
        return _unpacked(owner, cast(nn.Parameter, parameter)).detach()
    if isinstance(parameter, DTensor):
        return cast(DTensor, parameter.to(device)).full_tensor().detach()
    return parameter.detach()


def _unpacked(owner: nn.Module, parameter: nn.Parameter) -> Tensor:
    state: Any = getattr(parameter, "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):  # rearranged by a forward without gradient on a CPU
        from bitsandbytes.functional import gemv_4bit

        return cast(Tensor, gemv_4bit(torch.eye(state.shape[1], dtype=state.dtype), parameter.data, state=state)).T
    return dequantize_bnb_weight(parameter, state=getattr(owner, "state", None))


def _sums(
    layers: tuple[BaseTunerLayer, ...], module: nn.Module, device: torch.device | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each weight of an adapted module with its adapters, in float32 or better, and without them."""
    outermost = cast(nn.Module, layers[0])
    with _in_float32(outermost, device) as bases:
        try:
            for layer in reversed(layers):
                if not layer.disable_adapters:
                    _merge(layer)
            merged = {name: p.detach() for name, p in module.named_parameters(recurse=False)}
        finally:
            for layer in layers:
                layer.merged_adapters.clear()
    return {name: (exact, bases[module, name]) for name, exact in merged.items()}


@contextmanager
def _in_float32(outermost: nn.Module, device: torch.device | None) -> Iterator[dict[tuple[nn.Module, str], Tensor]]:
    """Put copies in float32 in the places of a layer's parameters; return what the parameters hold."""
    owned = [(m, name, p) for m in outermost.modules() for name, p in m.named_parameters(recurse=False)]
    held = {(m, name): whole(m, p, device) for m, name, p in owned}
    try:
        for (m, name), value in held.items():
            wide = value.to(torch.promote_types(value.dtype, torch.float32), copy=True)
            setattr(m, name, nn.Parameter(wide, requires_grad=False))
        yield held
    finally:
        for m, name, parameter in owned:
            setattr(m, name, parameter)


def _merge(layer: BaseTunerLayer) -> None:
    """Add the active adapters to the weight in the place of the base's.

    PEFT's LoRA layers for bitsandbytes would pack the sum again.
    """
    packs = type(layer).__module__ == "peft.tuners.lora.bnb"
    cast(Any, lora.Linear if packs else type(layer)).merge(layer)


class HostCopy:
    """A copy of all weights on the CPU, written by each push; the policy itself has moved when a server dies."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def taking(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same tensors, each after it has been copied."""
        for name, tensor in named:
            if name not in self._tensors:
                self._tensors[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._tensors[name].copy_(tensor.detach())
            yield name, tensor

    def named(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield the copied tensors by name, each on `device`."""
        for name, tensor in self._tensors.items():
            yield name, tensor.to(device)
