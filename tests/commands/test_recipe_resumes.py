"""A recipe with a mixture of datasets and a reward whose weight moves, stopped after any step: the same bits."""

import shutil

import pytest
import torch
import yaml

import tiny
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.train import train
from interrupted import logged
from trainers import weights


@pytest.fixture
def recipe(tmp_path):
    """Two files of six prompts, read as a mixture or as a stream, in generations of two steps; two epochs."""
    folder = tmp_path / "model"
    tiny.save(folder, max_position_embeddings=1024)
    for name in "ab":
        lines = (f'{{"prompt": "{name}{i}:", "solution": "{i}"}}\n' for i in range(6))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    files = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    data = {
        "mixture": {"datasets": [{"path": file} for file in files]},
        "stream": {"dataset_name": files[0], "dataset_streaming": True},
    }

    def write(kind: str, output: str) -> list[str]:
        moving = {"name": "spread", "func": "tiny:spread", "weight_schedule": {"kind": "linear", "to": 0.2}}
        values = tiny.TRAINING | {
            "model_name_or_path": str(folder),
            "reward_funcs": [moving, {"name": "again", "func": "tiny:spread"}],
            "reward_workers": 0,
            "steps_per_generation": 2,
            "logging_steps": 2,
            "max_steps": 6,
            "save_strategy": "steps",
            "save_steps": 1,
            "output_dir": str(tmp_path / output),
        }
        path = tmp_path / f"{output}.yaml"
        path.write_text(yaml.safe_dump(values | data[kind]))
        return ["--config", str(path)]

    return write


@pytest.mark.parametrize("kind", ["mixture", "stream"])
def test_a_recipe_that_was_stopped_ends_at_the_same_bits(kind, recipe, tmp_path):
    whole = train(load_recipe(recipe(kind, "whole")))
    for step in (1, 4):
        (tmp_path / f"stopped{step}").mkdir()
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", tmp_path / f"stopped{step}" / f"checkpoint-{step}")
        resumed = train(load_recipe(recipe(kind, f"stopped{step}")))
        assert logged(resumed) == logged(whole)
        assert torch.equal(weights(resumed.model), weights(whole.model))
