"""Two processes: one decision, one manifest over both's files, and neither waits for the other for ever."""

import json
from pathlib import Path

import pytest

from grpo_ext.trainer.checkpoints.choice import numbered
from grpo_ext.trainer.checkpoints.manifest import damage
from support.processes import CONFIG, run_forked

SCRIPT = Path(__file__).parents[1] / "distributed" / "ranks.py"
pytestmark = pytest.mark.slow


def two_ranks(model_path: str, folder: Path, *cases: str) -> tuple[list[list[str]], str]:
    """What each rank says at the end of each case, and all that was printed."""
    printed = run_forked(SCRIPT, "checkpoint", model_path, folder, *cases, config=CONFIG)
    return [[(folder / f"{case}-{rank}.txt").read_text() for rank in (0, 1)] for case in cases], printed


def test_one_manifest_and_one_decision(model_path, tmp_path):
    said, printed = two_ranks(model_path, tmp_path, "whole", "one random state lost", "own folders")
    assert said[:2] == [["step 3", "step 3"]] * 2
    last = tmp_path / "out" / "checkpoint-3"
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= json.loads((last / "manifest.json").read_text())["files"].keys()
    assert printed.count("checkpoint-3 is damaged: rng_state_1.pth is missing") == 1
    assert damage(last) == []  # written anew
    for text in said[2]:
        assert "process 0 on" in text
        assert "1 on" in text
        assert "missing" in text
        assert "output_dir to a folder that all machines share" in text


def test_a_full_disk_of_one_process_is_raised_on_both(model_path, tmp_path):
    [said], _ = two_ranks(model_path, tmp_path, "full disk of 1")
    for text in said:
        assert "checkpoint-2 could not be written" in text
        assert "Untouched: checkpoint-1." in text
    assert [path.name for path in numbered(tmp_path / "out")] == ["checkpoint-1"]
    assert not (tmp_path / "out" / "_saving").exists()
    [said], _ = two_ranks(model_path, tmp_path, "go on")
    assert said == ["step 3", "step 3"]
