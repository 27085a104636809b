"""A vLLM server that samples while the policy trains: `rollout_ahead`."""

import math

import pytest

from support.vllm_runs import DDP, drifts, free_port, steps, train

FLOAT32 = 0.02
AHEAD = {
    **{"rollout_ahead": 1, "max_steps": 5, "learning_rate": 1e-2},
    **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}


@pytest.fixture
def address(served):
    return {"port": served.port, "group_port": free_port()}


def assert_sound(log):
    assert [entry["step"] for entry in steps(log)] == list(range(1, 6))
    assert all(math.isfinite(entry["loss"]) and entry["overlap/rollout_seconds"] > 0 for entry in steps(log))
    (drift,) = drifts(log)
    assert drift < FLOAT32  # of the first generation, which the weights sampled that train on it


def test_a_truncated_sampler_returns_what_it_kept_beside_the_training(tied, address, tmp_path):
    config = AHEAD | {"top_p": 0.7, "top_k": 4, "learning_rate": 0.0}
    log, _, _ = train(tmp_path, "server", tied, **address, config=config)
    assert_sound(log)
    assert all(entry["sampling/kept"] == pytest.approx(1, abs=0.02) for entry in steps(log))


def test_each_process_plays_its_own_conversations_with_a_server(tied, address, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"go {i}"}], "solution": str(i % 9)} for i in range(16)]
    game = {"name": "guess", "kwargs": {"low": 0, "high": 9, "guesses": 3}}
    settings = {"rows": rows, "environments": [game], "config": AHEAD | {"max_completion_length": 40}}
    log, _, _ = train(tmp_path, "server", tied, launch=DDP, **address, **settings)
    assert_sound(log)
    assert max(entry["environments/guess/turns"] for entry in steps(log)) > 1
    assert all(entry["environments/guess/failed"] == 0 for entry in steps(log))


@pytest.mark.parametrize(("ahead", "launch"), [(2, None), (1, DDP)])
def test_generations_are_sampled_ahead_by_older_weights(ahead, launch, tied, address, tmp_path):
    """An evaluation in between has the newest weights, of the same server."""
    config = AHEAD | EVALUATED | {"rollout_ahead": ahead}
    log, _, _ = train(tmp_path, "server", tied, launch=launch, **address, config=config)
    assert_sound(log)
    largest = [entry["sampling/importance_sampling_ratio/max"] for entry in steps(log)]
    assert largest[0] == pytest.approx(1, abs=FLOAT32)
    assert max(largest[1:]) > 1 + FLOAT32
    assert len([entry for entry in log if "eval_reward" in entry]) == 3
