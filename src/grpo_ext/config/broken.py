"""Check the other settings of a config in which some values are refused already."""

from collections.abc import Iterable, Iterator
from typing import NoReturn, TypeVar

T = TypeVar("T")


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
