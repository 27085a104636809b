"""A CSV of questions and answers, trained on by LoRA, merged and tried: the commands as a user types them."""

import sys
import time

import pytest
import yaml
from transformers import AutoModelForCausalLM

import processes
import tiny


@pytest.mark.slow
def test_from_a_csv_to_a_model_in_use(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "model")
    lines = ["question,answer", *(f"{c}{i}:,{i}" for i, c in enumerate("abcdefgh"))]
    (tmp_path / "questions.csv").write_text("\n".join(lines) + "\n")
    recipe = tiny.TRAINING | {
        "model_name_or_path": "./model",
        "dataset_name": "questions.csv",
        "system_prompt": "answer.",
        "use_peft": True,
        "lora_target_modules": ["q_proj", "v_proj"],
        "reward_funcs": ["accuracy", "tags"],
        "reward_workers": 0,
        "output_dir": "outputs/run",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    seconds = {}
    for command in (
        "train --config recipe.yaml",
        "merge outputs/run",
        "try outputs/run-merged --prompt a1: --compare --seed 1",
    ):
        start = time.monotonic()
        processes.run([sys.executable, "-m", "grpo_ext.commands.cli", *command.split()])
        seconds[command.split()[0]] = time.monotonic() - start
    assert sum(seconds.values()) < processes.PATIENCE, seconds
    merged = AutoModelForCausalLM.from_pretrained("outputs/run-merged")
    assert not hasattr(merged, "peft_config")
