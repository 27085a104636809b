"""vLLM samples after prompts with images as the trainer's processor makes them."""

import json
from contextlib import contextmanager, nullcontext

import pytest
from safetensors.torch import load_file

from support import painters, seeing
from support.interrupted import without_clocks
from support.vllm_runs import DDP, HEADS, Server, drifts, free_port, steps, train

ROUNDING = 2e-4
"""What vLLM's kernels and the trainer's differ by in float32, with room: 3e-5 was measured."""


@pytest.fixture(scope="module")
def sees(tmp_path_factory):
    return seeing.save(tmp_path_factory.mktemp("sees"), **HEADS, head_dim=32)


@contextmanager
def serving(folder, model):
    one = Server(folder, model, trust_remote_code=True)
    one.start()
    try:
        one.wait()
        yield {"port": one.port, "group_port": free_port()}
    finally:
        code = one.stop()
    assert code == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory, sees):
    with serving(tmp_path_factory.mktemp("server"), sees) as address:
        yield {"port": address["port"]}


@pytest.fixture(params=["colocate", "server"])
def mode(request):
    if request.param == "colocate":
        return {"mode": "colocate"}
    return {"mode": "server", "group_port": free_port(), **request.getfixturevalue("server")}


def test_it_learns_what_is_in_the_picture_and_does_not_drift(sees, mode, tmp_path):
    """The encoder's weights change too, and vLLM keeps what it has made of a picture until it is told.

    The same answer to all pictures would be right for half of them: .7 of 128 is 4.5 standard deviations away. A
    server samples without seeds, and at this rate a step may lose what the one before has learned.
    """
    config = {"max_steps": 12, "learning_rate": 3e-3}
    log, _, _ = train(tmp_path, model=sees, pictures=True, **mode, config=config)
    rewards = [entry["reward"] for entry in steps(log)]
    assert rewards[0] < 0.5
    assert max(rewards) > 0.7
    assert len(drifts(log)) == 12
    assert max(drifts(log)) < ROUNDING


def test_generations_are_sampled_beside_the_training(sees, server, tmp_path):
    """Weights of one generation ago sampled them, which are almost the same here."""
    ahead = {"max_steps": 4, "rollout_ahead": 1, "learning_rate": 1e-7, "save_strategy": "steps", "save_steps": 2}
    mode = {"mode": "server", **server}
    log, _, _ = train(tmp_path, model=sees, pictures=True, **mode, group_port=free_port(), config=ahead)
    assert [entry["overlap/age"] for entry in steps(log)] == [0, 1, 1, 1]
    assert max(entry["sampling/mismatch"] for entry in steps(log)) < ROUNDING
    resume, folder = str(tmp_path / "out" / "checkpoint-2"), tmp_path / "resumed"
    again, _, _ = train(folder, model=sees, pictures=True, **mode, group_port=free_port(), config=ahead, resume=resume)
    assert again[2]["overlap/age"] == 1
    assert again[2]["reward"] == log[2]["reward"]  # sampled before the checkpoint was written
    assert max(entry["sampling/mismatch"] for entry in steps(again)) < ROUNDING


@pytest.mark.parametrize(("mode", "launch"), [("colocate", None), ("server", DDP)])
def test_a_turn_sees_what_a_tool_returned(mode, launch, tmp_path):
    """Of two processes one has turns left when the other has none."""
    model = seeing.save(tmp_path / "model", **HEADS, head_dim=32)
    settings = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    ends = {"eos_token_id": [1, *range(30, len(seeing.WORDS))]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings | ends))
    config = {"max_steps": 3, "max_completion_length": 200, "max_tool_calling_iterations": 2}
    config["per_device_train_batch_size"] = 8 if launch else 16
    served = nullcontext({}) if mode == "colocate" else serving(tmp_path, model)
    with served as address:
        log, _, _ = train(tmp_path, mode, model, pictures=True, tools=True, launch=launch, config=config, **address)
    assert min(entry["reward"] for entry in steps(log)) > 1.5
    assert max(entry["grad_norm"] for entry in steps(log)) > 0
    assert len(drifts(log)) == 3
    assert max(drifts(log)) < ROUNDING


def test_it_learns_what_an_environment_shows(mode, tmp_path):
    """In the second turn; the same letters for all pictures are right for half."""
    model = seeing.save(tmp_path / "model", ends=20.0, **HEADS, head_dim=32)
    config = {"max_steps": 30, "learning_rate": 2e-3, "per_device_train_batch_size": 32}
    config |= {"max_completion_length": 60, "completion_length_counts": "policy"}
    environments = [{"path": f"{painters.__file__}:Shown", "name": "shown"}]
    settings = {"model": model, "pictures": True, "environments": environments, **mode, "config": config}
    log, _, _ = train(tmp_path, **settings)
    rewards = [entry["reward"] for entry in steps(log)]
    assert rewards[0] < 0.5
    assert sum(rewards[-8:]) / 8 > 0.7
    assert max(entry["environments/shown/failed"] for entry in steps(log)) == 0
    assert max(drifts(log)) < ROUNDING
    if mode["mode"] == "server":
        ahead = {"max_steps": 4, "rollout_ahead": 1, "learning_rate": 1e-7, "save_strategy": "steps", "save_steps": 2}
        settings["config"], checkpoint = config | ahead, tmp_path / "ahead" / "out" / "checkpoint-2"
        log, _, _ = train(tmp_path / "ahead", **settings)
        assert [entry["overlap/age"] for entry in steps(log)] == [0, 1, 1, 1]
        again, _, _ = train(tmp_path / "resumed", **settings, resume=str(checkpoint))
        assert again[2]["reward"] == log[2]["reward"]  # sampled before the checkpoint was written
        assert max(entry["sampling/mismatch"] for entry in [*steps(log), *steps(again)]) < ROUNDING


def test_a_processor_that_vllm_has_otherwise_is_refused(sees, mode, tmp_path):
    """The trainer's makes two tokens of each tile, that beside vLLM's weights one."""
    _, said, code = train(tmp_path, model=sees, pictures=True, tokens=2, check=False, **mode)
    assert code != 0
    assert "other tokens" in said


def test_a_run_that_was_stopped_goes_on_with_what_vllm_had_sampled(sees, tmp_path):
    config = {"steps_per_generation": 2, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    ends = []
    for name in ("whole", "resumed"):
        resume = {"resume": str(tmp_path / "whole" / "out" / "checkpoint-1")} if name == "resumed" else {}
        log, _, _ = train(tmp_path / name, "colocate", sees, pictures=True, config=config, **resume)
        weights = load_file(tmp_path / name / "out" / "checkpoint-2" / "model.safetensors")
        ends.append((weights, without_clocks(log[:2])))
    (weights, log), (same, logged) = ends
    assert log == logged
    assert all(weights[name].equal(same[name]) for name in weights)
