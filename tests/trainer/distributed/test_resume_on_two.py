"""Two real processes that are stopped and go on: the bits of those that were not."""

from pathlib import Path

import pytest

from support.interrupted import CASES
from support.processes import launcher, run

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "ranks.py"


def test_two_processes_go_on_at_the_same_bits(tmp_path):
    printed = run([*launcher(), str(SCRIPT), "resume", str(tmp_path), *CASES])
    for case in CASES:
        for rank in range(2):
            assert f"{case}: equal on process {rank} of 2" in printed
