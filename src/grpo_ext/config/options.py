"""Options of a function, as a recipe gives them: known, of the right type, finite, within their bounds, complete."""

import inspect
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from beartype import BeartypeConf
from beartype.door import is_bearable

from grpo_ext.objective.options import Ascending, Within, option_defaults
from grpo_ext.registry import did_you_mean

TOWER = BeartypeConf(is_pep484_tower=True)  # an int is a fine float


def type_name(hint: Any) -> str:
    """A type as a user would write it."""
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


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
            expected = type_name(hints[name])
            yield f"{field}.{name}={value!r}: a {type(value).__name__} where {expected} is expected. Write one."
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
