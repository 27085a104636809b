"""Reads a recipe's `reward_funcs` list: names, paths or mappings in, checked specs out."""

import inspect
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from beartype.door import is_bearable

from grpo_ext.config.spec import Spec
from grpo_ext.config.weight_schedule import Schedule, schedule_problems
from grpo_ext.errors import ABSENT, Problem, UnknownNameError
from grpo_ext.objective.options import Ascending, Within
from grpo_ext.registry import did_you_mean, located
from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.protocol import OptionError, Reward
from grpo_ext.rewards.signatures import callable_name, function_options, is_async, parameters_of
from grpo_ext.safe_reading import finite


@dataclass(frozen=True)
class RewardSpec:
    """One entry of `reward_funcs`."""

    name: str
    """Name in the logs."""
    function: str | Reward
    """Registered name, `package.module:function`, hub id or folder of a sequence-classification model; in Python also
    the function itself, which is scored in this process."""
    weight: float = 1.0
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    weight_schedule: Schedule = None
    scale: float = 1.0
    """Factor on the value, before `clip`."""
    clip: Annotated[Sequence[float], Ascending("two rising numbers, such as [-3, 3]")] | None = None
    when: str | None = None
    """Column that must hold something; a row without it is not scored (None)."""
    timeout: Annotated[float, Within(above=0.0)] = 60.0
    """Seconds one call may take in a worker."""
    on_error: Literal["none", "zero", "raise"] = "none"
    """The score of a completion after a failure: "none" (not scored), "zero", or "raise" (all processes end)."""
    retries: Annotated[int, Within(least=0.0)] = 0
    isolate: bool | None = None
    """Whether a worker process scores it; None: yes, unless the function loads a model or waits for a server."""
    independent: bool | None = None
    """Whether it scores each completion independently of its batch; None: as the function is registered."""

    @property
    def is_model(self) -> bool:
        """Whether `function` is a sequence-classification model, which TRL loads itself."""
        return _is_model(self.function)

    @property
    def is_registered(self) -> bool:
        """Whether it is one of our own."""
        return isinstance(self.function, str) and self.function in rewards

    @property
    def is_independent(self) -> bool:
        """`independent`, or by default the registration's, unless an option hands the scoring to a user's function."""
        if self.independent is not None or not self.is_registered:
            return bool(self.independent)
        uses_function = any(self.kwargs.get(option) is not None for option in getattr(self.callable, "paths", ()))
        return bool(rewards.traits(str(self.function)).independent) and not uses_function

    @property
    def callable(self) -> Reward:
        """The function itself."""
        return rewards[self.function] if isinstance(self.function, str) else self.function

    @property
    def isolated(self) -> bool:
        """`isolate`, or by default whether a path names the function and it may leave this process."""
        if self.isolate is not None or self.is_model:
            return bool(self.isolate) and not self.is_model
        return isinstance(self.function, str) and not _stays_here(self.callable, self.kwargs)


_SETTINGS = tuple(f.name for f in fields(RewardSpec) if f.name not in ("name", "function", "weight", "kwargs"))
_ENTRY = Spec.of(
    RewardSpec, "name", "function", "kwargs", example="{name: accuracy, weight: 1.0}", name=object, func=object,
    kwargs=dict[str, object],
)  # fmt: skip
NO_REWARD = "Name at least one reward, such as accuracy, or environments that have a reward."


def parse_rewards(
    entries: object, reward_weights: object = None, folder: Path | None = None
) -> tuple[list[RewardSpec], list[Problem]]:
    """Return the specs of the valid entries, and every problem. Never raises.

    An entry is a registered name, a path (`./file.py:fn`, `my_lib.rewards:fn`, `my_lib.rewards.fn`) from `folder`, the
    recipe's, or where the run starts, a reward model (hub id or folder: it has a "/"), or a mapping with `name`,
    `weight`, `kwargs` and, where `name` is only the log name, `func`.
    In Python `func` may be a function; an entry may also be a function, or a loaded model, which TRL calls itself.
    """
    if entries is None or (isinstance(entries, Sequence) and not entries):
        return [], [Problem("reward_funcs", entries, "no source of rewards", NO_REWARD)]
    if isinstance(entries, str | Mapping) or not isinstance(entries, Sequence):
        names = ", ".join(part.strip() for part in entries.split(",")) if isinstance(entries, str) else _ENTRY.example
        return [], [Problem("reward_funcs", entries, "not a list", f"Write reward_funcs: [{names}].")]
    specs: list[RewardSpec] = []
    problems: list[Problem] = []
    for index, entry in enumerate(entries):
        if callable(entry):
            specs.append(RewardSpec(_name_of(entry), entry))
            problems += _column_problems(f"reward_funcs[{index}]", entry, callable_name(entry))
            continue
        parsed = _Entry(f"reward_funcs[{index}]", {"name": entry} if isinstance(entry, str) else entry, folder)
        entry_problems = list(parsed.problems())
        problems += entry_problems
        specs += [] if entry_problems else [parsed.spec()]
    problems += _repeated_names(specs)
    if reward_weights is not None:
        weight_problems = list(_weight_problems(entries, reward_weights))
        problems += weight_problems
        if not weight_problems and len(specs) == len(entries):
            specs = [replace(s, weight=float(w)) for s, w in zip(specs, typing.cast(Any, reward_weights), strict=True)]
    return specs, problems


