"""Two real processes log and evaluate what one does; the last batch of the evaluation is not full."""

import json
from pathlib import Path

import pytest

from support.interrupted import CLOCKS
from support.processes import CONFIG, run_forked

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "ranks.py"


def test_two_processes_log_what_one_does(tmp_path):
    logs = []
    for name, rows, config in (("one", 16, None), ("two", 8, CONFIG)):
        folder = tmp_path / name
        folder.mkdir()
        run_forked(SCRIPT, "figures", folder, rows, config=config)
        logs.append(json.loads((folder / "figures.json").read_text()))
    one, two = logs
    assert two["evaluation"] == pytest.approx(one["evaluation"], rel=1e-5, abs=1e-6)
    for mine, theirs in zip(two["steps"], one["steps"], strict=True):
        assert mine.keys() == theirs.keys()
        for name in (name for name in mine if not any(clock in name for clock in CLOCKS)):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
