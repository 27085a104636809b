"""What a recipe's `reward_funcs` list means: names, paths or mappings in, checked specs out."""

import inspect
import math
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from grpo_ext.errors import UnknownNameError
from grpo_ext.registry import did_you_mean, located
from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.library.elsewhere import NOT_HERE
from grpo_ext.rewards.protocol import Reward
from grpo_ext.rewards.schedule import Schedule, schedule_problems
from grpo_ext.rewards.signatures import callable_name, is_async, options

ON_ERROR = ("none", "zero", "raise")


@dataclass(frozen=True)
class RewardSpec:
    """One entry of `reward_funcs`."""

    name: str
    """What it is logged under."""
    function: str | Reward
    """Registered name, `package.module:function`, hub id or folder of a sequence-classification model; in Python also
    the function itself, which is scored in this process."""
    weight: float = 1.0
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    weight_schedule: Schedule = None
    scale: float = 1.0
    """Factor on the value, before `clip`."""
    clip: tuple[float, float] | None = None
    when: str | None = None
    """Column that must hold something; a row without it is not scored (None)."""
    timeout: float = 60.0
    """Seconds one call may take in a worker."""
    on_error: str = "none"
    """What a failure makes of the completion: "none" (not scored), "zero", or "raise" (all processes end)."""
    retries: int = 0
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
        """`independent`, or what its registration says unless an option hands the scoring to a user's function."""
        if self.independent is not None or not self.is_registered:
            return bool(self.independent)
        given = any(self.kwargs.get(option) is not None for option in getattr(self.callable, "paths", ()))
        return bool(rewards.traits(str(self.function)).independent) and not given

    @property
    def callable(self) -> Reward:
        """The function itself."""
        return rewards[self.function] if isinstance(self.function, str) else self.function

    @property
    def isolated(self) -> bool:
        """`isolate`, settled by the function's own `in_process`: True, or the options that make it so."""
        if self.isolate is not None or self.is_model:
            return bool(self.isolate) and not self.is_model
        return isinstance(self.function, str) and not _stays_here(self.callable, self.kwargs)


_KEYS = ("name", "func", *(f.name for f in fields(RewardSpec) if f.name not in ("name", "function")))


NOTHING_REWARDED = (
    "reward_funcs={!r}: no source of rewards, so nothing would be rewarded. Name at least one, such as accuracy, or "
    "environments that pay."
)


def parse(
    entries: Sequence[str | Mapping[str, Any] | Reward],
    reward_weights: Sequence[float] | None = None,
    folder: Path | None = None,
) -> tuple[list[RewardSpec], list[str]]:
    """Specs of the valid entries, and every problem: the offending value, the reason, the cure.

    An entry is a registered name, a path (`./file.py:fn`, `my_lib.rewards:fn`, `my_lib.rewards.fn`) from `folder`, the
    recipe's, or where the run starts, a reward model (hub id or folder: it has a "/"), or a mapping with `name`,
    `weight`, `kwargs` and, where `name` is to be the log name only, `func`.
    In Python `func` may be a function; a function, or a loaded model, that stands alone is TRL's to call.
    Never raises for what a user wrote.
    """
    if entries is None:
        return [], [NOTHING_REWARDED.format(None)]
    if isinstance(entries, str | Mapping) or not isinstance(entries, Sequence):
        if isinstance(entries, Mapping):
            names = "{name: accuracy, weight: 1.0}"
        else:
            names = ", ".join(part.strip() for part in entries.split(",")) if isinstance(entries, str) else "accuracy"
        return [], [f"reward_funcs={entries!r}: not a list. Write reward_funcs: [{names}]."]
    if not entries:
        return [], [NOTHING_REWARDED.format(entries)]
    specs: list[RewardSpec] = []
    problems: list[str] = []
    for index, entry in enumerate(entries):
        spec, found = (RewardSpec(_name_of(entry), entry), []) if callable(entry) else _parse_entry(entry, folder)
        problems += [f"reward_funcs[{index}]={entry!r}: {problem}" for problem in found]
        specs += [spec] if spec else []
    problems += _repeated_names(specs)
    if reward_weights is not None:
        weight_problems = _weights_problems(entries, reward_weights)
        problems += weight_problems
        if not weight_problems and len(specs) == len(entries):
            specs = [replace(s, weight=float(w)) for s, w in zip(specs, reward_weights, strict=True)]
    return specs, problems


