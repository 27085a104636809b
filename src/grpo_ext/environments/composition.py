"""Parse a recipe's `environments` list: names, paths or mappings in, checked specs out."""

import inspect
import os
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any, Literal, TypeAlias

from grpo_ext.config.spec import Spec
from grpo_ext.environments.catalogue import environments
from grpo_ext.environments.endpoint.server import missing
from grpo_ext.environments.protocol import Conversation, has_tools, is_agent, owns_reward
from grpo_ext.environments.tools import Tool, methods_of, tool_problems
from grpo_ext.errors import ABSENT, Problem, UnknownNameError
from grpo_ext.objective.options import Count, Within
from grpo_ext.registry import import_path, located

FUNCTION = "grpo_ext.environments.function:AgentFunction"
"""Class of an agent that is a function, `async def agent(row, client)`."""
ADAPTERS = {"openenv/": ("grpo_ext.environments.openenv:OpenEnv", "base_url")}
"""Prefixes of the names of other packages' environments: the class, and the option that the rest of the name sets."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """One entry of `environments`."""

    name: str
    """Name in the log, and in the dataset's column `environment`."""
    environment: str | type | None
    """Registered name or path of a class, or in Python the class; None if the entry has only tools."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[str | Tool, ...] = ()
    max_turns: Count = 10
    turn_timeout: Annotated[float, Within(above=0.0)] = 60.0
    """Limit of one answer, in seconds."""
    weight: float = 1.0
    """Weight of the environment's own reward."""
    on_error: Literal["none"] | float = "none"
    """Reward of a failed episode; "none": not scored."""
    isolate: bool | None = None
    """Whether each episode has its own process; None: unless the class sets `in_process`."""
    secrets: tuple[str, ...] = ()
    """Environment variables that an agent gets although they are secrets by their names."""

    @property
    def target(self) -> type | None:
        """The class."""
        return maker_of(self.environment)

    @property
    def functions(self) -> list[Tool]:
        """Tools that are not methods of the class."""
        return functions_of(self.tools)

    @property
    def make(self) -> Callable[[], Any] | None:
        """Function that makes an instance."""
        target = self.target
        return None if target is None else partial(target, **self.kwargs)

    @property
    def uses_tools(self) -> bool:
        """Whether the model calls tools."""
        return has_tools(self.target)

    @property
    def is_agent(self) -> bool:
        """Whether it calls the model itself."""
        return is_agent(self.target)

    @property
    def owns_reward(self) -> bool:
        """Whether it has its own reward."""
        return owns_reward(self.target, self.kwargs)

    @property
    def at_once(self) -> bool:
        """Whether it answers in the thread of the rollout."""
        in_process = bool(getattr(self.target, "in_process", False)) and not self.is_agent
        return not self.isolated and in_process and not self.tools

    @property
    def isolated(self) -> bool:
        """Whether each episode has its own process."""
        by_path = all(isinstance(part, str | None) for part in (self.environment, *self.tools))
        return (by_path and not getattr(self.target, "in_process", False)) if self.isolate is None else self.isolate


Entry: TypeAlias = str | type | FunctionType | Mapping[str, Any] | EnvironmentSpec
_KEYS = {"name": str, "path": str | type | FunctionType, "tools": list | tuple, "secrets": list | tuple}
_EXAMPLE = "{path: ./file.py:Class, max_turns: 4}"
_ENTRY = Spec.of(EnvironmentSpec, "name", "environment", "tools", "secrets", example=_EXAMPLE, **_KEYS)


def any_pays(specs: Iterable[EnvironmentSpec]) -> bool:
    """Return whether an environment has its own reward."""
    return any(spec.owns_reward for spec in specs)


def maker_of(environment: str | type | None) -> type | None:
    """Return the class that an entry names."""
    return environments[environment] if isinstance(environment, str) else environment


def functions_of(tools: Sequence[str | Tool]) -> list[Tool]:
    """Return the functions that an entry names."""
    return [import_path(tool) if isinstance(tool, str) else tool for tool in tools]


