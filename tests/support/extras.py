"""Extras of the package: what they hold, and how to see only what `make test` installs."""

import os
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(extra: str) -> list[Requirement]:
    """Requirements of an extra of the package, or of the package itself for ''."""
    return [*map(Requirement, PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"])]


def closure(*extras: str) -> set[str]:
    """Names of the distributions that the package with these extras needs, all the way down."""
    seen: set[tuple[str, str]] = set()
    waiting = [(PROJECT["name"], extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for needed in requirements(extra) if name == PROJECT["name"] else _needed(name):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(needed.name), e) for e in ("", *needed.extras)]
    return {name for name, _ in seen} - {PROJECT["name"]}


def _needed(name: str) -> Iterable[Requirement]:
    try:
        return map(Requirement, metadata.requires(name) or [])
    except metadata.PackageNotFoundError:
        return []


def lacking(extra: str) -> list[str]:
    """Names of an extra's own distributions that are not installed."""
    found = []
    for needed in requirements(extra):
        try:
            metadata.distribution(needed.name)
        except metadata.PackageNotFoundError:
            found.append(needed.name)
    return found


def need(extra: str) -> None:
    """Skip the running test or module without an extra; if GRPO_EXT_REQUIRE_EXTRAS=1 and `dev` has it, fail."""
    if missing := lacking(extra):
        reason = f"needs the extra {extra}: pip install '{PROJECT['name']}[{extra}]'"
        required = os.environ.get("GRPO_EXT_REQUIRE_EXTRAS") == "1"
        if required and set(map(canonicalize_name, missing)) & closure("dev"):
            pytest.fail(reason)
        pytest.skip(reason, allow_module_level=True)


class OnlyTestExtra(PathFinder):
    """Finds what the package with its extra `test` needs, and hides what else is installed."""

    hidden: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()

    @classmethod
    def install(cls) -> None:
        """Let this process import only that, and see only its versions."""
        if cls in sys.meta_path:
            return
        cls.kept = frozenset(closure("test")) | {PROJECT["name"], "pip", "setuptools"}
        modules = metadata.packages_distributions()
        cls.hidden = frozenset(m for m, of in modules.items() if not cls.kept & set(map(canonicalize_name, of)))
        sys.meta_path[:] = [cls if finder is PathFinder else finder for finder in sys.meta_path]

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname.partition(".")[0] in cls.hidden else super().find_spec(fullname, path, target)

    @classmethod
    def find_distributions(cls, *args, **kwargs):
        found = super().find_distributions(*args, **kwargs)
        return (one for one in found if canonicalize_name(one.name) in cls.kept)
