"""Two real processes that are stopped and go on: the bits of those that were not."""

from pathlib import Path

import pytest

from support.processes import CONFIG, run_forked

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "ranks.py"
CASES = "both", "sync_ref_model", "truncated sampling", "adaptive entropy", "remembered batches"
CASES += "stream", "evaluation", "environments"
"""Those of `support.interrupted` that have all that depends on the number of processes."""


def test_two_processes_go_on_at_the_same_bits(tmp_path):
    printed = run_forked(SCRIPT, "resume", tmp_path, *CASES, config=CONFIG)
    for case in CASES:
        for rank in range(2):
            assert f"{case}: equal on process {rank} of 2" in printed
