"""Adapters that vLLM holds as they are, in the training process and in a server."""

import pytest

from support.vllm_runs import drifts, steps, train

FLOAT32 = 0.02
ROUNDING = 2e-5
"""What vLLM's kernels and the trainer's differ by in float32, with room: 3e-6 was measured."""


def test_it_learns_in_the_training_process(tied, tmp_path):
    log, said, _ = train(tmp_path, "colocate", tied, lora=True, config={"max_steps": 20, "learning_rate": 1e-2})
    rewards = [entry["reward"] for entry in steps(log)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.5
    assert len(drifts(log)) == 20
    assert max(drifts(log)) < ROUNDING
    assert "merged" not in said
