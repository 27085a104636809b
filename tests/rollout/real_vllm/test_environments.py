"""Conversations that vLLM samples: a game at once, and environments in processes of their own that take their time."""

import json

import pytest

from support import agents, worlds
from support.vllm_runs import DDP, drifts, free_port, steps, train

FLOAT32 = 0.02
ROWS = [
    {
        "prompt": [{"role": "user", "content": f"go {i}"}],
        "environment": ("guess", "slow", "agent")[i % 3],
        "solution": str(i % 9),
        "seconds": [0.0, 0.1 * (i % 4)],
    }
    for i in range(18)
]
GAMES = [
    {"name": "guess", "kwargs": {"low": 0, "high": 9, "guesses": 3}},
    {"name": "slow", "path": f"{worlds.__file__}:Slow"},
    {"name": "agent", "path": f"{agents.__file__}:branches"},
]


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_conversations_are_sampled_and_do_not_drift(mode, tied, tmp_path, request):
    settings = {"config": {"max_steps": 5, "max_completion_length": 40}, "rows": ROWS, "environments": GAMES}
    if mode == "server":
        settings |= {"port": request.getfixturevalue("served").port, "group_port": free_port()}
    log, _, _ = train(tmp_path, mode, tied, **settings)
    assert len(steps(log)) == 5
    for game in ("guess", "slow", "agent"):
        played = [entry for entry in steps(log) if f"environments/{game}/turns" in entry]
        assert played
        assert all(entry[f"environments/{game}/failed"] == 0 for entry in played)
        assert max(entry[f"environments/{game}/turns"] for entry in played) > 1
    assert max(drifts(log)) < FLOAT32


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_an_evaluation_is_the_same_on_two_processes_and_its_attempts_differ(mode, tied, tmp_path, request):
    """Seven prompts in chunks of four: the last chunk is shorter than the other of its round."""
    settings = {
        "rows": ROWS,
        "environments": GAMES[:1],
        "evaluated": [row | {"environment": "guess"} for row in ROWS[:7]],
        "config": {"beta": 0.0},
    }
    if mode == "server":
        settings |= {"port": request.getfixturevalue("served").port}
    found = []
    for processes, launch in ((1, None), (2, DDP)):
        port = {"group_port": free_port()} if mode == "server" else {}
        train(tmp_path / str(processes), mode, tied, launch=launch, **settings, **port)
        lines = (tmp_path / str(processes) / "samples.jsonl").read_text().splitlines()[1:]
        found.append([sample["completion"] for line in lines for sample in json.loads(line)["samples"]])
    assert found[0] == found[1]
    assert len(found[0]) == 14
    assert sum(found[0][i] != found[0][i + 1] for i in range(0, 14, 2)) > 4
