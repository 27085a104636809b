"""Two launches on this host, each told that it is one of two machines: the step of one process."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny
from processes import ENVIRONMENT, PATIENCE, launcher, run

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "one_step.py"


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def machines(*command: str) -> None:
    """Run a command on both; each is a launcher of its own, as on two hosts (docs/launching.md)."""
    port, env = free_port(), os.environ | ENVIRONMENT
    launched = [
        subprocess.Popen(
            [
                *launcher(),
                *("--num_machines", "2", "--num_processes", "2", "--machine_rank", rank),
                *("--main_process_ip", "127.0.0.1", "--main_process_port", port),
                *command,
            ],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        said = [machine.communicate(timeout=PATIENCE)[0] for machine in launched]
    finally:
        for machine in launched:
            machine.kill()
    assert [machine.returncode for machine in launched] == [0, 0], "\n".join(text[-3000:] for text in said)


def test_two_machines_make_the_step_of_one_process(tmp_path):
    model, losses = tiny.save(tmp_path / "model"), ("grpo", "dapo")
    run([sys.executable, str(SCRIPT), model, str(tmp_path / "one"), "16", *losses])
    machines(str(SCRIPT), model, str(tmp_path / "two"), "8", *losses)
    start = torch.cat([p.detach().flatten() for p in tiny.load(model).parameters()])
    for loss in losses:
        one, two = (torch.load(tmp_path / side / f"{loss}.pt")["weights"] for side in ("one", "two"))
        assert (one - start).abs().max() > 1e-4
        torch.testing.assert_close(two, one, rtol=0, atol=1e-9)
