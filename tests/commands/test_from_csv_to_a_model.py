"""A CSV of questions and answers, trained on by LoRA, asked and merged: the commands as a user types them, timed."""

import sys
import time

import pytest
from transformers import AutoModelForCausalLM

from grpo_ext.quickstart.model import ensure_model
from support import processes


@pytest.mark.slow
def test_from_nothing_to_a_model_in_use(tmp_path, monkeypatch):
    """As the project's README has it, but for LoRA, the number of steps, and a model hardly warmed up."""
    model = ensure_model(directory=tmp_path / "cache", steps=2)
    own, run = f"--config recipe.yaml --model_name_or_path {model} --use_peft true", "outputs/first"
    monkeypatch.chdir(tmp_path)
    seconds, said = {}, {}
    for command in (
        "new mine",
        f"check {own}",
        f"train {own} --max_steps 3 --logging_steps 1",
        f"eval --config recipe.yaml --model {run} --samples 2 --limit 8",
        f"report {run}",
        f"try {run} --prompt 876+530= --compare --seed 1",
        f"merge {run}",
    ):
        name = command.split()[0]
        start = time.monotonic()
        said[name] = processes.run([sys.executable, "-m", "grpo_ext", *command.split()])
        seconds[name] = time.monotonic() - start
        if name == "new":
            monkeypatch.chdir("mine")
    print(" ".join(f"{name}: {spent:.1f} s" for name, spent in seconds.items()))
    assert sum(seconds.values()) < processes.PATIENCE
    assert not any("\r" in text for text in said.values())  # a bar has no place in a file
    assert "step 3/3   trained in" in said["train"]
    assert "test: 8 prompts x 2" in said["eval"]
    assert "before:" in said["try"]
    out = tmp_path / "mine" / "outputs" / "first"
    assert (out / "adapter_model.safetensors").exists()
    assert (out / "metrics.jsonl").read_text().count("\n") >= 1
    page = (out / "report.html").read_text()
    for words in ("groups/mixed", "avg@2", "All 192 completions"):
        assert words in page
    merged = AutoModelForCausalLM.from_pretrained(f"{out}-merged")
    assert not hasattr(merged, "peft_config")
