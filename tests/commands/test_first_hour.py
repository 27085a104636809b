"""What a new user meets in the first hour: what is printed, chosen and suggested where nothing was asked for."""

import dataclasses
import importlib.util
import logging
import re
import signal
import warnings
from pathlib import Path

import pytest
import torch
import yaml

from grpo_ext import ConfigError, GRPOExtConfig
from grpo_ext.commands import serve
from grpo_ext.commands.sample import SAMPLING_ONLY
from grpo_ext.config import machine
from grpo_ext.config.launch import planned_processes
from grpo_ext.evaluation.results import figures
from grpo_ext.recipe.files import recipes_folder
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.preflight import Preflight
from grpo_ext.terminal import without_notices
from grpo_ext.trainer import callbacks
from grpo_ext.trainer.signals import Signals, signals
from support.commands import command
from support.trainers import build

pytestmark = pytest.mark.usefixtures("few_rows")
CPU = {"use_cpu": True, "bf16": False}


# Settings.


@pytest.mark.parametrize("value", [None, [], "", "none"])
def test_nothing_to_report_to_is_none(value):
    assert GRPOExtConfig("out", report_to=value, **CPU).report_to == []


@pytest.fixture
def without_gpu(monkeypatch):
    for module, name in ((torch.accelerator, "is_available"), (torch.cuda, "is_available")):
        monkeypatch.setattr(module, name, lambda: False)
    for name in ("is_torch_bf16_gpu_available", "is_torch_xla_available"):
        monkeypatch.setattr(machine, name, lambda: False)


@pytest.mark.usefixtures("without_gpu")
def test_a_machine_without_a_gpu_trains_on_its_cpu_in_float32(caplog):
    chosen = GRPOExtConfig("out", report_to="none")
    assert (chosen.use_cpu, chosen.bf16, chosen.fp16) == (True, False, False)
    assert [record.message for record in caplog.records if "no GPU" in record.message] == [
        "This machine has no GPU: training on its CPU in float32 (use_cpu: true, bf16: false)."
    ]
    asked = GRPOExtConfig("out", report_to="none", use_cpu=True, bf16=True)
    assert asked.bf16  # what was asked for stays
    with pytest.raises(ConfigError, match="You need to assign use_cpu"):
        GRPOExtConfig("out", report_to="none", bf16=True)
    with planned_processes(2):  # of another machine
        planned = GRPOExtConfig("out", report_to="none")
    assert (planned.use_cpu, planned.bf16) == (False, True)


def test_arguments_of_other_versions_are_all_named_with_a_cure():
    with pytest.raises(ConfigError) as caught:
        GRPOExtConfig(
            "out", warmup_ratio=0.1, max_prompt_length=512, learning_rte=1e-6, overlap="step", beta=-1, **CPU
        )
    warmup, prompts, rate, overlap, beta = caught.value.problems
    assert str(warmup) == "warmup_ratio=0.1: no such argument. Write warmup_steps: a value below 1 is a ratio."
    assert prompts.cure.startswith("Remove it, and leave longer prompts out of the dataset")
    assert rate.cure == "Did you mean 'learning_rate'?"
    assert overlap.cure.startswith("Set rollout_ahead: 1")
    assert beta.field == "beta"  # an unknown name hides no other mistake


def test_a_subclass_may_take_further_arguments():
    class Mine(GRPOExtConfig):
        def __init__(self, *args, further=1, **given):
            super().__init__(*args, **given)
            self.further = further

    assert Mine("out", further=2, report_to="none", **CPU).further == 2


@pytest.mark.parametrize(("beta", "expected"), [(0, True), (0.001, True), (0.04, False)])
def test_check_names_the_kl_of_the_paper(beta, expected, capsys):
    assert command("check", "--config", "quickstart/grpo", "--beta", beta) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (f"the paper trains with beta: 0.04; here it is {beta}" in printed) is expected
    assert "clip cannot act: each generation is used for one optimizer step" in printed
    assert command("check", "--config", "quickstart/dapo", "--beta", beta) == 0
    assert "the paper trains with" not in capsys.readouterr().out


