"""Programs that cheat, against every shape of test: an answer is paid, nothing else is."""

import time

import pytest

from grpo_ext.rewards.code import sandbox
from grpo_ext.rewards.code.column import parse_tests
from grpo_ext.rewards.code.reward import judge
from support.code_cheats import ANSWERS, CHEATS, DEFINE, SHAPES

try:
    METHOD = sandbox.available()
except sandbox.SandboxError as error:
    pytest.skip(f"no sandbox here: {error}", allow_module_level=True)


def verdicts(program: str, tests: list[str], timeout: float = 60.0, packages: bool = False) -> list[bool]:
    limits, deadline = sandbox.Limits(timeout=timeout), time.monotonic() + 300
    return judge(program, tests, limits, deadline=deadline, method=METHOD, packages=packages)


def passed(program: str, timeout: float) -> set[str]:
    """The names of the shapes that `program` passes."""
    said = verdicts(program, list(SHAPES.values()), timeout)
    return {name for name, verdict in zip(SHAPES, said, strict=True) if verdict}


def test_every_shape_is_passed_by_its_answer():
    assert passed(ANSWERS, timeout=60.0) == set(SHAPES)


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", CHEATS)
def test_no_shape_is_passed_without_its_answer(name):
    assert passed(CHEATS[name], timeout=1.0) <= DEFINE


NAIVE = """
import os
names, execute, write = {{}}, exec, os.write
execute({program!r}, names)
for test in {tests!r}:
    try: execute(test, names)
    except BaseException: pass
    else: write(1, b'passed')
"""


@pytest.mark.parametrize("name", [n for n in CHEATS if n.startswith(("lies", "is a", "is no", "answers"))])
def test_the_cheats_are_paid_by_a_judge_in_the_same_process(name):
    source = NAIVE.format(program=CHEATS[name], tests=[t for n, t in SHAPES.items() if n not in DEFINE])
    assert sandbox.run(source, limits=sandbox.Limits(timeout=1.5), method=METHOD).stdout.startswith(b"passed")


@pytest.mark.parametrize(
    ("program", "tests", "expected"),
    [
        (  # dies, and has the next test read its own cases
            "import os\ncases = [(2, 5)]\ndef f(x): return 5 if x == 2 else os._exit(0)",
            ["cases = [(2, 4)]", "assert f(1) == 2", "assert all(f(x) == y for x, y in cases) and len(cases) == 1"],
            [True, False, False],
        ),
        (  # has a test fail that would define the next one's judge
            "def near(a, b): return True\ndef f(x): return 5",
            ["assert f(1) == 2\ndef near(a, b): return abs(a - b) < 1", "assert near(f(2), 4)"],
            [False, False],
        ),
        (  # no exception, an end
            "import os\ndef f(x): os._exit(0)",
            ["try: f(-1)\nexcept: pass\nelse: raise AssertionError"] * 2,
            [False, False],
        ),
        (  # a test may give the function's name to its result, and the next one means that
            "def f(x): return 2 * x",
            ["assert f(2) == 4", "f = f(3)\nassert f == 6", "assert f(1) == 2"],
            [True, True, False],
        ),
        ("x = 1", ["sqrt = sqrt(4)\nassert sqrt == 2"], [False]),
        ("def assert_equal(a, b): pass\ndef f(x): return 5", ["assert_equal(f(2), 4)"], [False]),
        (
            "x = 1",
            ["assert sqrt(4) == 2", "assert sqrt(4) == sqrt(2) ** 2", "assert all(sqrt(i) == i for i in [1])"],
            [False] * 3,
        ),
        ("x = 1", ["assert math.floor(sqrt(4)) == 2"], [False]),
        (
            "class E:\n    def __bool__(s): return False\nf = lambda x: E()",
            ["assert not f(8)", "assert f(7)"],
            [False, True],
        ),
        ("def sqrt(x): return 5\nf = sqrt", ["assert f(4) == sqrt(4)"], [False]),
        ("class Solution:\n    f = lambda s, x: 5\nisclose = print", ["assert isclose(Solution().f(4), 4)"], [False]),
    ],
)
def test_what_a_test_binds_or_judges_by_is_never_the_programs(program, tests, expected):
    assert verdicts(program, tests) == expected


def test_an_object_whose_class_derives_from_list_is_one_list():
    """Iterated twice, it could hold nothing for one half of a test and everything for the other."""
    source = (
        "class L(list):\n    turns = 0\n    def __len__(s): return 3\n"
        "    def __iter__(s):\n        s.turns += 1\n        return iter(s.items if s.turns > 1 else ())\n"
        "def f(items):\n    r = L()\n    r.items = items\n    return r"
    )
    r = "r = f([3, 1, 2])\n"
    tests = [r + "assert r == sorted(r) and sorted(r) == [1, 2, 3]", r + "assert r == [] and len(r) == 3"]
    assert verdicts(source, tests) == [False, False]


FAKE = "class np:\n    allclose = staticmethod(lambda *_: True)\nallclose = np.allclose\ndef f(x): return 5"
REAL = "import numpy as np\nfrom numpy import allclose\ndef f(x): return np.arange(x) * 2.0"
ARRAYS = ["assert np.allclose(f(3), [0, 2, 4])", "assert allclose(f(3), np.array([0, 2, 4]))", "assert f(2) == [0, 2]"]


@pytest.mark.parametrize("packages", [False, True])
def test_a_judge_of_a_package_is_the_tests_own_import_or_none(packages):
    assert verdicts(FAKE, ARRAYS, packages=packages) == [False] * 3
    assert verdicts(REAL, ARRAYS, packages=packages) == [packages] * 3


def test_no_object_gives_numpy_an_address_to_read():
    source = (
        "class E:\n    __array_interface__ = {'shape': (), 'typestr': '<i8', 'data': (8, False), 'version': 3}\nf = E"
    )
    assert verdicts(source, ["assert not hasattr(f(), '__array_interface__')"]) == [True]


def test_a_test_that_is_no_python_is_not_scored():
    assert parse_tests(["return 4", "assert f(2) == 4"]) == []
