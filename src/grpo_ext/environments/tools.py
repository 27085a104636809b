"""Tools: functions and an environment's public methods, as a chat template is told of them."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

from grpo_ext.environments.protocol import RESET, REWARD, is_conversation


def methods_of(environment: type | None) -> dict[str, Callable[..., Any]]:
    """Public methods of one of TRL's classes, which are its tools."""
    if environment is None or is_conversation(environment):
        return {}
    return {
        name: method
        for name, method in inspect.getmembers(environment, predicate=inspect.isfunction)
        if name not in (RESET, REWARD) and not name.startswith("_")
        if not isinstance(inspect.getattr_static(environment, name), staticmethod)  # as in TRL
    }


def schemas(environment: type | None, functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Tools in the form that a chat template takes; functions first, as in TRL."""
    return [schema(tool) for tool in (*functions, *_bound(environment))]


def schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """One tool in the form that a chat template takes."""
    from transformers.utils import get_json_schema

    return get_json_schema(tool)


def tool_problems(environment: type | None, functions: Sequence[Callable[..., Any]]) -> Iterator[str]:
    """Tools that a model cannot be told of: value, reason, cure."""
    names: list[str] = []
    for tool in (*functions, *_bound(environment)):
        name = getattr(tool, "__name__", type(tool).__name__)
        names.append(name)
        if not inspect.getdoc(tool):
            yield (
                f"tool {name!r} has no docstring, from which the model learns what it does. Write one with a line "
                "for each argument under Args:."
            )
            continue
        bare = [p.name for p in inspect.signature(tool).parameters.values() if p.annotation is p.empty]
        if bare:
            yield f"tool {name!r}: {', '.join(bare)} has no type hint. Write one, such as {bare[0]}: str."
            continue
        try:
            schema(tool)
        except Exception as error:  # transformers' own, one for each thing it cannot read
            yield f"tool {name!r}: {error} Write a line for each argument under Args: in its docstring."
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield f"{names.count(name)} tools are called {name!r}, and the model could call only one. Rename the others."


def _bound(environment: type | None) -> list[Callable[..., Any]]:
    """Methods without their `self`, as the model calls them; no instance is made."""
    return [MethodType(method, object()) for method in methods_of(environment).values()]
