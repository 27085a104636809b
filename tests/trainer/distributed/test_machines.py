"""Two launches on this host, each told that it is one of two machines: the step of one process."""

from pathlib import Path

import pytest
import torch

from support import tiny
from support.processes import machines, run_forked

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "ranks.py"


def test_two_machines_make_the_step_of_one_process(tmp_path):
    model, losses = tiny.save(tmp_path / "model"), ("grpo", "dapo")
    run_forked(SCRIPT, "one_step", model, tmp_path / "one", 16, *losses)
    machines(tmp_path, str(SCRIPT), "one_step", model, str(tmp_path / "two"), "8", *losses)
    start = torch.cat([p.detach().flatten() for p in tiny.load(model).parameters()])
    for loss in losses:
        one, two = (torch.load(tmp_path / side / f"{loss}.pt")["weights"] for side in ("one", "two"))
        assert (one - start).abs().max() > 1e-4
        torch.testing.assert_close(two, one, rtol=0, atol=1e-9)
