"""Every engine of recipes/accelerate_configs, on two processes: it trains, resumes, and leaves a model that loads."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

import tiny
from processes import CONFIG, launcher, run

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "engine_rank.py"
FSDP, ZERO = "DistributedType.FSDP", "DistributedType.DEEPSPEED"
ENGINES = {
    "ddp": ("cpu_ddp", {}, "DistributedType.MULTI_CPU", False),
    "fsdp2": ("cpu_fsdp2", {}, FSDP, True),
    "fsdp2 in shards, activations computed again": (
        "cpu_fsdp2",
        {"fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_activation_checkpointing": True},
        FSDP,
        True,
    ),
    "fsdp2 that keeps its weights in memory": ("cpu_fsdp2", {"fsdp_offload_params": True}, FSDP, True),
    "zero1": ("cpu_zero1", {}, ZERO, False),
    "zero2": ("cpu_zero2", {}, ZERO, False),
    "zero3": ("cpu_zero3", {}, ZERO, True),
    "zero3 that leaves its weights apart": ("cpu_zero3", {"zero3_save_16bit_model": False}, ZERO, True),
}


def needs_deepspeed(engine: str) -> None:
    if engine.startswith("zero") and not find_spec("deepspeed"):
        if os.environ.get("GRPO_EXT_REQUIRE_DEEPSPEED"):
            pytest.fail("DeepSpeed is not installed, and is required here")
        pytest.skip("DeepSpeed is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("engine", ENGINES)
def test_it_trains_resumes_and_leaves_a_model_that_loads(engine, model, tmp_path):
    needs_deepspeed(engine)
    name, changed, kind, sharded = ENGINES[engine]
    config = yaml.safe_load((CONFIG.parent / f"{name}.yaml").read_text())
    for section in ("fsdp_config", "deepspeed_config"):
        if section in config:
            config[section] |= changed
    file = tmp_path / "engine.yaml"
    file.write_text(yaml.safe_dump(config))
    run([*launcher(file), str(SCRIPT), model, str(tmp_path)], DS_ACCELERATOR="cpu")
    facts = torch.load(tmp_path / "facts.pt")
    start = tiny.load(model).state_dict()
    for end in ("whole", "resumed"):
        assert (facts[end]["engine"], facts[end]["sharded"]) == (kind, sharded)
        loaded = tiny.load(str(tmp_path / end)).state_dict()
        assert loaded.keys() == facts[end]["weights"].keys()
        for parameter, value in facts[end]["weights"].items():
            assert torch.equal(loaded[parameter], value), parameter
            assert torch.equal(value, facts["whole"]["weights"][parameter]), parameter
    assert max((facts["whole"]["weights"][p] - start[p]).abs().max() for p in start) > 1e-4
