"""Check mappings in a recipe: known keys, types, bounds and required keys, for entries and for options of functions.

    SET = Spec.of(EvalSet, "data", "rewards", example="{name: test, samples: 4}", reward_funcs=list)
    problems = [*SET.list_problems("eval_sets", entries)]

Bounds are part of a type, `Annotated[float, Within(above=0.0)]`, and so are choices, `Literal["none", "zero"]`.
"""

import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

import yaml
from beartype import BeartypeConf
from beartype.door import is_bearable

from grpo_ext.errors import ABSENT, Problem
from grpo_ext.objective.options import Ascending, Within, option_defaults
from grpo_ext.registry import did_you_mean

_TOWER = BeartypeConf(is_pep484_tower=True)  # an int is a fine float

_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
    Mapping: "a mapping",
    type(None): "null",
}
_LONGEST_READING = 100
"""Characters: a longer text is not read another way."""
_PLURALS = {str: "names", int: "whole numbers", float: "numbers", dict: "mappings"}


class WrongType(Problem):
    """A value of another type than its setting's."""


@dataclass(frozen=True)
class Spec:
    """The keys that a mapping may have.

    Args:
        hints: the type of each key, with its bounds.
        defaults: values of the keys that may be left out; the others are required.
        example: a mapping that is right, for messages.
        owner: the function whose options these are, for messages.
    """

    hints: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    example: str = "{option: value}"
    owner: str = ""

    @classmethod
    def of(cls, part: type, *without: str, example: str = "{option: value}", **more: Any) -> "Spec":
        """Return the spec of a dataclass's fields; `more` are the types of further keys, which may be left out."""
        hints = typing.get_type_hints(part, include_extras=True)
        known_fields = [f for f in fields(part) if f.init and f.name not in without]
        defaults = {f.name: f.default for f in known_fields if f.default is not MISSING}
        defaults |= {f.name: f.default_factory() for f in known_fields if f.default_factory is not MISSING}
        keys = {f.name: hints[f.name] | None if f.name in defaults else hints[f.name] for f in known_fields}
        return cls(keys | {name: hint | None for name, hint in more.items()}, defaults | dict.fromkeys(more), example)

    @classmethod
    def of_function(cls, function: Callable[..., Any], *without: str) -> "Spec":
        """Return the spec of a function's options, its keyword-only parameters."""
        options = {name: default for name, default in option_defaults(function).items() if name not in without}
        hints = typing.get_type_hints(function, include_extras=True)
        defaults = {name: value for name, value in options.items() if value is not inspect.Parameter.empty}
        return cls({name: hints.get(name, object) for name in options}, defaults, owner=function.__name__)

    def list_problems(self, setting: str, entries: object) -> Iterator[Problem]:
        """Yield the problems of a list of mappings and of all its entries."""
        if not isinstance(entries, list | tuple):
            yield Problem(setting, entries, "not a list", f"Write {setting}: [{self.example}].")
            return
        for i, entry in enumerate(entries):
            yield from self.problems(f"{setting}[{i}]", entry)

    def problems(self, place: str, mapping: object) -> Iterator[Problem]:
        """Yield the problems of a mapping: each unknown, unfitting or missing key."""
        if not isinstance(mapping, Mapping):
            yield Problem(place, mapping, "not a mapping", f"Write {self.example}.")
            return
        for key, value in mapping.items():
            yield from self.value_problems(f"{place}.{key}", str(key), value)
        for key in (key for key in self.hints if key not in self.defaults and key not in mapping):
            needs = f"missing, and {self.owner} needs it" if self.owner else "missing"
            cure = f"Set {place}: {{{key}: ...}}." if self.owner else f"Write {self.example}."
            yield Problem(f"{place}.{key}", ABSENT, needs, cure)

    def value_problems(self, setting: str, key: str, value: Any) -> Iterator[Problem]:
        """Yield the problems of the value of one key, which a message calls `setting`."""
        if key not in self.hints:
            reason = f"{self.owner} has no such option" if self.owner else "no such key"
            cure = did_you_mean(key, self.hints) if self.hints else "It takes none: remove it."
            yield Problem(setting, value, reason, cure)
            return
        hint, default = self.hints[key], self.defaults.get(key, ABSENT)
        literals = [part for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) is typing.Literal]
        if not fits(value, hint):
            names = [name for literal in literals for name in typing.get_args(literal)]
            if names and isinstance(value, str):
                yield Problem(setting, value, "not one of its values", did_you_mean(value, map(str, names)))
            else:
                yield wrong_type(setting, value, hint, None if default is ABSENT else default)
        elif isinstance(value, float) and not math.isfinite(value):
            yield Problem(setting, value, "not finite", "Give a finite number.")
        else:
            parts = [hint, *(part for part in typing.get_args(hint) if typing.get_origin(part) is typing.Annotated)]
            for bound in (bound for part in parts for bound in getattr(part, "__metadata__", ())):
                if value is not None and isinstance(bound, Within | Ascending) and value not in bound:
                    yield out_of_bounds(setting, value, bound, default)


def out_of_bounds(setting: str, value: object, bound: Within | Ascending, default: object) -> Problem:
    """Return the problem of a value that is not within `bound`."""
    reason = f"must be {bound}" + (f": {bound.because}" if bound.because else "")
    if default is ABSENT:
        return Problem(setting, value, reason, "Correct it.")
    other = ", or leave it unset" if default is None else f"; the default is {default}"
    return Problem(setting, value, reason, f"Correct it{other}.")


