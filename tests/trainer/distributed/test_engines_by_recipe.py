"""Shipped launch configurations train the quickstart: as `accelerate launch` does it, two processes, a recipe."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from support import tiny
from support.processes import CONFIG, launcher, needs_deepspeed, on_cpu, run_forked

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parents[2] / "support" / "hardly_warm.py", "grpo_ext.train"
SHIPPED = {path.stem for path in CONFIG.parent.glob("*.yaml")}
ENGINES = sorted(SHIPPED - {"ddp", "fsdp2", "fsdp2_offload", "zero2"}, key=lambda engine: (engine != "zero3", engine))
"""All but those of `test_engines`; on a CPU `ddp` is `cpu_ddp`. With the first, one process of two builds the warm
model: under ZeRO-3, which must not split it.
"""
STEPS = ("--max_steps", "2", "--logging_steps", "1", "--warmup_steps", "0", *tiny.FEW)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def _train(engine, folder, cache, recipe, *given, processes=2):
    needs_deepspeed(engine)
    config = CONFIG if engine == "cpu_ddp" else on_cpu(engine, folder, processes=processes)
    line = [*map(str, PROGRAM), "--config", recipe, *STEPS, *given, "--output_dir", str(folder / "out")]
    if processes == 1:  # which the launcher starts otherwise
        return run_forked(*launcher(config)[1:], *line, GRPO_EXT_CACHE=str(cache))
    return run_forked(*line, config=config, GRPO_EXT_CACHE=str(cache))


def _weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_quickstart_is_trained(engine, cache, tmp_path):
    built = [path.name for path in cache.iterdir()]
    always = ("--entropy_coef", "0.01")  # a gradient, also where all completions of the few groups are right
    said = _train(engine, tmp_path, cache, "quickstart/grpo", *always, processes=1 if engine == "single" else 2)
    assert "step 2/2   reward" in said
    [model] = cache.iterdir()
    assert built in ([], [model.name])
    warm, trained = _weights(model), _weights(tmp_path / "out")
    assert warm.keys() == trained.keys()
    assert all(torch.isfinite(value).all() for value in trained.values())
    assert 1e-5 < max((trained[name] - warm[name]).abs().max().item() for name in warm) < 1e-2


def test_zero_3_trains_an_adapter_on_a_model_on_disk(tmp_path):
    """The look at a model before training builds it without data, which ZeRO-3 must not partition."""
    lora = ("--use_peft", "true", "--lora_target_modules", "q_proj", "v_proj", "--max_completion_length", "8")
    model = ("--model_name_or_path", tiny.save(tmp_path / "model"), *lora)
    said = _train("zero3", tmp_path, tmp_path / "cache", "quickstart/grpo", *model)
    assert "step 2/2   reward" in said
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