def parse_environments(
    entries: Sequence[Entry] | None, folder: Path | None = None
) -> tuple[list[EnvironmentSpec], list[Problem]]:  # fmt: skip
    """Return specs of the valid entries, and all problems.

    An entry is a registered name, the path of a class (`./file.py:Class`, `package.module:Class`) from `folder`, or a
    mapping with `name`, `path`, `kwargs`, `tools` and settings; in Python `path` may be the class, `tools` functions.
    """
    if entries is None or entries == []:
        return [], []
    if isinstance(entries, str | Mapping) or not isinstance(entries, Sequence) or not entries:
        return [], [Problem("environments", entries, "not a list of environments", "Write environments: [guess].")]
    specs: list[EnvironmentSpec] = []
    problems: list[Problem] = []
    for index, entry in enumerate(entries):
        parsed = entry if isinstance(entry, EnvironmentSpec) else _parse_entry(f"environments[{index}]", entry, folder)
        if isinstance(parsed, EnvironmentSpec):
            specs.append(parsed)
        else:
            problems += parsed
    for name, count in Counter(spec.name for spec in specs).items():
        if count > 1:
            cure = "Give each its own name, and its class as path."
            problems.append(Problem("environments", ABSENT, f"{count} entries are called {name!r}", cure))
    return specs, problems


def _parse_entry(place: str, entry: str | type | FunctionType | Mapping[str, Any], folder: Path | None) -> Any:
    """Return the spec of an entry, or its problems."""
    if isinstance(entry, str | type | FunctionType):
        entry = {"path" if not isinstance(entry, str) or ":" in entry else "name": entry}
    problems = list(_ENTRY.problems(place, entry))
    if not isinstance(entry, Mapping) or any(p.field in (f"{place}.name", f"{place}.path") for p in problems):
        return problems
    kwargs = value if isinstance(value := entry.get("kwargs"), Mapping) else {}
    tools = value if isinstance(value := entry.get("tools"), list | tuple) else ()
    functions, function_problems = _functions(f"{place}.tools", tools, folder)
    problems += function_problems
    environment, target, named, unknown = _target(place, entry, folder)
    key = "path" if "path" in entry else "name"
    if twice := sorted(named.keys() & kwargs.keys()):
        problems.append(Problem(f"{place}.kwargs", twice, f"{key} sets them already", "Remove them."))
    kwargs = {**kwargs, **named}
    for option in getattr(target, "paths", ()):  # which name a function
        if isinstance(path := kwargs.get(option), str) and ":" in path:
            kwargs[option] = located(path, folder)
    problems += unknown
    if target is not None:
        problems += _class_problems(place, target, kwargs, dict.fromkeys(named, key))
    if is_agent(target) and tools:
        problems.append(Problem(f"{place}.tools", ABSENT, "an agent brings its own tools", "Remove them."))
    if not unknown:
        problems += tool_problems(f"{place}.tools", target, functions_of(functions))
        if has_tools(target) and not methods_of(target) and not tools:
            cure = "Write one, or derive it from grpo_ext.Conversation or grpo_ext.Agent."
            problems.append(
                Problem(place, target or ABSENT, "neither tools (public methods) nor a method step or run", cure)
            )
    if entry.get("isolate") and any(callable(part) for part in (entry.get("path"), *functions)):
        reason = "a class or function of this process cannot be imported in another"
        problems.append(Problem(f"{place}.isolate", True, reason, "Give its path."))
    problems += _secret_problems(place, entry, target)
    if problems:
        return problems
    settings = {key: entry[key] for key in _SETTINGS if entry.get(key) is not None}
    settings["secrets"] = tuple(entry.get("secrets") or ())
    name = entry.get("name") or _name(target, kwargs)
    return EnvironmentSpec(name, environment, kwargs, tuple(functions), **settings)


def _secret_problems(place: str, entry: Mapping[str, Any], target: type | None) -> Iterator[Problem]:
    """Yield values that `secrets` and `isolate` may not have."""
    names = entry.get("secrets") or ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        yield Problem(f"{place}.secrets", ABSENT, "not a list of names", "Write [MY_API_KEY].")
    elif names and not is_agent(target):
        yield Problem(f"{place}.secrets", names, "only agents are kept from secrets", "Remove it.")
    elif missing := [name for name in names if name not in os.environ]:
        yield Problem(f"{place}.secrets", missing, "not set in the environment", "Set them, or remove the names.")
    if entry.get("isolate") is False and target is not None and target is environments["command"]:
        reason = "its programs would have the secrets of this process"
        yield Problem(f"{place}.isolate", False, reason, "Remove isolate.")


