"""Memory that glibc keeps is given back: gaps between tensors that live, behind each generation of a large process."""

import ctypes
import sys

import pytest
import torch

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.rollout import heap
from grpo_ext.trainer import grpo_trainer
from support import tiny

GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")


@pytest.mark.skipif(not GLIBC, reason="no glibc")
@pytest.mark.parametrize(("large", "back"), [(0, True), (2**60, False)])
def test_gaps_between_tensors_go_back_to_the_system(large, back, monkeypatch):
    monkeypatch.setattr(heap, "LARGE", large)
    pairs = [(torch.ones(25_000), torch.ones(64)) for _ in range(5000)]
    kept = [small for _, small in pairs]
    del pairs
    before = heap.resident()
    heap.give_back()
    assert (heap.resident() < before - 250_000_000) is back  # of 500
    assert all(small.sum() == 64 for small in kept)


def test_each_generation_ends_with_it(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(grpo_trainer, "give_back", lambda: calls.append(1))
    args = GRPOExtConfig(output_dir=str(tmp_path), **(tiny.TRAINING | {"max_steps": 3}))
    trainer = GRPOExtTrainer(tiny.model(), tiny.length, args, tiny.prompts(8), processing_class=tiny.tokenizer())
    trainer.train()
    assert len(calls) == 3