WORDS = {
    "--learning_rate 0,00001": "learning_rate='0,00001': text where a number is expected. Write learning_rate: 1e-05.",
    "--learning_rate 0,001": "Write learning_rate: 0.001.",
    "--num_generations 1,024": "Write num_generations: 1024.",
    "--max_steps 2e1": "max_steps='2e1': text where a whole number is expected. Write max_steps: 20.",
    "--max_steps x": "Write a whole number, or leave it out: the default is -1.",
    "--reward_weights 1 -5e-1": "reward_weights=[1.0, -0.5]: 2 weights for 3 rewards",
    "--beta -2e-3": "beta=-0.002: must be 0 or more",
    "--beta=-.5": "beta=-0.5: must be 0 or more",
    "--warmup_ratio 0.1": "It is warmup_steps here. Write warmup_steps.",
    "--probe": "probe: it is gone: a run logs the seconds of a step's parts. Train --max_steps 4",
    "--dataset_name quickstart": "dataset_name='quickstart': names no task. Write quickstart/addition.",
    "--dataset_name reasoning-gym/chain_sum": "names no task. Write reasoning_gym/chain_sum.",
    "--dataset_name quickstrat/addition": "names no task. Write quickstart/addition.",
    "--dataset_name reasoning_gyms/chain-sum": "names no task. Write reasoning_gym/chain_sum.",
    "--tempratur null": "tempratur: no such key. Did you mean 'temperature'",
    "--accelerate-config zero4": "accelerate_config='zero4': neither a file nor a shipped configuration.",
}


@pytest.mark.parametrize(
    "keys", [pytest.param(k, marks=pytest.mark.extra("tasks") if "chain-sum" in k else ()) for k in WORDS]
)
def test_a_mistake_on_the_command_line_is_read_as_it_was_meant(keys, capsys):
    assert command("check", "--config", "quickstart/grpo", *keys.split()) == 2
    assert WORDS[keys] in capsys.readouterr().err


RECIPES = {
    "quickstart/gpro": "Did you mean 'quickstart/gspo' or 'quickstart/grpo'",
    "grpo": "Did you mean 'quickstart/grpo'? `grpo-ext recipes` lists",
    "laptop/mine": "Did you mean 'laptop/",
    "nope": "packaged recipe. `grpo-ext recipes` lists the packaged ones.",
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_does_not_exist_has_few_suggestions(name, capsys):
    assert command("check", "--config", name) == 2
    err = capsys.readouterr().err
    assert RECIPES[name] in err
    assert len(err) < 500


def test_a_command_without_a_recipe_asks_for_one(capsys):
    assert command("check", "--learning_rate", "x") == 2
    err = capsys.readouterr().err
    assert "--config: no recipe is named. Write --config RECIPE" in err
    assert "learning_rate='x'" in err
    assert err.count("\n  - ") == 2
    assert command("check", "--model_name_or_path", "quickstart") == 2
    assert "no recipe is named" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["MISSING", "outputs/MISSING"])
def test_a_run_that_is_not_there_is_a_folder_that_is_missing(name, capsys):
    for line in (("merge", name), ("eval", "--config", "quickstart/grpo", "--model", name)):
        assert command(*line) == 2
        assert f"RUN='{name}': no such folder here, and no such model on the hub" in capsys.readouterr().err


def test_a_server_without_vllm_is_refused_by_its_own_name(capsys, monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda _: None)
    assert command("serve", "--config", "quickstart/grpo") == 2
    assert "grpo-ext serve: it starts vLLM, which is not installed. Install it" in capsys.readouterr().err


def test_null_on_the_command_line_unsets_a_key(tmp_path, capsys):
    (tmp_path / "mine.csv").write_text("question,answer\n" + "".join(f"{i}+{i},{2 * i}\n" for i in range(40)))
    (tmp_path / "sets" / "train.csv").parent.mkdir()
    (tmp_path / "sets" / "train.csv").write_text((tmp_path / "mine.csv").read_text())
    mine = ["--config", "laptop/qwen2.5-0.5b-dr_grpo", "--dataset_name", str(tmp_path / "mine.csv")]
    mine += ["--answer_format=null", "--model_name_or_path", "quickstart", "--max_completion_length", "64"]
    with pytest.raises(
        ConfigError, match=r"dataset_config='main': .* is one file. Unset dataset_config \(--dataset_config null\)"
    ):
        load_recipe(mine, Preflight())
    recipe = load_recipe(
        [*mine, "--dataset-config", "null", "--system_prompt", "null", "--use_cpu", "true"], Preflight()
    )
    assert (recipe.script.dataset_config, recipe.data.answer_format, recipe.data.system_prompt) == (None, None, None)
    assert recipe.data.prompt_column == "question"
    mine[3] = str(tmp_path / "sets")
    with pytest.raises(
        ConfigError, match=r"dataset_config='main': .*sets has no such configuration.*--dataset_config null"
    ):
        load_recipe(mine, Preflight())


