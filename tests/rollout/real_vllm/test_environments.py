"""Conversations that vLLM samples: a game at once, and environments in processes of their own that take their time."""

import pytest

import worlds
from vllm_runs import drifts, free_port, steps, train

FLOAT32 = 0.02
ROWS = [
    {
        "prompt": [{"role": "user", "content": f"go {i}"}],
        "environment": ("guess", "slow")[i % 2],
        "solution": str(i % 9),
        "seconds": [0.0, 0.1 * (i % 4)],
    }
    for i in range(16)
]
GAMES = [
    {"name": "guess", "kwargs": {"low": 0, "high": 9, "guesses": 3}},
    {"name": "slow", "path": f"{worlds.__file__}:Slow"},
]


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_conversations_are_sampled_and_do_not_drift(mode, tied, tmp_path, request):
    settings = {"config": {"max_steps": 10, "max_completion_length": 40}, "rows": ROWS, "environments": GAMES}
    if mode == "server":
        settings |= {"port": request.getfixturevalue("served").port, "group_port": free_port()}
    log, _, _ = train(tmp_path, mode, tied, **settings)
    assert len(steps(log)) == 10
    for game in ("guess", "slow"):
        played = [entry for entry in steps(log) if f"environments/{game}/turns" in entry]
        assert played
        assert all(entry[f"environments/{game}/failed"] == 0 for entry in played)
        assert max(entry[f"environments/{game}/turns"] for entry in played) > 1
    assert max(drifts(log)) < FLOAT32
