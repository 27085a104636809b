"""NaN or inf on one of two processes: both decide alike, and weights and checkpoints stay sound."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distributed.ranks import POISONED
from support import poisoned, tiny
from support.processes import CONFIG, run_forked

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "ranks.py"
NAMED = {
    "loss": "Step {step} of 4: nan in the loss of micro-batch 2 on rank 1",
    "logps": "Step {step} of 4: nan in log-probabilities of micro-batch 2 on rank 1, row 1 (the first begins ",
    "gradient": "Step {step} of 4: nan in the gradient of " + poisoned.PARAMETER,
    "rewards": "Step {step} of 4: inf returned by reward 'judged' on rank 1, row 1 (the first begins ",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("poisoned")
    run_forked(SCRIPT, "poisoned_ranks", tiny.save(folder / "model"), folder, config=CONFIG)
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def sound(checkpoint: Path) -> bool:
    return all(w.isfinite().all() for w in load_file(checkpoint / "model.safetensors").values())


@pytest.mark.parametrize("place", poisoned.PLACES)
@pytest.mark.cases(2)
def test_both_stop_before_the_step_and_say_the_same(place, outcomes):
    folder, ranks = outcomes
    name, step = f"{place}-stop", POISONED["stop"]
    first, second = (rank[name] for rank in ranks)
    assert first == second
    at = step - 1 if place == "rewards" else step
    assert first["error"].startswith(NAMED[place].format(step=at)), first["error"]
    assert first["finite"]
    assert first["step"] == at - 1
    left = {path.name for path in (folder / name).glob("checkpoint-*")}
    assert left == {f"checkpoint-{i}" for i in range(1, at)}
    assert all(sound(folder / name / checkpoint) for checkpoint in left)
    kept = {path.name for path in (folder / name / "failures" / f"step_{at}").glob("*.pt")}
    assert kept == ({"rank_1.pt"} if place == "rewards" else {"rank_0.pt", "rank_1.pt"})
    value = torch.load(folder / name / "failures" / f"step_{at}" / "rank_1.pt")["findings"][0]["value"]
    assert value == ("inf" if place == "rewards" else "nan")


@pytest.mark.parametrize("place", [place for place in poisoned.PLACES if place != "rewards"])
@pytest.mark.cases(1)
def test_both_skip_the_step(place, outcomes):
    folder, ranks = outcomes
    name, step = f"{place}-skip", POISONED["skip"]
    first, second = (rank[name] for rank in ranks)
    assert first["weights"] == second["weights"]
    assert first["finite"]
    assert first["step"] == 4
    assert not first["error"]
    assert first["log"] == [float(i == step) for i in range(1, 5)]
    before, after = (load_file(folder / name / f"checkpoint-{i}" / "model.safetensors") for i in (step - 1, step))
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_reward_that_is_inf_on_one_rank_counts_as_not_scored(outcomes):
    for outcome in (rank["rewards-skip"] for rank in outcomes[1]):
        assert (outcome["error"], outcome["step"], outcome["finite"]) == ("", 4, True)
        assert outcome["log"] == [0.0] * 4
