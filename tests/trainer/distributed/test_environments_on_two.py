"""Environments that fail on one of two processes: the other trains on, and both stay one model."""

from pathlib import Path

import pytest
import torch

from support import seeing, tiny
from support.processes import CONFIG, run_forked

pytestmark = pytest.mark.slow


def test_what_fails_on_one_process_is_its_own(tmp_path):
    model = tiny.save(tmp_path / "model", initializer_range=0.1)
    run_forked(Path(__file__).parent / "ranks.py", "environment", model, tmp_path, config=CONFIG)
    one, two = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert one["failed"] == [[None] * 4] * 2
    assert any(failure is not None for step in two["failed"] for failure in step)
    assert torch.equal(one["weights"], two["weights"])
    for entry, step in zip(one["log"], two["failed"], strict=True):
        assert entry["environments/FaultyOnTheSecond/failed"] == sum(failure is not None for failure in step) / 8


def test_images_may_be_on_one_process_only(tmp_path):
    model = seeing.save(tmp_path / "model", ends=5.0)
    run_forked(Path(__file__).parent / "ranks.py", "shown_pictures", model, tmp_path, config=CONFIG)
    one, two = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert torch.equal(one, two)