def _name(target: type | None, kwargs: Mapping[str, Any]) -> str:
    """Return the name of a class, or of the function that it calls."""
    named: Any = target
    if target is environments[FUNCTION]:
        function = kwargs["function"]
        named = import_path(function) if isinstance(function, str) else function
    return str(named.__name__) if named else "tools"


_SETTINGS = ("max_turns", "turn_timeout", "weight", "on_error", "isolate")


def _functions(place: str, tools: Sequence[Any], folder: Path | None) -> tuple[list[str | Tool], list[Problem]]:
    functions: list[str | Tool] = []
    problems = []
    for tool in tools:
        try:
            function = located(tool, folder) if isinstance(tool, str) else tool
            if not callable(import_path(function) if isinstance(function, str) else function):
                raise UnknownNameError("not a function", "Name one.")
            functions.append(function)
        except UnknownNameError as error:
            problems.append(Problem(place, tool, error.reason, error.cure))
    return functions, problems


def _target(
    place: str, entry: Mapping[str, Any], folder: Path | None
) -> tuple[Any, type | None, dict[str, Any], list[Problem]]:
    """Return name or path of the class, the class, the options that its name sets, and the problem if there is one."""
    source, key = (entry[key], key) if (key := "path") in entry else (entry.get("name"), "name")
    if source is None or (key == "name" and entry.get("tools") and source not in environments):
        cure = "Set name or path, or tools."
        return None, None, {}, [] if entry.get("tools") else [Problem(place, entry, "names no environment", cure)]
    if isinstance(source, type):
        return source, source, {}, []
    if inspect.isfunction(source):
        return (wrapper := environments[FUNCTION]), wrapper, {"function": source}, []
    for prefix, (path, option) in ADAPTERS.items():
        if source.startswith(prefix):
            return path, environments[path], {option: source.removeprefix(prefix)}, []
    try:
        path = source if source in environments else located(source, folder)
        target = environments[path]
    except UnknownNameError as error:
        cure = f"{error.cure} The path of your own environment is './file.py:Class'."
        return source, None, {}, [Problem(f"{place}.{key}", source, error.reason, cure)]
    if inspect.isfunction(target):
        return FUNCTION, environments[FUNCTION], {"function": path}, []
    if not isinstance(target, type):
        reason = f"a {type(target).__name__}, neither a class nor a function"
        return path, None, {}, [Problem(f"{place}.{key}", source, reason, "Name the class.")]
    return path, target, {}, []


def _class_problems(
    place: str, target: type, kwargs: Mapping[str, Any], places: Mapping[str, str]
) -> Iterator[Problem]:
    """Yield what is wrong with a class and its options; `places` names the keys that set some of the options."""
    name = target.__name__
    if is_agent(target):
        if (package := missing()) is not None:
            yield Problem(place, name, f"{package} is not installed, which serves agents", "Install grpo-ext[agents].")
    elif not callable(getattr(target, "reset", None)):
        cure = "Write def reset(self, **row), which begins an episode."
        yield Problem(place, name, "the class has no method reset", cure)
    if issubclass(target, Conversation) and target.step is Conversation.step:
        cure = "Write def step(self, message), which answers the model's message."
        yield Problem(place, name, "the class has no method step", cure)
    try:
        signature = inspect.signature(target)
    except ValueError:  # of a class that is written in C
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        names = ", ".join(p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD) or "none"
        reason = f"they do not make a {name} ({error})"
        yield Problem(f"{place}.kwargs", dict(kwargs), reason, f"Its options: {names}.")
        return
    bounded = list(_bound_problems(f"{place}.kwargs", target, kwargs))
    yield from bounded
    check = getattr(target, "option_problems", None)
    if check is not None and not bounded:
        for problem in check(**kwargs):
            key = places.get(problem.field) or f"kwargs.{problem.field}".rstrip(".")
            yield replace(problem, field=f"{place}.{key}")


def _bound_problems(place: str, target: type, kwargs: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield problems of options whose type hint has bounds."""
    try:
        hints = typing.get_type_hints(target.__init__, include_extras=True)  # type: ignore[misc]
    except Exception:  # of a hint that can only be read by type checkers
        return
    bounds = Spec({name: hint for name, hint in hints.items() if typing.get_origin(hint) is Annotated})
    for name in bounds.hints.keys() & kwargs.keys():
        yield from bounds.value_problems(f"{place}.{name}", name, kwargs[name])
