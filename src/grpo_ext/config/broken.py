"""Check what a config says beside a field whose own value is already refused."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeAlias, TypeVar

T = TypeVar("T")

Rule: TypeAlias = Callable[[Any], Iterator[Any]]
"""Takes a config and yields the problems of one matter."""


class BrokenFieldRead(BaseException):
    """A rule has looked at a value that is refused already; no rule's own `except Exception` stops it."""


def _refuse(*_: Any) -> NoReturn:
    raise BrokenFieldRead


class _Broken:
    """Stand in for a refused value: it can be passed on, but any look at it raises `BrokenFieldRead`."""

    __class__ = property(_refuse)  # isinstance looks here
    __getattr__ = _refuse
    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __hash__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __neg__ = __index__ = __float__ = _refuse
    __str__ = __repr__ = __format__ = __fspath__ = _refuse


def without(config: Any, fields: Iterable[str]) -> Any:
    """Return a copy of a config in which no rule can look at the values of `fields`."""
    copy = object.__new__(type(config))
    vars(copy).update(vars(config) | dict.fromkeys(fields, _Broken()))
    vars(copy).pop("_objective", None)
    return copy


def is_broken(value: Any) -> bool:
    """Return whether this stands in for a refused value."""
    return type(value) is _Broken


def as_far_as_sound(problems: Iterator[T]) -> Iterator[T]:
    """Yield the problems that a rule finds before it looks at a refused value."""
    try:
        yield from problems
    except BrokenFieldRead:
        return
