"""vLLM inside the training process."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from unittest.mock import patch

import pytest
from accelerate import Accelerator
from safetensors.torch import load_file

from grpo_ext.rollout.vllm.generation import Generation
from support import tiny
from support.interrupted import without_clocks
from support.processes import PATIENCE
from support.vllm_runs import DDP, drifts, steps, train

FLOAT32, BFLOAT16 = 0.02, 0.1
NEEDS_BITSANDBYTES = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


def test_it_learns_and_does_not_drift(tied, tmp_path):
    log, said, _ = train(tmp_path, "colocate", tied, config={"max_steps": 20})
    assert "Traceback" not in said
    rewards = [entry["reward"] for entry in steps(log)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.5
    assert len(drifts(log)) == 20
    assert max(drifts(log)) < FLOAT32
    assert all(entry["sampling/weight_sync_mib"] > 0 for entry in steps(log))


def test_a_recipe_ends_without_a_traceback(tied, tmp_path):
    """vLLM is first imported where the trainer is made, and keeps the frames of that."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}:", "solution": "1"}) + "\n" for i in range(8)))
    own = tiny.TRAINING | {"model_name_or_path": tied, "dataset_name": str(rows), "reward_funcs": ["exact_match"]}
    recipe = own | {"use_vllm": True, "max_steps": 1, "max_completion_length": 8, "output_dir": str(tmp_path / "run")}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    line = [sys.executable, "-m", "grpo_ext", "train", "--config", str(tmp_path / "recipe.json")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def test_weights_that_do_not_arrive_are_noticed_within_three_steps(tied, tmp_path):
    log, said, code = train(tmp_path, "colocate", tied, check=False, sync=False, config={"max_steps": 8})
    assert code != 0
    assert "-> stale weights" in said
    assert max(entry["step"] for entry in log) <= 3


@pytest.mark.parametrize("bits", [None, pytest.param(4, marks=NEEDS_BITSANDBYTES)])
def test_base_and_adapter_are_summed_for_the_sampler(bits, tied, tmp_path):
    config = {"max_steps": 5, "learning_rate": 1e-2, "vllm_dtype": "bfloat16", "vllm_push": "merged"}
    log, _, _ = train(tmp_path, "colocate", tied, lora=True, bits=bits, config=config)
    assert max(drifts(log)) < BFLOAT16  # run.py asserts that the base weights are the same to the last bit
    shares = [entry["sampling/push_rounding"] for entry in steps(log)]
    assert 0 < shares[-1] < shares[1]  # what is lost is the smaller a part of the update, the larger it is


def test_an_adapter_that_is_left_out_of_the_push_is_noticed(tied, tmp_path):
    config = {"max_steps": 12, "learning_rate": 1e-2, "vllm_push": "merged"}
    log, said, code = train(tmp_path, "colocate", tied, check=False, lora=True, adapter_pushed=False, config=config)
    assert code != 0
    assert "-> stale weights" in said
    assert drifts(log)[0] < FLOAT32  # it begins as zero


def test_two_processes_have_an_engine_each(untied, tmp_path):
    log, _, _ = train(tmp_path, "colocate", untied, launch=DDP, config={"max_steps": 5})
    assert len(drifts(log)) == 5
    assert max(drifts(log)) < FLOAT32


def test_runs_that_start_at_the_same_moment_take_ports_of_their_own(monkeypatch):
    from trl.generation.vllm_generation import VLLMGeneration, ensure_master_addr_port  # and all of vLLM

    ports = []

    def look_for_a_port(_):
        ensure_master_addr_port()
        ports.append(os.environ["MASTER_PORT"])

    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setattr(VLLMGeneration, "_init_vllm", look_for_a_port)
    for _ in range(2):
        with patch.dict(os.environ):
            run = Generation.__new__(Generation)
            run.mode, run.dtype, run.engine_kwargs = "colocate", "float32", {}
            run.with_support = run.with_routes = False
            run.push, run.whole, run.ahead = "auto", None, 0
            run.model, run.accelerator = tiny.model(), Accelerator()
            run._init_vllm()
    assert ports[0] != ports[1]


def test_a_truncated_distribution_is_told_from_stale_weights(tied, tmp_path):
    config = {"max_steps": 2, "top_p": 0.7, "loss_defaults": "trl"}
    _, said, code = train(tmp_path, "colocate", tied, check=False, config=config)
    assert code != 0
    assert "-> sampling parameters that truncate" in said
    assert "-> stale" not in said


def test_a_truncated_sampler_agrees_with_a_policy_over_the_tokens_that_it_kept(tied, tmp_path):
    config = {"max_steps": 4, "top_p": 0.7, "top_k": 6, "min_p": 0.02, "temperature": 1.3}
    options = {"vllm_engine_kwargs": {"max_num_batched_tokens": 512, "max_num_seqs": 4}}
    log, _, _ = train(tmp_path, "colocate", tied, config=config | options)
    assert json.loads((tmp_path / "engine.json").read_text()) == {"batched": 512, "sequences": 4}
    assert max(drifts(log)) < FLOAT32
    assert all(entry["sampling/kept"] == pytest.approx(1, abs=0.02) for entry in steps(log))


def test_a_run_that_was_stopped_goes_on_with_what_vllm_had_sampled(untied, tmp_path):
    """Bit for bit to the end of the open generation; what vLLM samples after that is its own."""
    config = {"steps_per_generation": 2, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    ends = []
    for name in ("whole", "resumed"):
        folder = tmp_path / name
        folder.mkdir()
        resume = {"resume": str(tmp_path / "whole" / "out" / "checkpoint-1")} if name == "resumed" else {}
        log, _, _ = train(folder, "colocate", untied, config=config, **resume)
        ends.append((load_file(folder / "out" / "checkpoint-2" / "model.safetensors"), without_clocks(log[:2])))
    (weights, log), (same, logged) = ends
    assert log == logged
    assert weights.keys() == same.keys()
    assert all(weights[name].equal(same[name]) for name in weights)
