"""Memory that glibc keeps is given back: gaps between tensors that live, behind each generation of a large process."""

import ctypes
import subprocess
import sys

import pytest

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.trainer import grpo_trainer
from support import tiny

GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")


GAPS = """
import sys
import psutil
import torch
from grpo_ext.rollout import malloc_trim
malloc_trim.LARGE = int(sys.argv[1])
pairs = [(torch.ones(25_000), torch.ones(64)) for _ in range(5000)]
kept = [small for _, small in pairs]
del pairs
resident = lambda: psutil.Process().memory_info().rss
before = resident()
malloc_trim.give_back()
print(before - resident(), all(small.sum() == 64 for small in kept))
"""
"""In a process of its own: where tests ran before, small tensors find older gaps and do not part the large ones."""


@pytest.mark.slow
@pytest.mark.skipif(not GLIBC, reason="no glibc")
@pytest.mark.parametrize(("large", "back"), [(0, True), (2**60, False)])
def test_gaps_between_tensors_go_back_to_the_system(large, back):
    run = subprocess.run([sys.executable, "-c", GAPS, str(large)], capture_output=True, text=True, check=True)
    freed, whole = run.stdout.split()
    assert (int(freed) > 250_000_000) is back  # of 500
    assert whole == "True"


def test_each_generation_ends_with_it(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(grpo_trainer, "give_back", lambda: calls.append(1))
    args = GRPOExtConfig(output_dir=str(tmp_path), **(tiny.TRAINING | {"max_steps": 3}))
    trainer = GRPOExtTrainer(tiny.model(), tiny.length, args, tiny.prompts(8), processing_class=tiny.tokenizer())
    trainer.train()
    assert len(calls) == 3
