"""What a recipe's `reward_funcs` list means: names, paths or mappings in, TRL-ready callables out."""

import functools
import inspect
import math
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_ext.registry import UnknownNameError, did_you_mean
from grpo_ext.rewards._registry import Reward, rewards

_KEYS = ("name", "func", "weight", "kwargs")
# TRL passes these besides the dataset's columns: never options of a recipe, wherever they stand in a signature.
_TRL_COLUMNS = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
)


@dataclass(frozen=True)
class RewardSpec:
    """One entry of `reward_funcs`: log name, registered name or path or model id, weight, options."""

    name: str
    function: str
    weight: float = 1.0
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_model(self) -> bool:
        """Whether `function` is a sequence-classification model (hub id or folder), which TRL loads itself."""
        return _is_model(self.function)


class BoundReward:
    """A reward function with a recipe's options, under its log name; picklable if the function is.

    Raises:
        ValueError: when called, if a dataset column has the name of an option that the recipe leaves unset: the column
            would silently become the option.
    """

    def __init__(self, function: Reward, name: str, kwargs: Mapping[str, Any]) -> None:
        """`name` is what TRL logs the reward under."""
        self.function = function
        self.kwargs = dict(kwargs)
        self.__name__ = name

    def columns(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The call's keywords: every column, and the recipe's options over them."""
        clash = sorted((_options(self.function) or {}).keys() & given.keys() - self.kwargs.keys())
        if clash:
            raise ValueError(
                f"dataset column {clash[0]!r} has the name of an option of reward {self.__name__!r}. Rename the "
                f"column, set the option in the recipe's kwargs, or, if the function needs the column, take it before "
                f"the star in its signature."
            )
        return {**given, **self.kwargs}

    def __call__(self, **columns: Any) -> Any:
        """Rewards of one batch."""
        return self.function(**self.columns(columns))


class AsyncBoundReward(BoundReward):
    """The same for an async function, which TRL recognises by the `async` of `__call__`."""

    async def __call__(self, **columns: Any) -> Any:
        """Rewards of one batch."""
        return await self.function(**self.columns(columns))


def parse(
    entries: Sequence[str | Mapping[str, Any]], reward_weights: Sequence[float] | None = None
) -> tuple[list[RewardSpec], list[str]]:
    """Specs of the valid entries, and every problem: the offending value, the reason, the cure.

    An entry is a registered name, a path (`my_lib.rewards.fn`, `my_lib.rewards:fn`), a reward model (hub id or folder:
    it has a "/"), or a mapping with `name`, `weight`, `kwargs` and, where `name` is to be the log name only, `func`.
    Never raises for what a user wrote.
    """
    if isinstance(entries, str | Mapping) or not isinstance(entries, Sequence):
        return [], [f"reward_funcs={entries!r}: not a list. Write reward_funcs: [accuracy]."]
    if not entries:
        return [], [f"reward_funcs={entries!r}: nothing would be rewarded. Name at least one, such as accuracy."]
    specs: list[RewardSpec] = []
    problems: list[str] = []
    for index, entry in enumerate(entries):
        spec, found = _parse_entry(entry)
        problems += [f"reward_funcs[{index}]={entry!r}: {problem}" for problem in found]
        specs += [spec] if spec else []
    problems += _repeated_names(specs)
    if reward_weights is not None:
        weight_problems = _weights_problems(entries, reward_weights)
        problems += weight_problems
        if not weight_problems and len(specs) == len(entries):
            specs = [replace(s, weight=float(w)) for s, w in zip(specs, reward_weights, strict=True)]
    return specs, problems


def build(specs: Sequence[RewardSpec]) -> list[Callable[..., Any] | str]:
    """TRL's `reward_funcs`: callables named by their log names, model ids as strings.

    Raises:
        UnknownNameError: a function is neither registered nor importable.
    """
    return [spec.function if spec.is_model else _bind(spec) for spec in specs]


def _bind(spec: RewardSpec) -> BoundReward:
    function = rewards[spec.function]
    return (AsyncBoundReward if _is_async(function) else BoundReward)(function, spec.name, spec.kwargs)


def _parse_entry(entry: Any) -> tuple[RewardSpec | None, list[str]]:
    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, Mapping):
        return None, ["neither a name nor a mapping. Write a name, a path or {name: ..., weight: ..., kwargs: ...}."]
    problems = [f"unknown key {key!r}. {did_you_mean(str(key), _KEYS)}" for key in entry if key not in _KEYS]
    function, kwargs, weight = entry.get("func", entry.get("name")), entry.get("kwargs"), entry.get("weight", 1.0)
    kwargs = {} if kwargs is None else kwargs
    if not _is_finite(weight):
        problems.append(f"weight={weight!r} is not a finite number. Give one, such as 1.0.")
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        problems.append(f"kwargs={kwargs!r} is not a mapping from option names. Write kwargs: {{option: value}}.")
        kwargs = None
    name = entry.get("name", function)
    if not (isinstance(function, str) and function and isinstance(name, str) and name):
        return None, [*problems, "it names no reward. Give name (and func, if name is only the log name) as strings."]
    if _is_model(function):
        problems += _model_problems(function, name, kwargs)
        log_name = function.rstrip("/").split("/")[-1]
    else:
        target, function_problems = _resolve(function)
        if target is not None and kwargs is not None:
            function_problems += _kwargs_problems(function, target, kwargs)
        problems += function_problems
        log_name = name if "func" in entry and "name" in entry else _callable_name(target)
    if problems:
        return None, problems
    return RewardSpec(log_name, function, float(weight), dict(kwargs or {})), []


def _is_model(function: str) -> bool:
    return "/" in function and ":" not in function


def _model_problems(model: str, name: str, kwargs: Mapping[str, Any] | None) -> list[str]:
    problems = []
    if kwargs:
        problems.append(f"kwargs={dict(kwargs)!r}: TRL loads a reward model without options. Remove kwargs.")
    if name != model:
        problems.append(f"name={name!r}: TRL logs a reward model under its own id. Remove name, or write it as name.")
    return problems


def _resolve(function: str) -> tuple[Reward | None, list[str]]:
    try:
        target = rewards[function]
    except UnknownNameError as error:
        return None, [f"{error} A function of yours is 'package.module:function', a reward model has a '/'."]
    if callable(target):
        return target, []
    return None, [f"{function!r} is a {type(target).__name__}, not a function. Name a callable."]


def _options(function: Reward) -> dict[str, inspect.Parameter] | None:
    """The keyword-only parameters, which a recipe may set; None if the signature cannot be read."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in _TRL_COLUMNS}


def _kwargs_problems(name: str, function: Reward, kwargs: Mapping[str, Any]) -> list[str]:
    options = _options(function)
    if options is None:
        return []
    problems = []
    if all(p.kind is not p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()):
        problems.append("the function does not take **kwargs, but TRL passes it every dataset column. Add **kwargs.")
    for key in (key for key in kwargs if key not in options):
        cure = did_you_mean(key, options) if options else "It has none (options stand after a * in the signature)."
        problems.append(f"kwargs has {key!r}, which is not an option of {name!r}. {cure}")
    for option in options.values():
        if option.default is option.empty and option.name not in kwargs:
            problems.append(f"option {option.name!r} of {name!r} is not set. Add kwargs: {{{option.name}: ...}}.")
    problems += _type_problems(function, {key: kwargs[key] for key in options if key in kwargs})
    return problems or _value_problems(name, function, kwargs)


def _type_problems(function: Reward, kwargs: Mapping[str, Any]) -> Iterator[str]:
    from beartype import BeartypeConf
    from beartype.door import is_bearable

    try:
        hints = typing.get_type_hints(function)
    except Exception:  # annotations that name what is imported for type checkers only: nothing to check against
        return
    for key, value in kwargs.items():
        hint = hints.get(key, Any)
        try:
            fits = is_bearable(value, hint, conf=BeartypeConf(is_pep484_tower=True))  # an int is a float
        except Exception:  # a hint beyond beartype
            continue
        if not fits or (isinstance(value, bool) and hint in (int, float)):
            wanted = getattr(hint, "__name__", None) if isinstance(hint, type) else str(hint)
            yield f"kwargs has {key}={value!r}, a {type(value).__name__}. Give {key} as {wanted}."


def _value_problems(name: str, function: Reward, kwargs: Mapping[str, Any]) -> list[str]:
    """What one of our own functions says to an empty batch: they check their options first."""
    if name not in rewards or not kwargs or _is_async(function):
        return []
    positional = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    try:
        function(**{column: [] for column in positional}, **kwargs)
    except ValueError as error:
        return [str(error)]
    except Exception:  # not about the options: the first real batch will tell
        return []
    return []


def _repeated_names(specs: Sequence[RewardSpec]) -> list[str]:
    functions: dict[str, list[str]] = {}
    for spec in specs:
        functions.setdefault(spec.name, []).append(spec.function)
    return [
        f"reward_funcs: {len(same)} entries have the log name {name!r}, and TRL would average them in its logs. "
        f"Give each its own: {{name: {name}_2, func: {same[-1]}}}."
        for name, same in functions.items()
        if len(same) > 1
    ]


def _weights_problems(entries: Sequence[Any], weights: Any) -> list[str]:
    if isinstance(weights, str | Mapping) or not isinstance(weights, Sequence):
        return [f"reward_weights={weights!r}: not a list. Give one number per reward."]
    problems = []
    if len(weights) != len(entries):
        problems.append(
            f"reward_weights={weights!r}: {len(weights)} weights for {len(entries)} rewards. Give one each."
        )
    problems += [
        f"reward_weights has {w!r}, which is not a finite number. Give one." for w in weights if not _is_finite(w)
    ]
    if any(isinstance(entry, Mapping) and "weight" in entry for entry in entries):
        problems.append(f"reward_weights={weights!r}: entries of reward_funcs give weights too. Keep one of the two.")
    return problems


def _is_finite(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)


def _callable_name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
