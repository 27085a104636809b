"""Dropout, which would make rollouts, old log-probabilities and the loss see different networks."""

import dis
import inspect
from collections.abc import Iterator
from functools import cache, partial
from itertools import pairwise
from typing import Any

from torch import nn
from transformers import PreTrainedModel

Rates = list[tuple[Any, str, float]]
"""What holds a rate, the name of it there, and the rate."""


def active_dropout(model: nn.Module) -> list[str]:
    """Names of the modules that drop something in training."""
    return [name or type(module).__name__ for name, module in model.named_modules() if [*_rates(module)]]


def switch_dropout_off(model: nn.Module) -> None:
    """No dropout in modules, in attention nor in the config, so that rollouts, old log-probabilities and loss agree.

    A checkpoint keeps the config's rates: `save_pretrained` of every model inside writes them as they were.
    """
    found = [rate for module in model.modules() for rate in _rates(module)]
    for holder, name, _ in found:
        setattr(holder, name, 0.0)
    in_config = [rate for rate in found if not isinstance(rate[0], nn.Module)]
    for module in model.modules():
        if in_config and isinstance(module, PreTrainedModel):
            module.save_pretrained = partial(_save, module, in_config)  # type: ignore[method-assign]


def _rates(module: nn.Module) -> Iterator[tuple[Any, str, float]]:
    """What a module drops by: rates of its own, and those that it reads from its config at each forward."""
    for name, value in vars(module).items():
        named = "drop" in name or (name == "p" and "Dropout" in type(module).__name__)
        if named and isinstance(value, float) and value > 0:
            yield module, name, value
    config = getattr(module, "config", None)
    for name in _read_later(type(module)):  # type: ignore[arg-type]
        if isinstance(value := getattr(config, name, None), float) and value > 0:
            yield config, name, value


@cache
def _read_later(kind: type[nn.Module]) -> frozenset[str]:
    """The `drop` of every `config.drop` in a module's methods, its constructor aside."""
    methods = [
        inspect.unwrap(method)
        for parent in kind.__mro__
        if issubclass(parent, nn.Module) and parent not in (nn.Module, PreTrainedModel)
        for name, method in vars(parent).items()
        if name != "__init__" and inspect.isfunction(method)
    ]
    steps = (pair for method in methods for pair in pairwise(dis.get_instructions(method)))
    looked_up = (str(attribute.argval) for config, attribute in steps if config.argval == "config")
    return frozenset(name for name in looked_up if "drop" in name)


def _save(model: PreTrainedModel, rates: Rates, *args: Any, **kwargs: Any) -> None:
    """`model.save_pretrained` with these rates in the config."""
    for config, name, rate in rates:
        setattr(config, name, rate)
    try:
        type(model).save_pretrained(model, *args, **kwargs)
    finally:
        for config, name, _ in rates:
            setattr(config, name, 0.0)
