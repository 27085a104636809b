"""A slice of `make bench-splits`: every loss with every feature on, beside a computation row by row in float64."""

import sys
from pathlib import Path

import pytest

from support.processes import needs_deepspeed

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import splits

pytestmark = pytest.mark.slow
EVERYTHING = "all of these"
SPLIT = {"ddp": (4, 2, splits.NAMES), "fsdp2": (2, 4, splits.NAMES[::3])}
"""Rows, accumulation and losses. Sharding knows no losses."""
STOCK = "grpo", "dapo"


@pytest.mark.parametrize("launch", SPLIT)
def test_every_loss_has_the_gradient_of_its_paper(launch, tmp_path):
    *split, names = SPLIT[launch]
    chosen = [
        case
        for case in splits.cases(launch, names, stock=True)
        if case.feature == EVERYTHING and [case.rows, case.accumulation] == split
        if not case.stock or case.loss in STOCK
    ]
    found = splits.measured(launch, chosen, tmp_path)
    ours = {case["loss"]: case["difference"] for case in found if not case["stock"]}
    assert ours.keys() == set(names)
    assert {loss: d for loss, d in ours.items() if d > 1e-10} == {}
    stock = [case["difference"] for case in found if case["stock"]]
    assert launch == "fsdp2" or min(stock) > 1e-3  # the same comparison sees what stock TRL's denominators do


def test_zero_is_as_exact_as_one_process_in_float32(tmp_path):
    needs_deepspeed("zero3")
    chosen = list(splits.cases("zero3", ["grpo"], stock=False))
    alone = [splits.Case(case.loss, case.feature, 1, 16, 1) for case in chosen]
    found = splits.measured("zero3", chosen, tmp_path / "two")
    splits.trained("one", alone, tmp_path / "one", splits.torch.float32)
    for case, one in zip(found, alone, strict=True):
        assert case["difference"] <= 3 * splits.judged(one, tmp_path / "one", splits.torch.float32), case
