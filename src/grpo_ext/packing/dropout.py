"""Find and switch off dropout, with which rollouts, old log-probabilities and the loss see different networks."""

import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from grpo_ext.config.temporary import each_temporarily

Rates = list[tuple[Any, str, float]]
"""The object that holds a rate, the rate's name there, and the rate."""


def active_dropout(model: nn.Module) -> list[str]:
    """Return the names of the modules that drop something in training."""
    return [name or type(module).__name__ for name, module in model.named_modules() if [*_rates(module)]]


def switch_dropout_off(model: nn.Module) -> None:
    """Set the rates of modules, attention and config to 0.

    Checkpoints keep the config's rates: `save_pretrained` of every model inside writes the original ones.
    """
    rates = [rate for module in model.modules() for rate in _rates(module)]
    for holder, name, _ in rates:
        setattr(holder, name, 0.0)
    in_config = [rate for rate in rates if not isinstance(rate[0], nn.Module)]
    for module in model.modules():
        if in_config and isinstance(module, PreTrainedModel):
            module.save_pretrained = partial(_save, module, in_config)  # type: ignore[method-assign]


def _rates(module: nn.Module) -> Iterator[tuple[Any, str, float]]:
    """Find the rates of a module: its own, and those that it reads from its config at each forward."""
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
    """Names of the rates in `config.rate` in the source of a module's methods, except its constructor."""
    names = set[str]()
    for parent in kind.__mro__:
        if issubclass(parent, nn.Module) and parent not in (nn.Module, PreTrainedModel):
            for name, method in vars(parent).items():
                if name != "__init__" and inspect.isfunction(method):
                    with suppress(OSError):  # made by exec, as transformers' generated methods
                        names.update(re.findall(r"config\.(\w*drop\w*)", inspect.getsource(inspect.unwrap(method))))
    return frozenset(names)


def _save(model: PreTrainedModel, rates: Rates, *args: Any, **kwargs: Any) -> None:
    """Call `model.save_pretrained` with these rates in the config."""
    with each_temporarily(rates):
        type(model).save_pretrained(model, *args, **kwargs)
