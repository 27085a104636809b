"""Every engine of recipes/accelerate_configs, on two processes: it trains, resumes, and leaves a model that loads."""

from pathlib import Path

import pytest
import torch

from support import tiny
from support.processes import forked, needs_deepspeed, on_cpu, run_forked

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "ranks.py"
FSDP, ZERO = "DistributedType.FSDP", "DistributedType.DEEPSPEED"
ENGINES = {
    "fsdp2": ("fsdp2", {}, FSDP, True),
    "fsdp2 in shards, activations computed again": (
        "fsdp2",
        {"fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_activation_checkpointing": True},
        FSDP,
        True,
    ),
    "fsdp2_offload": ("fsdp2_offload", {}, FSDP, True),
    "zero2": ("zero2", {}, ZERO, False),
    "zero3 that leaves its weights apart": ("zero3", {"zero3_save_16bit_model": False}, ZERO, True),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.cases(3)
def test_it_trains_resumes_and_leaves_a_model_that_loads(engine, model, tmp_path):
    needs_deepspeed(engine)
    name, changed, kind, sharded = ENGINES[engine]
    file = on_cpu(name, tmp_path, **changed)
    script = str(SCRIPT), "engine", model, str(tmp_path)
    run_forked(*script, config=file)
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


def test_fsdp_that_would_be_ddp_in_silence_is_refused(model, tmp_path):
    """Without our shim, which is what a user on a CPU has."""
    script = tmp_path / "plain.py"
    script.write_text(
        SCRIPT.read_text()
        .replace("    make_fsdp_real()\n", "")
        .replace("Path(__file__).parents[2]", repr(str(SCRIPT.parents[2])))
    )
    done = forked(script, "engine", model, tmp_path, config=on_cpu("fsdp2", tmp_path))
    assert done.returncode != 0
    assert "the launch asks for FSDP, and accelerate has started MULTI_CPU" in done.stdout
