"""`grpo-ext eval`: what it is asked, what it writes, and that the number of processes changes nothing."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import yaml

from grpo_ext.commands import eval as evaluating
from grpo_ext.errors import NOT_FINISHED
from support import tiny
from support.commands import command
from support.processes import CONFIG, on_cpu, run_forked


@pytest.fixture
def recipe(tmp_path):
    settings = tiny.TRAINING | {
        "model_name_or_path": tiny.save(tmp_path / "model"),
        "dataset_name": "quickstart/addition",
        "reward_funcs": [{"name": "support.tiny:length", "isolate": False}],
        "output_dir": str(tmp_path / "out"),
        "per_device_eval_batch_size": 8,
        "eval_sets": [{"name": "held", "samples": 4, "limit": 7, "threshold": 0.5, "seed": 1}],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def figures(folder, name="model"):
    [file] = (folder / "held").glob(f"*{name}.json")
    return json.loads(file.read_text())


def test_one_model_is_evaluated_here(recipe, tmp_path, capsys):
    assert command("eval", "--config", recipe, "--output", tmp_path / "found") == 0
    found = figures(tmp_path / "found")
    assert found["settings"]["samples"] == 4
    assert set(found["figures"]) >= {"avg@4", "pass@2", "pass@4", "rewards/length", "tokens", "truncated"}
    assert len(found["right"]["length"]) == 7
    [samples] = (tmp_path / "found" / "held").glob("*_samples.jsonl")
    chunks = [json.loads(line)["samples"] for line in samples.read_text().splitlines()[1:]]
    assert [len(chunk) for chunk in chunks] == [8, 8, 8, 4]  # per_device_eval_batch_size
    assert "held: 7 prompts x 4" in capsys.readouterr().out


def test_it_computes_in_the_precision_of_training(recipe, monkeypatch):
    """Else the figures are those of another policy: float32 has the small updates that bfloat16 rounds away."""
    mixed, made = [], evaluating.sampler

    def watched(*arguments):
        trainer = made(*arguments)
        head = trainer.model.get_output_embeddings()
        head.register_forward_pre_hook(lambda *_: mixed.append(torch.is_autocast_enabled("cpu")))
        return trainer

    monkeypatch.setattr(evaluating, "sampler", watched)
    assert command("eval", "--config", recipe, "--bf16", "true") == 0
    assert mixed
    assert all(mixed)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_a_line_and_the_same_command_continues(number, recipe, tmp_path, capsys, monkeypatch):
    kept = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stock, calls = tiny.length, []

    def length(completions, **columns):
        calls.append(len(completions))
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return stock(completions, **columns)

    monkeypatch.setattr(tiny, "length", length)
    assert command("eval", "--config", recipe) == NOT_FINISHED
    assert "Run the same command to continue it" in capsys.readouterr().err
    assert command("eval", "--config", recipe) == 0
    assert calls == [8, 8, 8, 8, 4]  # the third chunk twice
    assert len(figures(tmp_path / "out" / "evaluation")["right"]["length"]) == 7
    assert signal.signal(signal.SIGTERM, kept) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--samples", "0"], "held.samples=0: must be 1 or more"),
        (["--temperature", "0"], "all equal"),
        (["--model", "./nowhere"], "'./nowhere': no such folder"),
        (["--model", "nowhere"], "'nowhere': no such folder here, and no such model on the hub"),
        (["--num_processes", "none"], "none is not a number of processes"),
        (["--accelerate_config", "zero9"], "zero9"),
        (["--samplse", "4"], "samplse"),
    ],
)
def test_a_mistake_is_told_before_a_model_is_loaded(options, words, recipe, capsys):
    assert command("eval", "--config", recipe, *options) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "Traceback" not in told


def test_a_split_that_is_not_there_is_told_before_weights_are_loaded(recipe, tmp_path, capsys):
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 3 =", "solution": "5"}\n')
    options = ["--eval_sets", "null", "--dataset_name", tmp_path / "rows.jsonl"]
    assert command("eval", "--config", recipe, *options) == 2
    assert "'test'" in capsys.readouterr().err


@pytest.mark.slow
def test_models_side_by_side_are_printed_in_one_table(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluating, "call", lambda line, environment: evaluating._main(line[3:]))
    models = [str(tiny.save(tmp_path / name)) for name in ("before", "after")]
    assert command("eval", "--config", recipe, *(word for model in models for word in ("--model", model))) == 0
    printed = capsys.readouterr().out
    assert printed.count("held: 7 prompts x 4") == 1
    assert "prompt by prompt over 7" in printed


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_draw_what_one_draws(sharded, recipe, tmp_path):
    """By FSDP as accelerate sets it up, the first process alone is to load the weights."""
    config = on_cpu("fsdp2", tmp_path, fsdp_cpu_ram_efficient_loading=True) if sharded else CONFIG
    start = Path(tiny.__file__).with_name("fsdp_on_cpu.py") if sharded else "-m"
    arguments = ["--config", str(recipe), "--output"]
    assert command("eval", *arguments, tmp_path / "one") == 0
    run_forked(start, "grpo_ext.commands.eval", *arguments, tmp_path / "two", config=config)
    one, two = figures(tmp_path / "one"), figures(tmp_path / "two")
    assert one == two
    files = [next((tmp_path / name / "held").glob("*_samples.jsonl")) for name in ("one", "two")]
    assert files[0].read_text() == files[1].read_text()