def option_problems(
    setting: str, mapping: object, function: Callable[..., Any], with_fields: Mapping[str, str | None] = {}
) -> Iterator[Problem]:
    """Yield the problems of a function's options; `with_fields` maps options to the config fields that set them."""
    options = {} if mapping is None else mapping
    of_fields = [name for name, other in with_fields.items() if other]
    if isinstance(options, Mapping):
        for name in (name for name in of_fields if name in options):
            cure = f"Set the field {with_fields[name]} instead."
            yield Problem(f"{setting}.{name}", options[name], "this option has a field of its own", cure)
        options = {name: value for name, value in options.items() if name not in of_fields}
    example = f"{setting}: {{option: value}} in a recipe, --{setting} '{{\"option\": value}}' on the command line"
    yield from replace(Spec.of_function(function, *of_fields), example=example).problems(setting, options)


# Types.


def fits(value: object, hint: Any) -> bool:
    """Return whether a value is of a type; an int is a fine float, a bool fits only bool."""
    if isinstance(value, bool):
        origin, parts = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            return fits(value, parts[0])
        if origin in (types.UnionType, typing.Union):
            return any(fits(value, part) for part in parts)
        return hint not in (int, float) and is_bearable(value, hint)
    return is_bearable(value, hint, conf=_TOWER)


def wrong_type(setting: str, value: object, hint: Any, default: object, names: Collection[object] = ()) -> WrongType:
    """Return the problem of a value of the wrong type, with the one that was probably meant, or else the default.

    `names` are the names that a setting may have, where it is one of names.
    """
    mapping = holds(dict, hint)
    readings = (read for read in _readings(value) if isinstance(read, Mapping) or not mapping)
    fitting = (read for read in readings if is_bearable(read, hint, conf=_TOWER))
    is_number = isinstance(default, int | float) and not isinstance(default, bool)  # whose default nobody means
    meant = next((read for read in fitting if not names or read in names), None if is_number else default)
    name = setting.rpartition("].")[2]
    left_out = "or leave it out" + ("" if default is None else f": the default is {_as_yaml(default)}")
    if meant is not None:
        cure = f"Write {name}: {_as_yaml(meant)}."
    elif mapping:
        cure = f"Write {name}: {{option: value}}, {left_out}."
    else:
        words = f"one of {', '.join(map(str, names))}" if names else _expected(hint)
        cure = f"Write {words}, {left_out}."
    return WrongType(setting, value, f"{kind(value)} where {_expected(hint)} is expected", cure)


def kind(value: object) -> str:
    """Return a user's word for the type of a value."""
    if isinstance(value, bool):
        return "a yes or no"
    if isinstance(value, float):
        return "a number with a fraction" if value % 1 else "a number"
    return _NAMES.get(type(value), f"a {type(value).__name__}")


def holds(kind: type, hint: Any) -> bool:
    """Return whether a field of this type may hold a `kind`; the text of a dict is JSON, for the command line."""
    return any(kind in (part, typing.get_origin(part)) for part in (hint, *typing.get_args(hint)))


def _expected(hint: Any) -> str:
    """Return a user's words for a type."""
    origin, parts = typing.get_origin(hint), [p for p in typing.get_args(hint) if p is not type(None)]
    if origin is typing.Annotated:
        return _expected(parts[0])
    if origin is typing.Literal:
        return " or ".join(map(repr, parts))
    if origin is list and parts:
        return f"a list of {_PLURALS.get(parts[0], 'values')}"
    if origin in (types.UnionType, typing.Union):
        words = dict.fromkeys(_expected(part) for part in parts if part is not str or not holds(dict, hint))
        return " or ".join(word for word in words if word != "a whole number" or "a number" not in words)
    return _NAMES.get(origin or hint, f"a {getattr(hint, '__name__', hint)}")


def _readings(value: object) -> Iterator[object]:
    """Yield what a value may mean: 10%, 8k, 2e1, 0,5, a number or a bool in quotes, one in a list, a list of one."""
    if isinstance(value, str) and len(value) < _LONGEST_READING:
        try:
            yield yaml.safe_load(value)
            number = float(value)
            yield from ([int(number)] if number.is_integer() else []) + [number]
        except (ValueError, yaml.YAMLError):
            pass
        if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", value):
            yield int(value.replace(",", ""))
        elif re.fullmatch(r"[-+]?\d+,\d+([eE][-+]?\d+)?", value):
            yield float(value.replace(",", "."))
        if match := re.fullmatch(r"(\d+(?:\.\d+)?) ?%", value):
            yield float(match[1]) / 100
        if match := re.fullmatch(r"(\d+) ?([kK])", value):
            yield int(match[1]) * 1024
        if "," in value:
            yield [part.strip() for part in value.split(",")]
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    if isinstance(value, list) and len(value) == 1:
        yield value[0]
    if not isinstance(value, str | list | dict | bool) and value is not None:
        yield str(value)
    if not isinstance(value, list):
        yield [value]


def _as_yaml(value: object) -> str:
    if isinstance(value, float):
        return repr(value)
    return yaml.safe_dump(getattr(value, "value", value), default_flow_style=True).removesuffix("\n...\n").strip()
