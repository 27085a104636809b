"""Tools: functions and an environment's public methods, and their schemas for a chat template."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, TypeAlias

from grpo_ext.environments.protocol import RESET, REWARD, has_tools
from grpo_ext.errors import ABSENT, Problem

Tool: TypeAlias = Callable[..., Any]


def methods_of(environment: type | None) -> dict[str, Tool]:
    """Return the public methods of a class of TRL's protocol, which are its tools."""
    if environment is None or not has_tools(environment):
        return {}
    return {
        name: method
        for name, method in inspect.getmembers(environment, predicate=inspect.isfunction)
        if name not in (RESET, REWARD) and not name.startswith("_")
        if not isinstance(inspect.getattr_static(environment, name), staticmethod)  # as in TRL
    }


def schemas(environment: type | None, functions: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools in the form that a chat template takes; functions first, as in TRL."""
    from transformers.utils import get_json_schema

    return [get_json_schema(tool) for tool in (*functions, *_bound(environment))]


def tool_problems(setting: str, environment: type | None, functions: Sequence[Tool]) -> Iterator[Problem]:
    """Yield a problem for each tool without a schema, or whose name is used twice."""
    names = []
    for tool in (*functions, *_bound(environment)):
        names.append(getattr(tool, "__name__", type(tool).__name__))
        try:
            schemas(None, [tool])
        except Exception as error:  # transformers raises several kinds
            cure = "Write a docstring with a line for each argument under Args:, and a type hint for each."
            yield Problem(setting, names[-1], f"the model cannot learn of this tool ({error})", cure)
    for name, count in Counter(names).items():
        if count > 1:
            reason = f"{count} tools are called {name!r}, and the model could call only one of them"
            yield Problem(setting, ABSENT, reason, "Rename the others.")


def _bound(environment: type | None) -> list[Tool]:
    """Return the methods without `self`, as the model calls them, without making an instance."""
    return [MethodType(method, object()) for method in methods_of(environment).values()]
