"""Parse a cell of the column `tests`: test programs, or pairs of input and output."""

import ast
import builtins
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

logger = logging.getLogger(__name__)

Pair: TypeAlias = Mapping[str, Any]
Tests: TypeAlias = str | Sequence[str] | Pair | Sequence[Pair]

_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
_DEFINITION = _FUNCTION | ast.ClassDef
_IMPORT = ast.Import | ast.ImportFrom
_INDIRECT = {"eval", "exec", "compile", "globals", "locals", "vars"}  # these look up names that we do not see
_NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)


def parse_tests(tests: object) -> list[Any]:
    """Return test programs or {input, output} pairs; empty for anything else, and for programs that cannot fail."""
    if not tests:
        return []
    decoded = _decode(tests) if isinstance(tests, str) else tests
    listed: Any = _pairs(decoded) if isinstance(decoded, Mapping) else decoded
    parsed: list[Any] = []
    if isinstance(listed, list | tuple):
        if all(isinstance(t, str) and t.strip() for t in listed):
            parsed = _programs(listed)
        elif all(map(_is_pair, listed)):
            parsed = list(listed)
    if not parsed:
        logger.warning("tests are neither Python that asserts something nor pairs of input and output: %.200r", tests)
    return parsed


def _decode(text: str) -> Any:
    try:
        decoded = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    return [decoded] if isinstance(decoded, str) else decoded


def _pairs(tests: Pair) -> list[Pair]:
    """Return a single {input, output}, or the {inputs, outputs} of APPS and TACO, as a list of pairs."""
    if "inputs" not in tests:
        return [tests]
    inputs, outputs = tests["inputs"], tests.get("outputs")
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)):
        return []
    pairs = zip(map(_joined, inputs), map(_joined, outputs), strict=True)
    return [{**tests, "input": text, "output": wanted} for text, wanted in pairs]


def _joined(lines: object) -> object:
    return "\n".join(lines) if isinstance(lines, list) and all(isinstance(line, str) for line in lines) else lines


def _is_pair(pair: object) -> bool:
    """Return whether it is for a program that reads its standard input, not for a function named by `fn_name`."""
    return (
        isinstance(pair, Mapping)
        and all(type(pair.get(name)) is str for name in ("input", "output"))
        and pair.get("fn_name") is None
        and pair.get("testtype") != "functional"  # LiveCodeBench
    )


def _programs(tests: Sequence[str]) -> list[str]:
    """Return the tests, with calls of uncalled test functions; empty if one is not Python or if no test asserts."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            trees = [ast.parse(test) for test in tests]
            for tree in trees:
                compile(tree, "test", "exec", dont_inherit=True)
    except _NO_PYTHON:
        return []
    if not _asserts(trees):
        return []
    used, builtin = _loaded(trees), "" if "solution" in "".join(tests) else _builtin_under_test(trees)
    head = f"from solution import {builtin}\n" if builtin else ""
    return ["\n".join([head + test, *_calls(tree, used)]) for test, tree in zip(tests, trees, strict=True)]


def _calls(tree: ast.Module, used: set[str]) -> Iterator[str]:
    """Yield source that runs the tests that pytest would collect."""
    yield from (f"{node.name}()" for node in tree.body if _is_test_function(node) and node.name not in used)
    if any(map(_is_test_case, tree.body)):
        yield "import unittest\nunittest.main()"  # not reached if the test calls it itself


def _is_test_function(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    if not (isinstance(node, ast.FunctionDef) and node.name.startswith("test")):
        return False
    return not (node.args.posonlyargs or node.args.args or node.args.kwonlyargs)


def _is_test_case(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and any(_name(base) == "TestCase" for base in node.bases)


def _asserts(trees: Sequence[ast.Module]) -> bool:
    """Return whether the statements that run reach an assertion, so that a wrong program can fail."""
    body = [node for tree in trees for node in tree.body]
    defined = {node.name: node for node in body if isinstance(node, _DEFINITION)}
    idle = _DEFINITION | _IMPORT
    reached = [n for n in body if not isinstance(n, idle) or _is_test_function(n) or _is_test_case(n)]
    for node in reached:  # grows by the definitions that these name
        for inner in ast.walk(node):
            name = _name(inner)
            if isinstance(inner, ast.Assert | ast.Raise) or name.startswith("assert") or name == "exit":
                return True
            if name in defined:
                reached.append(defined.pop(name))
    return False


def _builtin_under_test(trees: Sequence[ast.Module]) -> str:
    """Return the name of a builtin that is the only name under test, as for MBPP's own `sum`, or "".

    It depends only on the tests: a program that could choose would choose a builtin that the tests judge by.
    """
    names = {name for name in _loaded(trees) if not name.startswith("__")} - set(_bound(trees))
    return next(iter(names)) if len(names) == 1 and names <= set(dir(builtins)) - _INDIRECT else ""


def _loaded(trees: Sequence[ast.Module]) -> set[str]:
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _bound(trees: Sequence[ast.Module]) -> Iterator[str]:
    """Yield the names that the tests themselves bind."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, _DEFINITION | ast.ExceptHandler) and node.name:
            yield node.name
        elif isinstance(node, _IMPORT):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)


def _name(node: ast.AST) -> str:
    """Return the identifier of a name or an attribute."""
    return str(getattr(node, "id", getattr(node, "attr", "")))
