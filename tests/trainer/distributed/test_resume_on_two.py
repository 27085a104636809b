"""Two real processes that are stopped and go on: the bits of those that were not."""

from pathlib import Path

import pytest

from support.interrupted import CASES
from support.processes import CONFIG, run_forked

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "ranks.py"
ALIKE = {
    "plain",
    "window of 4",
    "two iterations",
    "beta",
    "logging every third",
    "sharing off",
    "linear schedule, clip",
}
"""Cases of which others here have what depends on the number of processes."""


def test_two_processes_go_on_at_the_same_bits(tmp_path):
    cases = [case for case in CASES if case not in ALIKE]
    printed = run_forked(SCRIPT, "resume", tmp_path, *cases, config=CONFIG)
    for case in cases:
        for rank in range(2):
            assert f"{case}: equal on process {rank} of 2" in printed
