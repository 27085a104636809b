"""The house as it stands: wings in one order, arrows that point down, no circles, and each wing says what it is."""

import ast
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "grpo_ext"
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
HOUSE = CONTRACTS[0]["layers"]  # from the top floor to the ground
FOLDERS = sorted(path.parent for path in SOURCE.glob("*/**/__init__.py"))


def module(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module(path): path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"}


@cache
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


def floor(name: str, arrows, above: tuple[str, ...] = ()) -> int:
    """1 for what imports nothing, else one above the highest that it imports."""
    assert name not in above, f"a circle: {' -> '.join([*above, name])}"
    return 1 + max((floor(below, arrows, (*above, name)) for below in arrows(name)), default=0)


def wing(name: str) -> str:
    return name.partition(".")[0]


def wings_below(name: str) -> set[str]:
    return {wing(below) for own in MODULES if wing(own) == name for below in imported(own)} - {name}


def test_at_the_root_stands_the_house_and_nothing_else():
    entries = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert entries - {"__init__", "__main__"} == set(HOUSE)
    assert len(HOUSE) <= 16


@pytest.mark.parametrize("name", HOUSE)
def test_arrows_point_down(name):
    assert wings_below(name) <= set(HOUSE[HOUSE.index(name) + 1 :])
    assert floor(name, wings_below) <= 9


def test_no_modules_go_round_in_a_circle():
    assert sum(len(imported(name)) for name in MODULES) > 200  # the arrows are seen at all
    TopologicalSorter({name: imported(name) for name in MODULES}).prepare()  # raises CycleError


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(SOURCE)))
def test_a_wing_says_in_three_lines_what_it_is(folder):
    """What is inside; what it may know and where to begin; and it holds nothing but that."""
    [docstring] = ast.parse((folder / "__init__.py").read_text()).body
    inside, empty, knows = docstring.value.value.rstrip().split("\n")
    assert inside.endswith(".")
    assert not empty
    assert knows.startswith(("May know ", "Knows "))
    assert "Begin with " in knows