def _name_of(reward: Reward) -> str:
    """Return the name under which TRL logs a function, or a loaded model."""
    path = getattr(getattr(reward, "config", None), "_name_or_path", None)
    return str(path).split("/")[-1] if path else callable_name(reward)


class _Entry:
    """One entry while it is checked.

    Args:
        place: its name in messages.
        entry: what the recipe has, a mapping if it is right.
        folder: the recipe's folder.
    """

    def __init__(self, place: str, entry: Any, folder: Path | None) -> None:
        self.place, self.entry, self.folder = place, entry, folder
        self.function: Any = None
        self.target: Reward | None = None
        self.kwargs: dict[str, Any] = {}

    def spec(self) -> RewardSpec:
        """Return the spec of an entry without problems."""
        if _is_model(self.function):
            name = self.function.rstrip("/").split("/")[-1]
        else:
            name = self.entry["name"] if {"name", "func"} <= self.entry.keys() else callable_name(self.target)
        settings = {key: self.entry[key] for key in _SETTINGS if self.entry.get(key) is not None}
        settings |= {"clip": tuple(map(float, settings["clip"]))} if "clip" in settings else {}
        weight = self.entry.get("weight")
        return RewardSpec(name, self.function, 1.0 if weight is None else float(weight), self.kwargs, **settings)

    def problems(self) -> Iterator[Problem]:
        """Yield the problems of the entry, and find its function and options."""
        if not isinstance(self.entry, Mapping):
            reason, cure = "neither a name nor a mapping", f"Write a name, a path or {_ENTRY.example}."
            yield Problem(self.place, self.entry, reason, cure)
            return
        function = self.function = self.entry.get("func", self.entry.get("name"))
        yield from self._key_problems()
        name = self.entry.get("name", callable_name(function) if callable(function) else function)
        if not ((callable(function) or isinstance(function, str)) and function and isinstance(name, str) and name):
            cure = "Give name (and func, if name is only the log name) as strings."
            yield Problem(self.place, self.entry, "it does not name a reward", cure)
        elif _is_model(function):
            yield from self._model_problems(name)
        else:
            yield from self._function_problems()

    def _key_problems(self) -> Iterator[Problem]:
        """Yield the problems of all keys, except for those of the function and its options."""
        own = isinstance(self.function, str) and self.function in rewards
        target = rewards[self.function] if own else self.function
        options = (function_options(target) or {}) if callable(target) else {}
        for key, value in self.entry.items():
            if key in _ENTRY.hints:
                yield from _ENTRY.value_problems(f"{self.place}.{key}", key, value)
            elif key in options:
                cure = f"Write kwargs: {{{key}: {value!r}}}."
                yield self._problem(key, value, "it is an option of the function", cure)
            else:
                yield self._problem(str(key), value, "no such key", did_you_mean(str(key), [*_ENTRY.hints, *options]))
        kwargs = self.entry.get("kwargs")
        self.kwargs = {key: value for key, value in self.entry.items() if key in options and key not in _ENTRY.hints}
        self.kwargs |= kwargs if isinstance(kwargs, Mapping) else {}
        for problem in schedule_problems(self.entry.get("weight_schedule")):
            yield replace(problem, field=f"{self.place}.{problem.field}")
        if self.entry.get("scale") == 0:
            yield Problem(f"{self.place}.scale", 0, "every value would be 0", "Give a factor, such as 0.1.")

    def _model_problems(self, name: str) -> Iterator[Problem]:
        for key in (key for key in _SETTINGS if self.entry.get(key) is not None):
            cure = "Use the reward reward_model for this setting."
            yield self._problem(key, self.entry[key], "TRL scores a reward model by itself", cure)
        if self.kwargs:
            yield self._problem("kwargs", self.kwargs, "TRL loads a reward model without options", "Remove kwargs.")
        if name != self.function:
            cure = "Remove name, or write it as name."
            yield self._problem("name", name, "TRL logs a reward model under its own id", cure)

    def _function_problems(self) -> Iterator[Problem]:
        function = self.function
        try:
            if isinstance(function, str):
                function = self.function = function if function in rewards else located(function, self.folder)
            target = rewards[function] if isinstance(function, str) else function
        except UnknownNameError as error:
            forms = "Name a function as './file.py:function' or 'package.module:function', a reward model with a '/'."
            yield self._problem("", function, error.reason, f"{error.cure} {forms}".strip())
            return
        if not callable(target):
            yield self._problem("", function, f"it is a {type(target).__name__}, not a function", "Name a callable.")
            return
        self.target = target
        for key in getattr(target, "paths", ()):
            if isinstance(path := self.kwargs.get(key), str):
                self.kwargs[key] = located(path, self.folder)
        yield from self._option_problems(target)
        yield from self._process_problems(target)

    def _option_problems(self, target: Reward) -> Iterator[Problem]:
        options = function_options(target)
        if options is None:
            return
        name = self.function if isinstance(self.function, str) else callable_name(self.function)
        yield from _column_problems(self.place, target, name)
        defaults = {key: p.default for key, p in options.items() if p.default is not p.empty}
        spec = Spec({key: _hint(target, key) for key in options}, defaults, owner=name)
        problems = list(spec.problems(f"{self.place}.kwargs", self.kwargs))
        yield from problems or self._value_problems(target)

    def _value_problems(self, target: Reward) -> Iterator[Problem]:
        """Yield what one of our own functions raises on an empty batch: it checks its options first."""
        if self.function not in rewards or rewards[self.function] is not target or is_async(target) or not self.kwargs:
            return
        parameters = inspect.signature(target).parameters.values()
        try:
            target(**{p.name: [] for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}, **self.kwargs)
        except OptionError as error:
            yield replace(error.problem, field=f"{self.place}.kwargs.{error.problem.field}")
        except ValueError as error:
            yield self._problem("kwargs", self.kwargs, str(error).rstrip("."), "Correct it.")
        except Exception:  # not about the options: the first real batch will show it
            return

    def _process_problems(self, target: Reward) -> Iterator[Problem]:
        """Yield the problems of a timeout, or of isolation, of a function that is scored in this process."""
        isolate, timeout = self.entry.get("isolate"), self.entry.get("timeout")
        if callable(self.function) and (isolate or timeout is not None):
            key, value = ("isolate", isolate) if isolate else ("timeout", timeout)
            cure = "Give its path, 'my_module:name'."
            yield self._problem(key, value, "a function is scored in this process", cure)
        elif timeout is not None and isolate is False:
            cure = "Remove one of them."
            reason = "in this process a call cannot be stopped"
            yield Problem(f"{self.place}.timeout", timeout, reason, cure, beside={"isolate": False})
        elif timeout is not None and isolate is None and _stays_here(target, self.kwargs):
            takes = "timeout" in (function_options(target) or {})
            cure = "Put it into kwargs, as the limit of one request." if takes else "Remove it."
            reason = f"{self.function!r} is scored in this process, where a call cannot be stopped"
            yield self._problem("timeout", timeout, reason, cure)

    def _problem(self, key: str, value: object, reason: str, cure: str) -> Problem:
        return Problem(f"{self.place}.{key}" if key else self.place, value, reason, cure)


