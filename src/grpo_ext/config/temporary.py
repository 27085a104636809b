"""Set attributes for the length of a `with` block."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def temporarily(target: object, **values: object) -> Iterator[None]:
    """Set attributes of an object, and restore their former values at the end."""
    before = {name: vars(target)[name] for name in values if name in vars(target)}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name in values:
            if name in before:
                setattr(target, name, before[name])
            else:
                delattr(target, name)


@contextmanager
def each_temporarily(places: Iterable[tuple[object, str, object]]) -> Iterator[None]:
    """Set attributes of several objects, each (object, name, value), and restore their former values at the end."""
    with ExitStack() as changed:
        for target, name, value in places:
            changed.enter_context(temporarily(target, **{name: value}))
        yield
