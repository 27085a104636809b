"""Two real processes log and evaluate what one does; the last batch of the evaluation is not full."""

import json
import sys
from pathlib import Path

import pytest

from support.interrupted import CLOCKS
from support.processes import launcher, run

pytestmark = pytest.mark.slow
SCRIPT = str(Path(__file__).parent / "ranks.py")


def test_two_processes_log_what_one_does(tmp_path):
    logs = []
    for name, command in {
        "one": [sys.executable, SCRIPT, "figures", "16"],
        "two": [*launcher(), SCRIPT, "figures", "8"],
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        run([*command[:-1], str(folder), command[-1]])
        logs.append(json.loads((folder / "figures.json").read_text()))
    one, two = logs
    assert two["evaluation"] == pytest.approx(one["evaluation"], rel=1e-5, abs=1e-6)
    for mine, theirs in zip(two["steps"], one["steps"], strict=True):
        assert mine.keys() == theirs.keys()
        for name in (name for name in mine if not any(clock in name for clock in CLOCKS)):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
