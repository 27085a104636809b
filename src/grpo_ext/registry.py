"""One small registry for every axis a recipe can name: losses, surrogates, KL, advantages, aggregation, rewards."""

import difflib
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Generic, TypeVar

from grpo_ext.errors import UnknownNameError
from grpo_ext.waiting import named

T = TypeVar("T")
MANY = 100
"""More names than a message lists."""

imported: list[str] = []
"""Files and modules that `import_path` has imported."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a sentence with the closest known names, or with all of them if none is close and they are not `MANY`."""
    names = sorted(names)
    plain = {_plain(entry): entry for entry in names}
    same = plain.get(_plain(name))
    close = [same] if same else [plain[c] for c in difflib.get_close_matches(_plain(name), plain, n=3, cutoff=0.6)]
    if close:
        return f"Did you mean {' or '.join(map(repr, close))}?"
    return f"Known: {', '.join(names)}." if len(names) < MANY else f"None of the {len(names)} known names is like it."


def _plain(name: str) -> str:
    """Return the form in which names are compared: `DR-GRPO` as `dr_grpo`."""
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def located(path: str, folder: Path | None = None) -> str:
    """Return a path with its file absolute: `./file.py:name`, or `file:name` where `folder` has that file.

    A relative file is searched in `folder` (the recipe's), then in the working directory. So two recipes may each have
    a `rewards.py`, and all processes find the same file. Names in a package keep their form, because its modules may
    import each other, unless another package has its name.
    """
    if path.endswith(".py"):
        return path
    module_name, _, attribute = _split(path)
    if module_name.endswith(".py"):
        files = [place / Path(module_name).expanduser() for place in (folder, Path.cwd()) if place is not None]
        return f"{next(filter(Path.is_file, files), files[0]).resolve()}:{attribute}"
    if folder is None or not module_name:
        return path
    file = folder.joinpath(*module_name.split(".")).with_suffix(".py").resolve()
    package = folder.resolve() / module_name.partition(".")[0]
    return path if not file.is_file() or _is_package(package) else f"{file}:{attribute}"


def _is_package(folder: Path) -> bool:
    """Return whether Python imports this folder under its name; the folder above it becomes importable."""
    if not (folder / "__init__.py").is_file():
        return False
    if str(folder.parent) not in sys.path:
        sys.path.append(str(folder.parent))
    spec = importlib.util.find_spec(folder.name)
    return spec is not None and spec.origin == str(folder / "__init__.py")


def portable(path: str) -> str:
    """Return a path from `located` without the folder, the same wherever a run's files are."""
    module_name, _, attribute = _split(path)
    return f"{Path(module_name).stem}:{attribute}" if module_name.endswith(".py") else path


def import_path(path: str) -> Any:
    """Return the object at `package.module:name` (or `package.module.name`), also from the working directory.

    `folder/file.py:name` is the object in that file.

    Raises:
        UnknownNameError: the module cannot be imported, or has no such attribute.
    """
    module_name, _, attribute = _split(path)
    if path.endswith(".py"):
        raise UnknownNameError(f"{path!r} names no function", f"Write {path}:NAME.")
    if not module_name or not attribute:
        raise UnknownNameError(f"{path!r} is not of the form 'package.module:name'", "Correct it.")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    file = Path(_split(located(path))[0]) if module_name.endswith(".py") else None
    if file is not None and not file.is_file():
        hint = did_you_mean(file.name, (entry.name for entry in file.parent.glob("*.py")))
        cure = hint if hint.startswith("Did") else "A path counts from the recipe's folder, else from where you start."
        raise UnknownNameError(f"no such file: {file}", cure)
    try:
        if file is not None:
            module = _of_file(file)
        else:
            with nullcontext() if module_name in sys.modules else named(f"Import of {module_name}", _WHILE_IMPORTED):
                module = importlib.import_module(module_name)
        imported.append(str(file or module_name))
    except (Exception, SystemExit) as error:  # a user's module may raise anything, or parse its own command line
        raise UnknownNameError(f"cannot import {module_name!r} for {path!r}: {error!r}", "Correct it.") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name in dir(module) if not name.startswith("__")]
        raise UnknownNameError(f"{module_name!r} has no {attribute!r}", did_you_mean(attribute, public)) from None


def _split(path: str) -> tuple[str, str, str]:
    """Return module (or file), separator and name; a drive has a colon too, so the last one counts."""
    return path.rpartition(":") if ":" in path else path.rpartition(".")


_WHILE_IMPORTED = "Ctrl-C ends it. Let the module wait, download and compute in the functions that need it."


def _of_file(file: Path) -> ModuleType:
    """Return the module in a file, under a unique name; it can import its neighbours."""
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))  # as Python does for a script
    try:
        with named(f"Import of {file}", _WHILE_IMPORTED):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(file.parent))
        if str(file.parent) not in sys.path:  # for what it imports later
            sys.path.append(str(file.parent))
    return module


@dataclass(frozen=True)
class NoTraits:
    """The traits of a registry without any."""


class Registry(Mapping[str, T], Generic[T]):
    """Mapping from name to entry, filled by a decorator and open to `package.module:name` paths.

    Each entry has traits, the fields of a dataclass, given where it is registered.

    >>> surrogates = Registry("surrogate")
    >>> @surrogates.register("clip")
    ... def clip(log_ratio, advantages): ...
    >>> surrogates["clip"] is clip
    True
    """

    def __init__(self, kind: str, traits: Callable[..., Any] = NoTraits) -> None:
        """`kind` names an entry in error messages, for example "loss_type"."""
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._described = traits
        self._traits: dict[str, Any] = {}

    def register(self, *names: str, **traits: object) -> Callable[[T], T]:
        """Return a decorator that registers its target under each of `names`, with these traits.

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
        """Return the traits of the entry of that name or path; the defaults if it is not registered."""
        entry = self[name]
        named = (self._traits[other] for other, other_entry in self._entries.items() if other_entry is entry)
        return next(named, self._described())

    def __getitem__(self, name: str) -> T:
        """Return the entry of that name, or the object at that import path.

        Raises:
            UnknownNameError: neither; the message names the closest entries.
        """
        if name in self._entries:
            return self._entries[name]
        if isinstance(name, str) and (":" in name or "." in name):
            return import_path(name)
        raise UnknownNameError(f"unknown {self.kind} {name!r}", did_you_mean(str(name), self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _is_another(old: object, new: object) -> bool:
    """Return whether two entries differ; a module imported twice (as a script and by path) registers the same code."""
    code = _code(old)
    return old is not None and old is not new and (code is None or code != _code(new))


def _code(entry: object) -> CodeType | None:
    """Return the code of a function, or of the surrogate of a row of the table of losses."""
    return getattr(getattr(entry, "surrogate", entry), "__code__", None)
