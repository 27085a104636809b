"""No circular imports, folders that say what they are, and no test that stands in for what it tests."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from grpo_ext import GRPOExtTrainer
from grpo_ext.trainer.lifecycle import Lifecycle

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "grpo_ext"
FOLDERS = sorted(path.parent for path in SOURCE.glob("*/**/__init__.py"))


def module(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module(path): path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"}


def imported(name: str) -> set[str]:
    """Modules of the package that a module imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports inside the package are absolute"
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {path.removeprefix("grpo_ext.") for path in found} & MODULES.keys() - {name}


def test_no_modules_import_each_other_in_a_circle():
    arrows = {name: imported(name) for name in MODULES}
    assert sum(map(len, arrows.values())) > 200  # the imports are seen at all
    TopologicalSorter(arrows).prepare()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(SOURCE)))
def test_a_wing_says_in_three_lines_what_it_is(folder):
    """What is inside; what it may know and where to begin; and it holds nothing but that."""
    [docstring] = ast.parse((folder / "__init__.py").read_text()).body
    inside, empty, knows = docstring.value.value.rstrip().split("\n")
    assert inside.endswith(".")
    assert not empty
    assert knows.startswith(("May know ", "Knows "))
    assert "Begin with " in knows


# Tests: what they stand in for.

OWN_HOOKS = {name for owner in (GRPOExtTrainer, Lifecycle) for name in vars(owner) if not name.startswith("__")}


def trainers_of_tests() -> dict[str, ast.ClassDef]:
    """Classes of tests that are trainers of ours, and their bases among the classes of tests."""
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "tests").rglob("*.py"))]
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    bases = {name: [ast.unparse(base).rpartition(".")[2] for base in node.bases] for name, node in classes.items()}
    found = {name for name in classes if GRPOExtTrainer.__name__ in bases[name]}
    while further := {name for name in classes.keys() - found if found & {*bases[name]}}:
        found |= further
    return {name: classes[name] for one in found for name in (one, *bases[one]) if name in classes}


def test_no_test_replaces_a_method_that_trl_calls():
    """It calls ours, so that what TRL passes reaches it."""
    trainers = trainers_of_tests()
    assert {"Ours", "Recorder", "Dealing"} <= trainers.keys()
    replaced = [
        f"{name}.{method.name}"
        for name, node in trainers.items()
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name in OWN_HOOKS and "super()." not in ast.unparse(method)
    ]
    assert replaced == []
