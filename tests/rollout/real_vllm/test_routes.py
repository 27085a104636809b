"""vLLM's record of its routers' choices, on its CPU build, which does not return it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_ext.packing.routes import ROUTES
from grpo_ext.rollout.samplers import Sampled
from grpo_ext.rollout.vllm.requester import with_routes
from support import experts, tiny
from support.processes import PATIENCE
from support.trainers import build
from support.vllm_runs import ENV

RECORD = Path(__file__).parent / "record_routes.py"
ON_CPU = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A mixture of experts with a dense layer in its middle, on disk."""
    folder, kind = tmp_path_factory.mktemp("mixture"), type(experts.model())
    config = experts.model().config
    config.hidden_size, config.num_attention_heads, config.head_dim, config.num_hidden_layers = 64, 2, 32, 3
    config.mlp_only_layers = [1]
    torch.manual_seed(0)
    kind(config).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def run(*line):
    return subprocess.run(
        [sys.executable, *line], env=ENV | ON_CPU, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def test_the_cpu_build_does_not_return_routes(mixture):
    """Once it does, `replay_routes` can be tested here from end to end."""
    asked = f"from vllm import LLM; LLM({mixture!r}, enforce_eager=True, enable_return_routed_experts=True)"
    assert "AuxOutput Connector requires Model Runner V2" in run("-c", asked).stderr


def test_the_recorded_routes_are_those_that_replay_sends_tokens_to(mixture, tmp_path):
    """Layer and expert have the same numbers in vLLM and in transformers, also beside a dense layer."""
    done = run(RECORD, mixture, tmp_path / "rows.json")
    assert not done.returncode, done.stderr[-3000:]
    trainer = build(mixture, tmp_path, shared_prefix="false", temperature=1.0)
    policy = trainer.model.eval()
    for prompt, ids, logps, dtype, recorded in json.loads((tmp_path / "rows.json").read_text()):
        assert dtype == "uint8"
        routes = np.array(recorded, dtype)
        assert routes.shape == (len(prompt) + len(ids) - 1, 3, 2)
        assert not routes[:, 1].any()  # of the dense layer
        [one] = with_routes([Sampled(ids, logps, None)], [prompt], [routes])
        own = experts.chosen(policy, [*prompt, *ids])
        assert torch.equal(own.sort().values, one.routes.sort().values)
        rows = torch.tensor([[*prompt, *ids]])
        found = trainer._scorer.tokens(policy, rows, torch.ones_like(rows), len(ids), **{ROUTES: [one.routes]})[0]
        assert (found - torch.tensor([logps])).abs().max() < 1e-4
    assert trainer._scorer.routes_changed()[0] == 0
