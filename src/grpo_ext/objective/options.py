"""A function's requested tensors (parameters before the star) and options (keyword-only parameters with bounds).

Bounds are part of the annotation, `clamp: Annotated[float, Within(above=0.0)]`, and are checked before a run begins.
An option without bounds takes every value of its type.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any


@cache
def asked_for(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the tensors that a function requests: its parameters before the star."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds)


def option_defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the options that a recipe may set, with their defaults (`inspect.Parameter.empty` without one)."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def bind(function: Callable[..., Any], offered: Mapping[str, Any]) -> Callable[..., Any]:
    """Return `function` with the requested tensors bound, as far as they are offered."""
    return partial(function, **{name: offered[name] for name in asked_for(function) if name in offered})


@dataclass(frozen=True)
class Within:
    """Finite numbers from `least` to `most`, above `above` and below `below`; `because` gives the reason."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    because: str = ""

    def __contains__(self, value: float | int) -> bool:
        """Return whether `value` lies inside."""
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        """Return the bounds in words: "0 or more"."""
        bounds = {"above": self.above, "at least": self.least, "below": self.below, "at most": self.most}
        words = {word: f"{bound:.16g}" for word, bound in bounds.items() if math.isfinite(bound)}
        if words.keys() == {"at least", "at most"}:
            return f"from {words['at least']} to {words['at most']}"
        if words.keys() == {"at least"}:
            return f"{words['at least']} or more"
        return " and ".join(f"{word} {bound}" for word, bound in words.items()) or "a finite number"


@dataclass(frozen=True)
class Ascending:
    """A list of two finite numbers, the lower one first."""

    because: str = ""

    def __contains__(self, value: list) -> bool:
        """Return whether `value` is such a list."""
        return len(value) == 2 and -math.inf < value[0] < value[1] < math.inf

    def __str__(self) -> str:
        """Return the bounds in words."""
        return "[lowest, highest]"


NotNegative = Annotated[float, Within(least=0.0)]
Count = Annotated[int, Within(least=1.0)]
Ddof = Annotated[int, Within(least=0.0, most=1.0, because="a standard deviation has 0 or 1")]
