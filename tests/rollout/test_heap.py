"""Memory that glibc keeps is given back: gaps between tensors that live, behind each generation."""

import os

import pytest
import torch

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.rollout import heap
from grpo_ext.trainer import grpo_trainer
from support import tiny

pytestmark = pytest.mark.skipif(heap.free_bytes() == 0, reason="no glibc from 2.33 on")


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_gaps_between_tensors_go_back_to_the_system():
    pairs = [(torch.ones(25_000), torch.ones(64)) for _ in range(2 * heap.MUCH // 100_000)]
    kept = [small for _, small in pairs]
    del pairs
    before = resident()
    assert heap.free_bytes() > 1.5 * heap.MUCH
    heap.give_back()
    assert resident() < before - 1.2 * heap.MUCH
    assert all(small.sum() == 64 for small in kept)


def test_little_stays_where_it_is(monkeypatch):
    monkeypatch.setattr(heap, "MUCH", 2**50)
    kept = [torch.ones(64) for _, small in [(torch.ones(25_000), 0) for _ in range(1000)]]
    before = heap.free_bytes()
    heap.give_back()
    assert heap.free_bytes() == pytest.approx(before, rel=0.1)
    assert kept


def test_each_generation_ends_with_it(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(grpo_trainer, "give_back", lambda: calls.append(1))
    args = GRPOExtConfig(output_dir=str(tmp_path), **(tiny.TRAINING | {"max_steps": 3}))
    trainer = GRPOExtTrainer(tiny.model(), tiny.length, args, tiny.prompts(8), processing_class=tiny.tokenizer())
    trainer.train()
    assert len(calls) == 3
