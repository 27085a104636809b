"""One small registry for every axis a recipe can name: losses, surrogates, KL, advantages, aggregation, rewards."""

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from grpo_ext.errors import UnknownNameError

T = TypeVar("T")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Sentence naming the closest known names, or all of them when nothing is close."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(map(repr, close))}?" if close else f"Known: {', '.join(known)}."


def import_path(path: str) -> Any:
    """Object behind `package.module:name` (or `package.module.name`), looked up from the working directory too.

    Raises:
        UnknownNameError: the module cannot be imported, or has no such attribute.
    """
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not attribute:
        raise UnknownNameError(f"{path!r} is not of the form 'package.module:name'.")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises while it is imported is the news
        raise UnknownNameError(f"cannot import {module_name!r} for {path!r}: {error!r}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UnknownNameError(
            f"{module_name!r} has no {attribute!r}. {did_you_mean(attribute, dir(module))}"
        ) from None


@dataclass(frozen=True)
class NoTraits:
    """Nothing that others need to know."""


class Registry(Mapping[str, T], Generic[T]):
    """Mapping from name to entry, filled by a decorator and open to `package.module:name` paths.

    What others must know of an entry stands beside it: fields of the dataclass `traits`, given where it is registered.

    >>> surrogates = Registry("surrogate")
    >>> @surrogates.register("clip")
    ... def clip(log_ratio, advantages): ...
    >>> surrogates["clip"] is clip
    True
    """

    def __init__(self, kind: str, traits: Callable[..., Any] = NoTraits) -> None:
        """`kind` is what error messages call an entry, for example "loss_type"."""
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._described = traits
        self._traits: dict[str, Any] = {}

    def register(self, *names: str, **traits: Any) -> Callable[[T], T]:
        """Decorator that files its target under each of `names`; `traits` are fields of this registry's traits.

        Raises:
            ValueError: a name is taken by another entry.
        """
        described = self._described(**traits)

        def add(entry: T) -> T:
            for name in names:
                if _is_another(self._entries.get(name), entry):
                    raise ValueError(f"{self.kind} {name!r} is already registered: choose another name.")
                self._entries[name] = entry
                self._traits[name] = described
            return entry

        return add

    def traits(self, name: str) -> Any:
        """Traits of the entry of that name or path; the defaults where it was never registered."""
        entry = self[name]
        named = (self._traits[other] for other, known in self._entries.items() if known is entry)
        return next(named, self._described())

    def __getitem__(self, name: str) -> T:
        """Entry of that name, or the object at that import path.

        Raises:
            UnknownNameError: neither; the message names the closest entries.
        """
        if name in self._entries:
            return self._entries[name]
        if isinstance(name, str) and (":" in name or "." in name):
            return import_path(name)
        raise UnknownNameError(f"unknown {self.kind} {name!r}. {did_you_mean(str(name), self._entries)}")

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _is_another(old: Any, new: Any) -> bool:
    """Whether two entries differ; a module imported twice (as a script and by path) registers the same code again."""
    code = _code(old)
    return old is not None and old is not new and (code is None or code != _code(new))


def _code(entry: Any) -> Any:
    """Code of a function, or of the function that a row of the table of losses wraps."""
    return getattr(getattr(entry, "surrogate", entry), "__code__", None)
