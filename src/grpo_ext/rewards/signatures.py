"""What a reward function's signature says: its options, what it asks for, whether it is awaited, its name."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from grpo_ext.rewards.protocol import Reward

TRL_ARGUMENTS = (
    "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments",
)  # fmt: skip
"""What TRL passes besides the dataset's columns: never options of a recipe, wherever they stand in a signature."""


def options(function: Reward) -> dict[str, inspect.Parameter] | None:
    """The keyword-only parameters, which a recipe may set; None if the signature cannot be read."""
    parameters = _parameters(function)
    if parameters is None:
        return None
    return {p.name: p for p in parameters.values() if p.kind is p.KEYWORD_ONLY and p.name not in TRL_ARGUMENTS}


def asks(function: Reward, name: str) -> bool:
    """Whether it may look at an argument; `**kwargs` may look at any, `**_` says that it does not."""
    parameters = _parameters(function)
    if parameters is None or name in parameters:
        return True
    return any(p.kind is p.VAR_KEYWORD and not p.name.startswith("_") for p in parameters.values())


def needs(function: Reward) -> list[str]:
    """The dataset's columns without which it cannot be called."""
    parameters = (_parameters(function) or {}).values()
    required = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    return [name for name in required if name not in TRL_ARGUMENTS]


def _parameters(function: Reward) -> Mapping[str, inspect.Parameter] | None:
    """None if the signature cannot be read."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def callable_name(function: Any) -> str:
    """What TRL logs it under."""
    return str(getattr(_unwrapped(function), "__name__", type(_unwrapped(function)).__name__))


def is_async(function: Any) -> bool:
    """Whether TRL would await it."""
    function = _unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function
