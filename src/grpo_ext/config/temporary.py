"""Set attributes for the length of a `with` block."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def temporarily(target: object, **values: object) -> Iterator[None]:
    """Set attributes of an object, and restore at the end what they were."""
    attributes = vars(target)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            attributes.pop(name)
        attributes.update(before)