def _name_of(given: Any) -> str:
    """As TRL logs a function, or a model that is loaded."""
    path = getattr(getattr(given, "config", None), "_name_or_path", None)
    return str(path).split("/")[-1] if path else callable_name(given)


def _parse_entry(entry: Any, folder: Path | None) -> tuple[RewardSpec | None, list[str]]:
    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, Mapping):
        return None, ["neither a name nor a mapping. Write a name, a path or {name: ..., weight: ..., kwargs: ...}."]
    function, kwargs, weight = entry.get("func", entry.get("name")), entry.get("kwargs"), entry.get("weight", 1.0)
    problems = [_unknown_key(key, entry[key], function) for key in entry if key not in _KEYS]
    kwargs = {} if kwargs is None else kwargs
    if isinstance(kwargs, Mapping):
        kwargs = {**{key: entry[key] for key in entry if key in _options_of(function) and key not in _KEYS}, **kwargs}
    if not _is_finite(weight):
        problems.append(f"weight={weight!r} is not a finite number. Give one, such as 1.0.")
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        problems.append(f"kwargs={kwargs!r} is not a mapping from option names. Write kwargs: {{option: value}}.")
        kwargs = None
    name = entry.get("name", callable_name(function) if callable(function) else function)
    named = callable(function) or (isinstance(function, str) and function)
    if not (named and isinstance(name, str) and name):
        return None, [*problems, "it names no reward. Give name (and func, if name is only the log name) as strings."]
    if _is_model(function):
        problems += _model_problems(function, name, kwargs)
        log_name = function.rstrip("/").split("/")[-1]
    else:
        function, target, function_problems = _resolve(function, folder)
        if target is not None and kwargs is not None:
            kwargs = _with_files(target, kwargs, folder)
            shown = function if isinstance(function, str) else callable_name(function)
            function_problems += _kwargs_problems(shown, target, kwargs)
            function_problems += _timeout_problems(shown, target, kwargs, entry)
        problems += function_problems
        log_name = name if "func" in entry and "name" in entry else callable_name(target)
    settings = {key: entry[key] for key in _SETTINGS if entry.get(key) is not None}
    if callable(function) and (settings.get("isolate") or "timeout" in settings):
        problems.append("isolate, timeout: a function is scored in this process. Give its path, 'my_module:name'.")
    problems += _setting_problems(settings, _is_model(function))
    if problems:
        return None, problems
    settings |= {"clip": tuple(map(float, settings["clip"]))} if "clip" in settings else {}
    return RewardSpec(log_name, function, float(weight), dict(kwargs or {}), **settings), []


def _unknown_key(key: Any, value: Any, function: Any) -> str:
    """The sentence for a key of an entry; options of the function itself belong into `kwargs`."""
    known = _options_of(function)
    if key in known:
        return f"unknown key {key!r}: it is an option of the function. Write kwargs: {{{key}: {value!r}}}."
    return f"unknown key {key!r}. {did_you_mean(str(key), [*_KEYS, *known])}"


def _options_of(function: Any) -> Collection[str]:
    """Options of a function that is registered, or given itself."""
    target = rewards[function] if isinstance(function, str) and function in rewards else function
    return (options(target) or {}) if callable(target) else ()


_SETTINGS = ("weight_schedule", "scale", "clip", "when", "timeout", "on_error", "retries", "isolate", "independent")


def _setting_problems(settings: Mapping[str, Any], is_model: bool) -> Iterator[str]:
    """Problems of the settings around a function."""
    if is_model and settings:
        yield f"{', '.join(settings)}: TRL scores a reward model by itself. Use reward_model for these settings."
    yield from schedule_problems(settings.get("weight_schedule"))
    scale, timeout, retries = settings.get("scale", 1.0), settings.get("timeout", 60.0), settings.get("retries", 0)
    if not _is_finite(scale) or scale == 0:
        yield f"scale={scale!r} is no finite number other than 0. Give a factor, such as 0.1."
    if not _is_finite(timeout) or timeout <= 0:
        yield f"timeout={timeout!r} is no positive number of seconds. Give one, such as 10."
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        yield f"retries={retries!r} is not 0 or more. Give a whole number."
    clip = settings.get("clip", [0.0, 1.0])
    if not isinstance(clip, Sequence) or len(clip) != 2 or not all(map(_is_finite, clip)) or clip[0] >= clip[1]:
        yield f"clip={clip!r} is not [lowest, highest]. Give two rising numbers, such as [-3, 3]."
    if settings.get("on_error", "none") not in ON_ERROR:
        yield f"on_error={settings['on_error']!r}. {did_you_mean(str(settings['on_error']), ON_ERROR)}"
    if not isinstance(settings.get("when", ""), str):
        yield f"when={settings['when']!r} is not the name of a column. Give one."
    for key in ("isolate", "independent"):
        if not isinstance(settings.get(key, True), bool):
            yield f"{key}={settings[key]!r} is neither true nor false. Give one."
    if settings.get("isolate") is False and "timeout" in settings:
        yield f"timeout={timeout!r} with isolate: false: in this process nothing can be stopped. Remove one of them."


