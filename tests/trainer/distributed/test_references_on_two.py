"""The reference of an adapter on two processes, by every engine."""

import json
from pathlib import Path

import pytest

from support import tiny
from support.processes import CONFIG, needs_deepspeed, on_cpu, run_forked

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "ranks.py"
ADAPTERS = "lora", "lora whole head", "lora embeddings"


def references(engine, folder):
    """Gradients and KL of five steps on each rank, and how far reference and policy have moved."""
    config = CONFIG if engine == "ddp" else on_cpu(engine, folder)
    line = str(SCRIPT), "references", tiny.save(folder / "model"), str(folder), *ADAPTERS
    run_forked(*line, config=config)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def by_ddp(tmp_path_factory):
    return references("ddp", tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
@pytest.mark.cases(1)
def test_the_reference_stays_and_the_policy_moves(engine, by_ddp, tmp_path):
    needs_deepspeed(engine)
    ranks = by_ddp if engine == "ddp" else references(engine, tmp_path)
    for found, plain in zip(ranks, by_ddp, strict=True):
        for name in ADAPTERS:
            gradient, kl, reference, policy = found[name]
            assert gradient == pytest.approx(plain[name][0], rel=1e-3)
            assert kl[0] == pytest.approx(0.0, abs=1e-6)
            assert min(kl[1:]) > 1e-3
            assert reference == 0.0
            assert policy > 0.1


ALONE = {
    "reference": "the reference is not the policy before the first step: log-probabilities differ by up to ",
    "reference with noise": "each forward draws its own noise, also without dropout: log-probabilities differ by ",
    "reference that fails": "TRL cannot score completions with it (IndexError: a position that ",
    "reference that moves": "the reference has moved since the start: log-probabilities differ by up to ",
    "own forward": "beside padding, are 0.1 nats per token off the model's own forward",
    "own forward that fails": "its own forward cannot score a row by itself (IndexError: a position that ",
    "reference without memory": "trained 2 steps",
    "own forward without memory": "trained 2 steps",
}
"""What one of two processes sees, and words of what both say."""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    run_forked(SCRIPT, "alone", tiny.save(folder / "model"), folder, *ALONE, config=CONFIG)
    return {case: [(folder / f"{case}-{rank}.txt").read_text() for rank in (0, 1)] for case in ALONE}


@pytest.mark.parametrize("case", ALONE)
@pytest.mark.cases(3)
def test_what_one_process_refuses_both_refuse(case, said):
    first, second = said[case]
    assert first == second
    assert ALONE[case] in first
