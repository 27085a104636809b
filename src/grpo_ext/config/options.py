"""Options of a function, as a recipe gives them: known, of the right type, finite, within their bounds, complete."""

import inspect
import math
import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import yaml
from beartype import BeartypeConf
from beartype.door import is_bearable

from grpo_ext.objective.options import Ascending, Within, option_defaults
from grpo_ext.registry import did_you_mean

TOWER = BeartypeConf(is_pep484_tower=True)  # an int is a fine float

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
    type(None): "nothing",
}


def kind(value: Any) -> str:
    """What a value is, as a user would say it."""
    if isinstance(value, bool):
        return "a yes or no"
    if isinstance(value, float):
        return "a number with a fraction" if value % 1 else "a number"
    return _WORDS.get(type(value), f"a {type(value).__name__}")


def expected(hint: Any) -> str:
    """What a type asks for, as a user would say it."""
    origin, parts = typing.get_origin(hint), [p for p in typing.get_args(hint) if p is not type(None)]
    if origin is typing.Literal:
        return " or ".join(map(repr, parts))
    if origin is list and parts:
        return f"a list of {_PLURALS.get(parts[0], 'values')}"
    if origin in (types.UnionType, typing.Union):
        words = dict.fromkeys(expected(part) for part in parts if part is not str or not _holds_mappings(parts))
        return " or ".join(word for word in words if word != "a whole number" or "a number" not in words)
    return _WORDS.get(origin or hint, f"a {getattr(hint, '__name__', hint)}")


def _holds_mappings(parts: list[Any]) -> bool:
    """Then it is text on the command line alone."""
    return any(dict in (part, typing.get_origin(part)) for part in parts)


_PLURALS = {str: "names", int: "whole numbers", float: "numbers", dict: "mappings"}


def wrong_type(name: str, value: Any, hint: Any, default: Any = None, known: Collection[Any] = ()) -> str:
    """The sentence for a value of the wrong type, with one that would do: what was probably meant, or the default.

    `known` are the names that a field may have, where it is one of names.
    """
    fitting = (read for read in _readings(value) if is_bearable(read, hint, conf=TOWER))
    meant = next((read for read in fitting if not known or read in known), default)
    cure = f"Write {name}: {_as_yaml(meant)}" if meant is not None else f"Write {expected(hint)}, or leave it out"
    if meant is None and known:
        cure = f"Write one of {', '.join(map(str, known))}, or leave it out"
    return f"{name}={value!r}: {kind(value)} where {expected(hint)} is expected. {cure}."


def _readings(value: Any) -> Iterator[Any]:
    """What may have been meant by a value: 10% or 8k, a number or a bool in quotes, one in a list, a list of one."""
    if isinstance(value, str):
        try:
            yield yaml.safe_load(value)
            yield float(value)
        except (ValueError, yaml.YAMLError):
            pass
        if re.fullmatch(r"\d{1,3}(,\d{3})+", value):
            yield int(value.replace(",", ""))
        if found := re.fullmatch(r"(\d+(?:\.\d+)?) ?%", value):
            yield float(found[1]) / 100
        if found := re.fullmatch(r"(\d+) ?([kK])", value):
            yield int(found[1]) * 1024
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


def _as_yaml(value: Any) -> str:
    """A value as it stands in a recipe."""
    if isinstance(value, float):
        return repr(value)
    return yaml.safe_dump(getattr(value, "value", value), default_flow_style=True).removesuffix("\n...\n").strip()


def option_problems(field: str, given: Any, function: Any, fielded: Mapping[str, str | None] = {}) -> Iterator[str]:
    """Problems of a mapping of options against a function's keyword-only parameters."""
    given = given or {}
    if not isinstance(given, Mapping):
        yield (
            f"{field}={given!r} is no mapping. Write {field}: {{option: value}} in a recipe, "
            f"--{field} '{{\"option\": value}}' on the command line."
        )
        return
    defaults, hints = option_defaults(function), typing.get_type_hints(function)
    options = [name for name in defaults if not fielded.get(name)]
    for name, value in given.items():
        if fielded.get(name):
            yield f"{field}.{name}={value!r}: set the field {fielded[name]} instead."
        elif name not in options:
            hint = did_you_mean(str(name), options) if options else "It takes none: remove it."
            yield f"{field}.{name}={value!r}: {function.__name__} has no such option. {hint}"
        elif name in hints and not is_bearable(value, hints[name], conf=TOWER):
            yield wrong_type(f"{field}.{name}", value, hints[name])
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{field}.{name}={value!r} is not finite. Give a finite number."
        else:
            yield from bound_problems(f"{field}.{name}", function, name, value)
    for name in options:
        if defaults[name] is inspect.Parameter.empty and name not in given:
            yield f"{field}.{name} is missing: {function.__name__} needs it. Set {field}: {{{name}: ...}}."


def bound_problems(setting: str, function: Any, option: str, value: Any) -> Iterator[str]:
    """The problem of an option's value, which `setting` gave, where it lies outside the bounds of its annotation."""
    hint = typing.get_type_hints(function, include_extras=True).get(option)
    default = option_defaults(function)[option]
    cure = "Correct it" if default is inspect.Parameter.empty else f"The default is {setting}: {default}"
    for bound in getattr(hint, "__metadata__", ()):
        if isinstance(bound, (Within, Ascending)) and value not in bound:
            because = f": {bound.because}" if bound.because else ""
            yield f"{setting}={value!r} must be {bound}{because}. {cure}."