def _is_model(function: object) -> bool:
    return isinstance(function, str) and "/" in function and ":" not in function and not function.endswith(".py")


def _column_problems(place: str, function: Reward, name: str) -> Iterator[Problem]:
    """Yield why TRL could not call a function; a builtin without a signature takes what it takes."""
    parameters = parameters_of(function)
    if parameters is not None and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        reason = "it does not take **kwargs, but TRL passes it every dataset column"
        yield Problem(place, name, reason, "Add **kwargs.")


def _stays_here(function: Reward, kwargs: Mapping[str, object]) -> bool:
    """Return whether its own `in_process` keeps it in this process: True, or the options for which it does."""
    in_process = getattr(function, "in_process", False)
    return in_process is True or bool(in_process and set(in_process) & set(kwargs))


def _hint(function: Reward, option: str) -> Any:
    """Return the type of an option, or `object` if it cannot be resolved or checked."""
    try:
        hint = typing.get_type_hints(function, include_extras=True)[option]
        is_bearable(None, hint)
    except Exception:  # annotations of names that are imported for type checkers only, hints beyond beartype
        return object
    return hint


def _repeated_names(specs: Sequence[RewardSpec]) -> Iterator[Problem]:
    functions: dict[str, list[str]] = {}
    for spec in specs:
        functions.setdefault(spec.name, []).append(spec.function if isinstance(spec.function, str) else spec.name)
    for name, same in functions.items():
        if len(same) > 1:
            reason = f"{len(same)} entries have the log name {name!r}, and TRL would average them in its logs"
            cure = f"Give each its own: {{name: {name}_2, func: {same[-1]}}}."
            yield Problem("reward_funcs", ABSENT, reason, cure)


def _weight_problems(entries: Sequence[object], weights: object) -> Iterator[Problem]:
    if isinstance(weights, str | Mapping) or not isinstance(weights, Sequence):
        yield Problem("reward_weights", weights, "not a list", "Give one number per reward.")
        return
    if len(weights) != len(entries):
        reason = f"{len(weights)} weights for {len(entries)} rewards"
        yield Problem("reward_weights", weights, reason, "Give one each.")
    for i, weight in enumerate(weights):
        if finite(weight) is None:
            yield Problem(f"reward_weights[{i}]", weight, "not a finite number", "Give one.")
    if any(isinstance(entry, Mapping) and "weight" in entry for entry in entries):
        yield Problem("reward_weights", weights, "entries of reward_funcs give weights too", "Keep one of the two.")
