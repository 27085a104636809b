"""Prompts computed once, on two real processes (DDP and FSDP2): the step of one process without sharing."""

from pathlib import Path

import pytest
import torch

from distributed.ranks import SHARED
from support import tiny
from support.processes import on_cpu, run_forked

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "ranks.py"
LAUNCHES = ("ddp", "fsdp2")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    run_forked(SCRIPT, "shared", model, folder, 16, "false")
    return folder


@pytest.mark.parametrize("launch", LAUNCHES)
def test_two_processes_that_share_make_the_step_of_one_that_does_not(launch, model, plain, tmp_path):
    run_forked(SCRIPT, "shared", model, tmp_path, 8, "true", config=on_cpu(launch, tmp_path))
    start = tiny.load(model).state_dict()
    spare = []
    for case, settings in SHARED.items():
        one, two = torch.load(plain / f"{case}.pt"), torch.load(tmp_path / f"{case}.pt")
        assert (one["shared"], two["shared"]) == (False, settings.get("shared_prefix") != "false")
        if "micro_batch_tokens" in settings:
            assert one["parts"] == []
            assert max(two["parts"])[0] > 2
            spare += [parts for _, parts in two["parts"]]
        elif not two["shared"]:  # one process has more contexts, then the other; both wait in as many forwards
            assert {mine < most for mine, most in two["forwards"]} == {False, True}
        assert two["sharded"] == (launch == "fsdp2")
        assert max((one["weights"][name] - start[name]).abs().max() for name in start) > 1e-4
        torch.testing.assert_close(two["weights"], one["weights"], rtol=0, atol=1e-9)
        for mine, theirs in zip(one["log"], two["log"], strict=True):
            for key in ("loss", "reward", "advantages/zero_variance_groups"):
                assert mine[key] == pytest.approx(theirs[key], abs=1e-6), key
    assert any(spare) == (launch == "fsdp2")  # one process has fewer pieces at times
