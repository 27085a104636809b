"""What a recipe's `environments` list means: names, paths or mappings in, checked specs out."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from grpo_ext.environments.catalogue import environments
from grpo_ext.environments.protocol import Conversation, is_conversation, owns_reward
from grpo_ext.environments.tools import methods_of, tool_problems
from grpo_ext.errors import UnknownNameError
from grpo_ext.registry import did_you_mean, import_path, located

FAMILIES = {
    "textarena/": ("grpo_ext.environments.textarena:TextArena", "game"),
    "verifiers/": ("grpo_ext.environments.verifiers:Verifiers", "name"),
    "openenv/": ("grpo_ext.environments.openenv:OpenEnv", "base_url"),
}
"""Environments of others, whose names begin so: the class, and the option that the rest of the name is."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """One entry of `environments`."""

    name: str
    """What it is logged under, and what the dataset's column `environment` says."""
    environment: str | type | None
    """Registered name, or path of a class; in Python also the class itself. None: tools alone."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[str | Callable[..., Any], ...] = ()
    max_turns: int = 10
    turn_timeout: float = 60.0
    """Seconds that one answer may take."""
    weight: float = 1.0
    """Of the environment's own reward."""
    on_error: str | float = "none"
    """What a failure makes of the attempt: "none" (not scored), or this reward of the environment's."""
    isolate: bool | None = None
    """Whether each attempt has a process of its own; None: yes, unless the class says `in_process`."""

    @property
    def target(self) -> type | None:
        """The class itself."""
        return maker_of(self.environment)

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The tools that are no methods."""
        return functions_of(self.tools)

    @property
    def make(self) -> Callable[[], Any] | None:
        """Makes one."""
        target = self.target
        return None if target is None else partial(target, **self.kwargs)

    @property
    def uses_tools(self) -> bool:
        """Whether the model calls tools."""
        return not is_conversation(self.target)

    @property
    def owns_reward(self) -> bool:
        """Whether it has a reward of its own."""
        return owns_reward(self.target)

    @property
    def at_once(self) -> bool:
        """Whether it answers within the loop itself."""
        return not self.isolated and bool(getattr(self.target, "in_process", False)) and not self.tools

    @property
    def isolated(self) -> bool:
        """`isolate`, settled."""
        by_path = all(isinstance(part, str | None) for part in (self.environment, *self.tools))
        return (by_path and not getattr(self.target, "in_process", False)) if self.isolate is None else self.isolate


def any_pays(specs: Iterable[EnvironmentSpec]) -> bool:
    """Whether one of them has a reward of its own."""
    return any(spec.owns_reward for spec in specs)


def maker_of(environment: str | type | None) -> Any:
    """The class that an entry names."""
    return environments[environment] if isinstance(environment, str) else environment


def functions_of(tools: Sequence[str | Callable[..., Any]]) -> list[Callable[..., Any]]:
    """The functions that an entry names."""
    return [import_path(tool) if isinstance(tool, str) else tool for tool in tools]


_SETTINGS = tuple(f.name for f in fields(EnvironmentSpec) if f.name not in ("name", "environment", "kwargs", "tools"))
_KEYS = ("name", "path", "kwargs", "tools", *_SETTINGS)


def parse(entries: Any, folder: Path | None = None) -> tuple[list[EnvironmentSpec], list[str]]:
    """Specs of the valid entries, and every problem: the offending value, the reason, the cure.

    An entry is a registered name, the path of a class (`./file.py:Class`, `package.module:Class`) from `folder`, or a
    mapping with `name`, `path`, `kwargs`, `tools` and settings; in Python `path` may be the class, `tools` functions.
    """
    if entries is None or entries == []:
        return [], []
    if isinstance(entries, str | Mapping) or not isinstance(entries, Sequence) or not entries:
        return [], [f"environments={entries!r}: not a list of any. Write environments: [guess]."]
    specs: list[EnvironmentSpec] = []
    problems: list[str] = []
    for index, entry in enumerate(entries):
        if isinstance(entry, EnvironmentSpec):
            specs.append(entry)
            continue
        spec, found = _parse_entry(entry, folder)
        problems += [f"environments[{index}]={entry!r}: {problem}" for problem in found]
        specs += [spec] if spec else []
    names = [spec.name for spec in specs]
    problems += [
        f"environments: {names.count(name)} entries are called {name!r}. Give each its own name, its class as path."
        for name in dict.fromkeys(n for n in names if names.count(n) > 1)
    ]
    return specs, problems


def _parse_entry(entry: Any, folder: Path | None) -> tuple[EnvironmentSpec | None, list[str]]:
    if isinstance(entry, str | type):
        entry = {"path" if isinstance(entry, type) or ":" in entry else "name": entry}
    if not isinstance(entry, Mapping):
        return None, ["neither a name nor a mapping. Write a name, or {path: ./file.py:Class, max_turns: 4}."]
    problems = [f"unknown key {key!r}. {did_you_mean(str(key), _KEYS)}" for key in entry if key not in _KEYS]
    kwargs, tools = entry.get("kwargs") or {}, entry.get("tools") or []
    if not isinstance(kwargs, Mapping):
        problems.append(f"kwargs={kwargs!r} is not a mapping from options. Write kwargs: {{option: value}}.")
        kwargs = {}
    functions, found = _functions(tools, folder)
    problems += found
    environment, target, more, found = _target(entry, bool(tools), folder)
    problems += found
    kwargs = {**more, **kwargs}
    if target is not None:
        problems += _class_problems(target, kwargs)
    if not found:
        problems += tool_problems(target, [import_path(f) if isinstance(f, str) else f for f in functions])
        if not is_conversation(target) and not methods_of(target) and not functions:
            problems.append(
                f"{_shown(environment)} has neither tools (public methods) nor step. Write one, or derive it from "
                "grpo_ext.Conversation."
            )
    problems += _setting_problems(entry)
    name = entry.get("name") or (target.__name__ if target else "tools")
    if problems:
        return None, problems
    settings = {key: entry[key] for key in _SETTINGS if entry.get(key) is not None}
    return EnvironmentSpec(str(name), environment, dict(kwargs), tuple(functions), **settings), []


def _functions(tools: Any, folder: Path | None) -> tuple[list[Any], list[str]]:
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        return [], [f"tools={tools!r}: not a list. Write tools: [./file.py:function]."]
    functions, problems = [], []
    for tool in tools:
        try:
            tool = located(tool, folder) if isinstance(tool, str) else tool
            if not callable(import_path(tool) if isinstance(tool, str) else tool):
                raise UnknownNameError(f"{tool!r} is no function.")
            functions.append(tool)
        except UnknownNameError as error:
            problems.append(f"tools: {error}")
    return functions, problems


def _target(entry: Mapping[str, Any], has_tools: bool, folder: Path | None) -> tuple[Any, Any, dict[str, Any], list]:
    """Name or path of the class, the class, options that the name gives, problems."""
    given = entry.get("path", entry.get("name"))
    if given is None or ("path" not in entry and has_tools and given not in environments):
        missing = [] if has_tools else ["it names no environment. Give name or path, or tools."]
        return None, None, {}, missing
    if isinstance(given, type):
        return given, given, {}, []
    for family, (path, option) in FAMILIES.items():
        if str(given).startswith(family):
            return path, environments[path], {option: str(given).removeprefix(family)}, []
    try:
        path = given if given in environments else located(str(given), folder)
        target = environments[path]
    except UnknownNameError as error:
        return given, None, {}, [f"{error} An environment of yours is './file.py:Class' as path."]
    if not isinstance(target, type):
        return path, None, {}, [f"{given!r} is a {type(target).__name__}, not a class. Name the class."]
    return path, target, {}, []


def _class_problems(target: type, kwargs: Mapping[str, Any]) -> Iterator[str]:
    name = target.__name__
    if not callable(getattr(target, "reset", None)):
        yield f"{name} has no method reset. Write def reset(self, **row), which begins an attempt."
    if is_conversation(target) and target.step is Conversation.step:  # type: ignore[attr-defined]
        yield f"{name} has no method step. Write def step(self, message), which answers the model's message."
    try:
        inspect.signature(target).bind(**kwargs)
    except TypeError as error:
        known = [p.name for p in inspect.signature(target).parameters.values() if p.kind is not p.VAR_KEYWORD]
        yield f"kwargs={dict(kwargs)!r} do not make a {name} ({error}). Its options: {', '.join(known) or 'none'}."
    except ValueError:  # a signature that cannot be read
        return
    else:
        check = getattr(target, "option_problems", None)
        yield from check(**kwargs) if check is not None else ()


def _setting_problems(entry: Mapping[str, Any]) -> Iterator[str]:
    turns, timeout = entry.get("max_turns", 1), entry.get("turn_timeout", 1.0)
    if not isinstance(turns, int) or isinstance(turns, bool) or turns < 1:
        yield f"max_turns={turns!r}: the model would never speak. Set 1 or more."
    if not _is_finite(timeout) or timeout <= 0:
        yield f"turn_timeout={timeout!r} is no positive number of seconds. Give one, such as 10."
    if not _is_finite(entry.get("weight", 1.0)):
        yield f"weight={entry['weight']!r} is not a finite number. Give one, such as 1.0."
    on_error = entry.get("on_error", "none")
    if on_error != "none" and not _is_finite(on_error):
        yield f"on_error={on_error!r}: neither 'none' (not scored) nor a reward. Write none, or a number such as 0.0."
    if not isinstance(entry.get("isolate", True), bool | None):
        yield f"isolate={entry['isolate']!r} is neither true nor false. Give one."
    given = [entry.get("path"), *(entry.get("tools") or [])]
    if entry.get("isolate") and any(callable(part) for part in given):
        yield "isolate: true, but a class or function of this process cannot be imported elsewhere. Give its path."


def _is_finite(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)


def _shown(environment: Any) -> str:
    return environment.__name__ if isinstance(environment, type) else repr(environment)
