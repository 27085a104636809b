"""A reward that fails on one of two processes in the middle of training, in every way: the run goes on, or all end."""

import json
import subprocess
from pathlib import Path

import pytest

from support import faulty, tiny
from support.processes import CONFIG, forked, run_forked

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "ranks.py"


ON_ERROR = {fault: ("none", "zero")[i % 2] for i, fault in enumerate(faulty.FAULTS)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def survived(model, tmp_path_factory):
    output = tmp_path_factory.mktemp("survived")
    faults = (f"{on_error}:{fault}" for fault, on_error in ON_ERROR.items())
    return output, run_forked(SCRIPT, "faults", model, output, *faults, config=CONFIG)


@pytest.mark.parametrize("fault", faulty.FAULTS)
def test_the_run_goes_on_and_the_metrics_show_it(fault, survived):
    output, text = survived
    kind, reason = faulty.FAULTS[fault]
    log = json.loads((output / f"{fault}.json").read_text())
    assert [entry[f"rewards/{fault}/errors"] for entry in log] == [0.0, 0.5, 0.0]  # one of two ranks, step 1
    assert log[1][f"rewards/{fault}/timeouts"] == 0.5 * (kind == "timeout")
    assert log[1][f"rewards/{fault}/mean"] == pytest.approx(1.0 if ON_ERROR[fault] == "none" else 15 / 16)
    assert f"reward '{fault}' (support.faulty:{fault}) failed on 1 of 8 completions (rank 1, step 1)" in text
    assert reason in text
    assert (output / "failures" / f"step000001-rank1-{fault}.jsonl").exists()


def test_nothing_is_left_behind(survived):
    processes = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True).stdout
    assert f"{SCRIPT} faults" not in processes


@pytest.mark.parametrize(
    ("fault", "on_error", "reason"),
    [("sleep", "raise", faulty.FAULTS["sleep"][1]), ("short", "none", "it returned 7 values for 8 completions")],
)
def test_an_error_ends_both_processes_with_the_culprits_name(fault, on_error, reason, model, tmp_path):
    """The timeout is 4 s; without an agreement the other rank would wait for half an hour."""
    done = forked(SCRIPT, "faults", model, tmp_path, f"{on_error}:{fault}", config=CONFIG)
    text = done.stdout
    assert done.returncode != 0
    assert text.count(f"RewardError: reward '{fault}' (support.faulty:{fault}) failed on") == 2, text[-4000:]
    assert reason in text
    assert "closed by peer" not in text.lower()
    began = float((tmp_path / "fault_began").read_text())
    for rank in (0, 1):
        assert float((tmp_path / f"ended_{rank}").read_text()) - began < 4 + 120