def _is_model(function: str | Reward) -> bool:
    return isinstance(function, str) and "/" in function and ":" not in function and not function.endswith(".py")


def _model_problems(model: str, name: str, kwargs: Mapping[str, Any] | None) -> list[str]:
    problems = []
    if kwargs:
        problems.append(f"kwargs={dict(kwargs)!r}: TRL loads a reward model without options. Remove kwargs.")
    if name != model:
        problems.append(f"name={name!r}: TRL logs a reward model under its own id. Remove name, or write it as name.")
    return problems


def _resolve(function: str | Reward, folder: Path | None) -> tuple[str | Reward, Reward | None, list[str]]:
    """The function's path in full, itself, and what is wrong with it."""
    if not isinstance(function, str):
        return function, function, []
    try:
        function = function if function in rewards else located(function, folder)
        target = rewards[function]
    except UnknownNameError as error:
        if function in NOT_HERE:
            return function, None, [f"{function!r} is Open-R1's. {NOT_HERE[function]}"]
        hint = "A function of yours is './file.py:function' or 'package.module:function', a reward model has a '/'."
        return function, None, [f"{error} {hint}"]
    if callable(target):
        return function, target, []
    return function, None, [f"{function!r} is a {type(target).__name__}, not a function. Name a callable."]


def _with_files(function: Reward, kwargs: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """Options, of which those that name a function name its file in full."""
    paths = {key: kwargs[key] for key in getattr(function, "paths", ()) if isinstance(kwargs.get(key), str)}
    return {**kwargs, **{key: located(path, folder) for key, path in paths.items()}}


def _kwargs_problems(name: str, function: Reward, kwargs: Mapping[str, Any]) -> list[str]:
    known = options(function)
    if known is None:
        return []
    problems = []
    if all(p.kind is not p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()):
        problems.append("the function does not take **kwargs, but TRL passes it every dataset column. Add **kwargs.")
    for key in (key for key in kwargs if key not in known):
        cure = did_you_mean(key, known) if known else "It has none (options stand after a * in the signature)."
        problems.append(f"kwargs has {key!r}, which is not an option of {name!r}. {cure}")
    for option in known.values():
        if option.default is option.empty and option.name not in kwargs:
            problems.append(f"option {option.name!r} of {name!r} is not set. Add kwargs: {{{option.name}: ...}}.")
    problems += _type_problems(function, {key: kwargs[key] for key in known if key in kwargs})
    return problems or _value_problems(name, function, kwargs)


def _stays_here(function: Reward, kwargs: Mapping[str, Any]) -> bool:
    """By its own `in_process`: True, or the options that make it so."""
    in_process = getattr(function, "in_process", False)
    return in_process is True or bool(in_process and set(in_process) & set(kwargs))


def _timeout_problems(
    name: str, function: Reward, kwargs: Mapping[str, Any], entry: Mapping[str, Any]
) -> Iterator[str]:
    """A limit on what no worker scores; `isolate: false` is told with the other settings."""
    if entry.get("timeout") is None or entry.get("isolate") is not None or not _stays_here(function, kwargs):
        return
    cure = "Put it into kwargs, as the limit of one request" if "timeout" in (options(function) or {}) else "Remove it"
    yield f"timeout={entry['timeout']!r}: {name!r} is scored in this process, where nothing can be stopped. {cure}."


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
    if name not in rewards or rewards[name] is not function or not kwargs or is_async(function):
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
        functions.setdefault(spec.name, []).append(spec.function if isinstance(spec.function, str) else spec.name)
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