def test_a_set_without_data_of_its_own_cannot_name_a_split_of_a_mixture(tmp_path):
    (tmp_path / "mine.csv").write_text("prompt,solution\n" + "".join(f"{i}+{i}=,{2 * i}\n" for i in range(40)))
    recipe = yaml.safe_load((recipes_folder() / "quickstart" / "grpo.yaml").read_text())
    del recipe["dataset_name"]
    recipe["datasets"] = [{"path": "csv", "data_files": str(tmp_path / "mine.csv")}]
    recipe["eval_sets"] = [{"name": "hard", "split": "test"}]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(ConfigError, match=r"hard: split='test': datasets has no splits by name\. Set dataset_name"):
        load_recipe(["--config", str(tmp_path / "mine.yaml")], Preflight())


def test_a_packaged_recipe_is_printed_to_be_copied(capsys):
    assert command("recipes", "quickstart/grpo") == 0
    assert capsys.readouterr().out == (recipes_folder() / "quickstart" / "grpo.yaml").read_text()
    assert command("recipes", "quickstart/none") == 2
    assert "`grpo-ext recipes` lists" in capsys.readouterr().err


# What is printed.


@pytest.mark.parametrize(
    ("module", "name", "notice"),
    [
        pytest.param(
            *("bitsandbytes", "bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward"),
            marks=pytest.mark.extra("qlora"),
        ),
        ("transformers", "transformers.trainer_utils", "The tokenizer has new PAD/BOS/EOS tokens"),
    ],
)
def test_notices_that_ask_nothing_of_the_user_are_not_shown(module, name, notice):
    package = Path(importlib.util.find_spec(module).origin).parent
    assert notice in package.joinpath(*name.split(".")[1:]).with_suffix(".py").read_text()  # it still begins like this
    logger = logging.getLogger(name)
    record = {text: logger.makeRecord(name, logging.WARNING, "", 0, text, (), None) for text in (notice, "Another")}
    with without_notices():
        assert not logger.filter(record[notice])
        assert logger.filter(record["Another"])
    assert logger.filter(record[notice])


def test_notices_of_what_others_call_are_hidden_while_they_run():
    def warn(name: str) -> None:
        warnings.warn(f"`{name}` is deprecated and will be removed in v6.", FutureWarning, stacklevel=2)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with without_notices():
            warn("gradient_checkpointing_enable")
            warn("is_gradient_checkpointing")
            with pytest.raises(FutureWarning, match="something"):
                warn("something")
        with pytest.raises(FutureWarning, match="gradient_checkpointing"):
            warn("gradient_checkpointing_enable")


def test_the_first_step_and_slow_rollouts_are_printed(model_path, tmp_path, capsys, monkeypatch):
    build(model_path, tmp_path / "a", max_steps=3, logging_steps=3).train()
    lines = capsys.readouterr().out.splitlines()
    [line] = [line for line in lines if line.startswith("step 1")]
    assert re.fullmatch(r"step 1/3   done after \d:\d\d; the next line follows at step 3", line)
    assert not [line for line in lines if "sampled" in line]
    assert signals.step_seconds > 0
    monkeypatch.setattr(callbacks, "_QUIET", -1.0)
    build(model_path, tmp_path / "b", max_steps=2, logging_steps=1).train()
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if re.fullmatch(r"completions sampled in \d:\d\d; now the update", line)]) == 2
    assert not [line for line in lines if "follows" in line]  # each step has its line
    build(model_path, tmp_path / "c", max_steps=1, logging_steps=3).train()
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 1/1   done")]
    assert "follows" not in line


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.0, "after this step; a"), (42.4, "step (the last one took 42 s);")]
)
def test_a_signal_says_how_long_the_step_may_take(seconds, expected, capfd):
    received = Signals()
    received.phase, received.step_seconds = "training", seconds
    received.arrived(signal.SIGTERM)
    assert expected in capfd.readouterr().err


def test_printed_completions_of_a_recipe_are_no_matter_of_its_evaluation(caplog):
    recipe = GRPOExtConfig("out", log_completions=True, num_completions_to_print=0, log_unique_prompts=True, **CPU)
    dataclasses.replace(recipe, **SAMPLING_ONLY)
    assert "no effect" not in caplog.text


def test_a_share_has_one_interval_within_0_and_1():
    shares = [1.0, 1.0, 1.0, 0.5, 1.0]
    prompts = [{"shares": {"avg@2": share}, "means": {"rewards/accuracy": share, "tokens": 9.0}} for share in shares]
    found = figures(prompts)
    assert found["avg@2"] == found["rewards/accuracy"]
    assert 0 <= found["rewards/accuracy"].low < found["rewards/accuracy"].high <= 1
    assert found["tokens"].mean == 9.0
