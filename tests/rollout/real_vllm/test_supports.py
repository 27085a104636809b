"""The sampling support of vLLM without top_k: all log-probabilities of a small vocabulary; and labels of weights."""

import json

import pytest
import requests

from grpo_ext.rollout.vllm.client import WEIGHTS, Client
from support import agents, tiny
from support.vllm_runs import Server, drifts, free_port, steps, train

ROUNDING = 2e-5
"""What vLLM's kernels and the trainer's differ by in float32, with room."""
CUTS = {"top_p": {"top_p": 0.7, "temperature": 1.3}, "min_p": {"min_p": 0.1}}
GAMES = [
    {"name": "guess", "kwargs": {"low": 0, "high": 9, "guesses": 3}},
    {"name": "agent", "path": f"{agents.__file__}:branches"},
]
ROWS = [
    {"prompt": [{"role": "user", "content": f"go {i}"}], "environment": ("guess", "agent")[i % 2], "solution": "3"}
    for i in range(16)
]
PLAY = {"rows": ROWS, "environments": GAMES}


@pytest.fixture(scope="module")
def server(tmp_path_factory, tied):
    found = Server(tmp_path_factory.mktemp("server"), tied, top_p=0.7)
    found.start()
    found.wait()
    yield found
    found.stop()


def assert_same_tokens(log):
    """The ratio is over the tokens of the sampler: its mean is 1, and it is 1 for the policy that sampled."""
    assert drifts(log)
    assert max(drifts(log)) < ROUNDING
    assert all(entry["sampling/kept"] == pytest.approx(1, abs=1e-3) for entry in steps(log))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ["plain", "environments"])
def test_sampler_and_policy_agree_at_learning_rate_0(kind, cut, tied, tmp_path):
    config = {"max_steps": 2, "learning_rate": 0.0, "max_completion_length": 24} | CUTS[cut]
    log, _, _ = train(tmp_path, "colocate", tied, config=config, **(PLAY if kind == "environments" else {}))
    assert_same_tokens(log)


def test_conversations_and_agents_with_a_server_agree_too_and_its_weights_are_labelled(server, tied, tmp_path):
    config = {"max_steps": 2, "learning_rate": 0.0, "max_completion_length": 24, "top_p": 0.7}
    address = {"port": server.port, "group_port": free_port()}
    log, _, _ = train(tmp_path, "server", tied, **address, config=config, **PLAY)
    assert_same_tokens(log)
    label = requests.get(f"{server.url}/weight_info").json()["weight_version"]
    assert ", push " in label
    client = Client(server.url, 60.0)
    client.serving = client.identity()
    assert client.serving.endswith(f"{WEIGHTS}{label}")
    client.check_serving()
    requests.post(f"{server.url}/update_weight_version", json={"new_version": "theirs"}).raise_for_status()
    client._pages.clear()
    with pytest.raises(RuntimeError, match=r"has the weights of another run \(theirs\)"):
        client.generate([[3, 4]], max_tokens=1)


def test_it_learns_as_with_transformers(tied, tmp_path):
    ends, config = {}, {"max_steps": 20, "top_p": 0.9}
    for name, more in (("vllm", {}), ("transformers", {"use_vllm": False})):
        log, _, _ = train(tmp_path / name, "colocate", tied, config=config | more)
        rewards = [entry["reward"] for entry in steps(log)]
        ends[name] = sum(rewards[-5:]) / 5
        assert ends[name] > sum(rewards[:5]) / 5 + 0.5
    assert ends["vllm"] == pytest.approx(ends["transformers"], rel=0.35), ends


def test_a_large_vocabulary_needs_top_k(tmp_path):
    model = tiny.save(tmp_path / "model", vocab_size=1100)
    _, said, code = train(tmp_path / "run", "colocate", model, check=False, config={"top_p": 0.9})
    assert code != 0
    assert "top_k=0: the sampler leaves tokens out" in said


def test_a_run_that_was_stopped_goes_on_with_the_supports_of_its_open_generation(tied, tmp_path):
    config = {"steps_per_generation": 2, "max_steps": 2, "save_strategy": "steps", "save_steps": 1, "top_p": 0.7}
    found = []
    for name in ("whole", "resumed"):
        resume = {"resume": str(tmp_path / "whole" / "out" / "checkpoint-1")} if name == "resumed" else {}
        train(tmp_path / name, "colocate", tied, config=config, **resume)
        state = json.loads((tmp_path / name / "out" / "checkpoint-2" / "trainer_state.json").read_text())
        found.append([(row["loss"], row["grad_norm"]) for row in state["log_history"] if "loss" in row])
    assert found[0] == found[1]
    assert len(found[0]) == 2
