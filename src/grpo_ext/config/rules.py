"""How a rule of a config is written, a function or a row of settings in conflict, and how far it is asked.

A setting has a rule if and only if the rule guards a gradient, a probability, a sample, a seed or the meaning of
data, or is about a key of ours, or our flow would accept the key and ignore it. Else its owner refuses it: `refusal`.

A rule ends where it reads a value that is refused already.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn, TypeAlias, TypeVar

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.errors import ABSENT, Problem

T = TypeVar("T")
Rule: TypeAlias = Callable[[GRPOExtArguments], Iterator[Problem]]
"""Takes a config and yields the problems of one matter."""
IMAGE_COLUMNS = ("image", "images")
"""Dataset columns in which TRL looks for a prompt's images: one, or a list."""


@dataclass(frozen=True)
class Conflict:
    """A rule with one condition.

    Args:
        fields: the setting to name and the others that make it a mistake, in one text; of `beta:objective.beta` the
            value is that of the second.
        when: whether a config has the mistake.
        reason: as in `Problem`; "{c.beta}" is replaced by the value.
        cure: as in `Problem`, likewise.
    """

    fields: str
    when: Callable[[GRPOExtArguments], object]
    reason: str
    cure: str

    @classmethod
    def of(cls, settings: str, reason: str, cure: str) -> "Conflict":
        """Return the rule that some settings exclude each other: `a`, which is set; `!a`, which is not; `a=x`."""
        fields = " ".join(setting.strip("!").partition("=")[0] for setting in settings.split())
        return cls(fields, lambda config: all(_holds(config, setting) for setting in settings.split()), reason, cure)

    def __call__(self, config: GRPOExtArguments) -> Iterator[Problem]:
        """Yield the problem, if there is one."""
        if self.when(config):
            pairs = (setting.partition(":")[::2] for setting in self.fields.split())
            (field, value), *others = ((name, plain(attrgetter(place or name)(config))) for name, place in pairs)
            yield Problem(field, value, self.reason.format(c=config), self.cure.format(c=config), dict(others))


def _holds(config: GRPOExtArguments, setting: str) -> bool:
    name, compared, value = setting.strip("!").partition("=")
    setting_value = plain(getattr(config, name))
    return setting_value == value if compared else bool(setting_value) != setting.startswith("!")


def plain(value: object) -> object:
    """Return a setting as a recipe writes it; in a copy of a config it may be a member of an enum."""
    return getattr(value, "value", value)


def columns_of_images(columns: object) -> list[str]:
    """Return the columns of a dataset that hold images; some streams have None for columns."""
    return [name for name in IMAGE_COLUMNS if isinstance(columns, list) and name in columns]


def is_set(config: object, name: str) -> bool:
    """Return whether a field of a dataclass differs from its default."""
    field = next(f for f in dataclasses.fields(config) if f.name == name)  # type: ignore[arg-type]
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    return bool(getattr(config, name) != default)


# Values that are refused already.


class BrokenFieldRead(BaseException):
    """A rule has read a value that is refused already; no rule's own `except Exception` stops it."""


def _refuse(*_: object) -> NoReturn:
    raise BrokenFieldRead


class _Broken:
    """Replace a refused value: it can be passed on, but any use of it raises `BrokenFieldRead`."""

    __class__ = property(_refuse)  # isinstance reads this
    __getattr__ = _refuse
    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __hash__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __neg__ = __index__ = __float__ = _refuse
    __str__ = __repr__ = __format__ = __fspath__ = _refuse


def without(config: T, fields: Iterable[str]) -> T:
    """Return a copy of a config in which no rule can use the values of `fields`."""
    copy = object.__new__(type(config))
    vars(copy).update(vars(config) | dict.fromkeys(fields, _Broken()))
    vars(copy).pop("_objective", None)
    return copy


def is_broken(value: object) -> bool:
    """Return whether this replaces a refused value."""
    return type(value) is _Broken


def as_far_as_sound(problems: Iterator[T]) -> Iterator[T]:
    """Yield the problems that a rule finds before it reads a refused value."""
    try:
        for problem in problems:
            str(problem)  # it may quote a refused value
            yield problem
    except BrokenFieldRead:
        return


# What TRL, transformers and accelerate refuse themselves.

OF_THE_OWNERS = (
    *(AttributeError, ImportError, KeyError, NotImplementedError, OSError, OverflowError, TypeError, ValueError),
)
"""Errors with which they refuse a setting when a config is made."""


def refusal(error: Exception, config: Any, usual: str = "") -> Problem:
    """Return an owner's error as a problem, of the setting that it names, or whose value it names.

    That is the longest name that was set, else one whose value or option stands in the message, else `usual`.
    """
    reason = " ".join(str(error).split()).removesuffix(".")
    words = set(re.findall(r"\w+", reason))
    read = (f.name for f in dataclasses.fields(config) if not is_broken(getattr(config, f.name)))
    names = sorted(read, key=len, reverse=True)
    chosen = [name for name in names if is_set(config, name)]
    quoted = [name for name in chosen if _is_quoted(plain(getattr(config, name)), reason, words)]
    named = [*(name for name in chosen if name in words), *quoted, *(name for name in names if name in words)]
    name = next(iter(named), usual)
    return Problem(name or type(config).__name__, plain(getattr(config, name)) if name else ABSENT, reason, "")


def _is_quoted(value: object, reason: str, words: set[str]) -> bool:
    """Return whether a message has a text, or one of the keys of a mapping."""
    if isinstance(value, Mapping):
        return not words.isdisjoint(map(str, value))
    return isinstance(value, str) and bool(value) and (value in words if value.isidentifier() else value in reason)
