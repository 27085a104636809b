"""Signature of a reward function: its options, the columns it reads, whether it is awaited, its name."""

import functools
import inspect
from collections.abc import Mapping

from grpo_ext.rewards.protocol import Reward

TRL_ARGUMENTS = (
    "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments",
)  # fmt: skip
"""Arguments that TRL passes besides the dataset's columns: never options of a recipe, even behind the star."""


def function_options(function: Reward) -> dict[str, inspect.Parameter] | None:
    """Return the keyword-only parameters, which a recipe may set; None if the signature cannot be read."""
    parameters = parameters_of(function)
    if parameters is None:
        return None
    return {p.name: p for p in parameters.values() if p.kind is p.KEYWORD_ONLY and p.name not in TRL_ARGUMENTS}


def asks(function: Reward, name: str) -> bool:
    """Return whether it may read an argument; `**kwargs` may read any, `**_` none."""
    parameters = parameters_of(function)
    if parameters is None or name in parameters:
        return True
    return any(p.kind is p.VAR_KEYWORD and not p.name.startswith("_") for p in parameters.values())


def needs(function: Reward) -> list[str]:
    """Return the dataset's columns without which it cannot be called."""
    parameters = (parameters_of(function) or {}).values()
    required = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    return [name for name in required if name not in TRL_ARGUMENTS]


def parameters_of(function: Reward) -> Mapping[str, inspect.Parameter] | None:
    """Return its parameters by name; None if the signature cannot be read."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def callable_name(function: object) -> str:
    """Return the name under which TRL logs it."""
    return str(getattr(_unwrapped(function), "__name__", type(_unwrapped(function)).__name__))


def is_async(function: object) -> bool:
    """Return whether TRL awaits it."""
    function = _unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _unwrapped(function: object) -> object:
    while isinstance(function, functools.partial):
        function = function.func
    return function
