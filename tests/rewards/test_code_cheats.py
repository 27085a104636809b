"""Programs that cheat, against every shape of test: an answer is paid, nothing else is."""

import time

import pytest

from code_cheats import ANSWERS, CHEATS, DEFINE, SHAPES
from grpo_ext.rewards.code import sandbox
from grpo_ext.rewards.code.reward import judge

try:
    METHOD = sandbox.available()
except sandbox.SandboxError as error:
    pytest.skip(f"no sandbox here: {error}", allow_module_level=True)


def passed(program: str, tests: dict[str, str], timeout: float = 2.0) -> set[str]:
    """The names of the tests that `program` passes."""
    limits = sandbox.Limits(timeout=timeout)
    verdicts = judge(program, list(tests.values()), limits, deadline=time.monotonic() + 300, method=METHOD)
    return {name for name, verdict in zip(tests, verdicts, strict=True) if verdict}


def test_every_shape_is_passed_by_its_answer():
    assert passed(ANSWERS, SHAPES, timeout=60.0) == set(SHAPES)


@pytest.mark.parametrize("name", CHEATS)
def test_no_shape_is_passed_without_its_answer(name):
    assert passed(CHEATS[name], SHAPES) <= DEFINE
