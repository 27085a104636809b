"""vLLM in a server of its own, started by `grpo-ext serve`, weights sent by gloo."""

import shutil

import pytest

from grpo_ext.rollout.vllm.transfer import WeightClient
from support import tiny
from support.commands import command
from support.processes import needs_deepspeed, on_cpu
from support.vllm_runs import DDP, HEADS, drifts, free_port, steps, train

REAL_COMMAND = True
"""`grpo-ext serve` and vLLM are started here as users start them."""
FLOAT32 = 0.02
"""Mean difference in nats above which a run in float32 is stopped."""
ROUNDING = 2e-5
"""What vLLM's kernels and the trainer's differ by in float32, with room: 3e-6 was measured."""


@pytest.fixture
def address(served):
    return {"port": served.port, "group_port": free_port()}


def test_it_learns_and_does_not_drift(tied, address, tmp_path):
    log, _, _ = train(tmp_path, "server", tied, **address, config={"max_steps": 20})
    rewards = [entry["reward"] for entry in steps(log)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.5
    assert len(drifts(log)) == 20
    assert max(drifts(log)) < FLOAT32
    assert all(entry["sampling/weight_sync_mib"] > 0 for entry in steps(log))
    # a later run finds an earlier one's weights in the server
    stale, said, code = train(tmp_path / "later", "server", tied, check=False, sync=False, **address)
    assert code != 0
    assert "weights of an earlier run" in said
    assert not steps(stale)  # it stopped before it had logged a step


def test_a_truncated_sampler_returns_the_tokens_that_it_kept(tied, address, tmp_path):
    config = {"max_steps": 2, "top_p": 0.7, "top_k": 4}  # vLLM returns 20 log-probabilities unless it is asked to
    log, _, _ = train(tmp_path, "server", tied, **address, config=config)
    assert len(drifts(log)) == 2
    assert max(drifts(log)) < FLOAT32
    config["top_k"] = 5
    _, said, code = train(tmp_path / "more", "server", tied, check=False, **address, config=config)
    assert code != 0
    assert "max_logprobs=20: the loss reads the sampling support from as many log-probabilities, 21" in said


def test_lora_arrives_merged(tied, address, tmp_path):
    settings = {"max_steps": 5, "learning_rate": 1e-2}
    log, said, _ = train(tmp_path, "server", tied, lora=True, **address, config=settings)
    assert max(drifts(log)) < FLOAT32
    assert "with the adapter merged: the server was started without room for adapters" in said
    settings["vllm_push"] = "adapter"
    _, said, code = train(tmp_path / "only", "server", tied, lora=True, check=False, **address, config=settings)
    assert code != 0
    assert "vllm_push='adapter': the server was started without room" in said


@pytest.mark.parametrize(("engine", "lora"), [("fsdp2", False), pytest.param("zero3", True, marks=pytest.mark.slow)])
@pytest.mark.cases(1)
def test_two_trainer_processes_share_one_server(engine, lora, tied, address, tmp_path):
    """Shards of base and adapter are gathered and summed: what is left is float32's rounding."""
    needs_deepspeed(engine)
    settings = {"config": {"max_steps": 5, "learning_rate": 1e-2 if lora else 3e-3}, "lora": lora} | address
    log, _, _ = train(tmp_path, "server", tied, launch=on_cpu(engine, tmp_path), **settings)
    assert len(drifts(log)) == 5
    assert max(drifts(log)) < ROUNDING
    assert (max(entry.get("sampling/push_rounding", -1) for entry in steps(log)) == 0) == lora


@pytest.mark.slow
def test_two_training_machines_and_a_server(tied, address, tmp_path):
    """Each has one process, the first of its machine."""
    first = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    log, _, _ = train(tmp_path, "server", tied, launch=DDP, environment=first, **address, config={"max_steps": 5})
    assert len(steps(log)) == 5
    assert len(drifts(log)) == 5
    assert max(drifts(log)) < FLOAT32


def test_check_says_that_the_server_fits(served, capsys):
    assert command("check", "--config", served.recipe) == 0
    assert "fits the recipe" in capsys.readouterr().out


def test_check_names_every_mismatch(served, tmp_path, capsys):
    other = tmp_path / "other"
    tiny.save(other, tie_word_embeddings=True, max_position_embeddings=1024, **HEADS)
    tokens = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokens.replace('"a": 3', '"a": 99').replace('"b": 4', '"b": 3'))
    changed = ("--model_name_or_path", other, "--max_completion_length", 500, "--vllm_dtype", "bfloat16")
    assert command("check", "--config", served.recipe, *changed, "--max_prompt_length", 64) == 2
    said = capsys.readouterr().err
    for word in ("model=", "max_model_len=", "dtype=", "vocabularies"):
        assert word in said, said
    shutil.rmtree(other)


def test_a_server_that_does_not_suit_is_refused_on_all_processes(address, tied, tmp_path):
    settings = {"max_steps": 1, "max_completion_length": 500}
    _, said, code = train(tmp_path, "server", tied, launch=DDP, check=False, **address, config=settings)
    assert code != 0
    assert "max_model_len=128" in said


def test_a_second_run_is_refused_while_the_first_trains(served):
    first, second = (WeightClient(served.url, 60.0, free_port(), "gloo") for _ in range(2))
    second.owner = "elsewhere:1"
    first.init_communicator("cpu")
    first.init_communicator("cpu")  # once more by itself, as after a server's death
    words = rf"another run \({first.owner.partition('@')[0]}\) trains with the vLLM server at {served.url}"
    with pytest.raises(RuntimeError, match=words):
        second.init_communicator("cpu")
    first.release()
    second.init_communicator("cpu")
    second.close_communicator()
