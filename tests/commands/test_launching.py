"""`grpo-ext train` by accelerate: which launch configuration, and the number of processes that travels with it."""

import signal
import sys

import pytest
import torch
import yaml
from accelerate.commands.config import config_args

from grpo_ext.commands import train as launching
from grpo_ext.commands.memory import shares
from grpo_ext.config.launch import ASKED, planned_processes
from grpo_ext.recipe.launching import Engine, Launch, accelerate_config, engine_of
from grpo_ext.train import main
from support import tiny
from support.commands import command
from support.processes import CONFIG, forked, run, run_forked


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """Without GPUs, without a configuration of accelerate's that the user has made."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(config_args, "default_config_file", str(tmp_path / "default_config.yaml"))
    monkeypatch.delenv(ASKED, raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def launched(monkeypatch):
    """Arguments of `grpo-ext train` -> configuration, its number of processes, and the number that travels."""

    def call(*argv: str) -> tuple[str | None, str | None, str | None]:
        calls = []
        monkeypatch.setattr(launching, "call", lambda line, env: calls.append((line, env)) or 7)
        assert command("train", *argv) == 7
        [(line, env)] = calls
        assert line[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
        own, _, rest = " ".join(line[3:]).partition("-m grpo_ext.train")
        assert "--accelerate_config" not in rest
        assert "--num_processes" not in rest
        options = dict(zip(own.split()[::2], own.split()[1::2], strict=True))
        return options.get("--config_file"), options.get("--num_processes"), env.get(ASKED)

    return call


CPU, ZERO2 = str(CONFIG), str(CONFIG.parent / "zero2.yaml")
LAUNCHES = {
    "several on a CPU": ({}, ["--num_processes", "3"], (CPU, "3", "3")),
    "one on a CPU": ({}, ["--num_processes=1"], (None, "1", "1")),
    "a configuration": ({}, ["--accelerate_config", "zero2"], (ZERO2, None, "8")),
    "both": ({}, ["--accelerate_config", "zero2", "--num_processes", "4"], (ZERO2, "4", "4")),
    "the recipe's number": ({"num_processes": 3}, [], (CPU, "3", "3")),
    "the recipe's configuration": ({"accelerate_config": "zero2", "main_process_port": 0}, [], (ZERO2, None, "8")),
    "none of the recipe's": (
        {"num_processes": 3, "accelerate_config": "zero2"},
        ["--accelerate_config", "null", "--num_processes=null"],
        (None, None, None),
    ),
    "the command line's number": ({"num_processes": 3}, ["--num_processes", "2"], (CPU, "2", "2")),
    "the command line's configuration": (
        {"accelerate_config": "zero2"},
        ["--accelerate_config", "cpu_ddp", "--num_processes", "4"],
        (CPU, "4", "4"),
    ),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_command_line_recipe_and_default_choose_the_launch_in_this_order(name, launched, tmp_path):
    keys, argv, expected = LAUNCHES[name]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"use_cpu": True} | keys))
    assert launched(*argv, "--config", str(tmp_path / "recipe.yaml")) == expected


def test_a_recipe_that_asks_for_the_cpu_gets_it_beside_a_gpu_too(launched, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for use_cpu, expected in ((True, CPU), (False, None)):
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"use_cpu": use_cpu}))
        assert launched("--num_processes", "2", "--config", str(tmp_path / "recipe.yaml")) == (expected, "2", "2")


def test_accelerates_own_default_configuration_is_kept(launched, tmp_path):
    (tmp_path / "default_config.yaml").touch()
    assert launched("--num_processes", "2", "--config", "quickstart/grpo") == (None, "2", "2")


def test_fsdp_on_a_cpu_is_refused_once_before_any_process_starts(monkeypatch, capsys):
    monkeypatch.setattr(launching, "call", lambda *_: pytest.fail("it was launched"))
    assert command("train", "--accelerate_config", "fsdp2", "--num_processes", "2", "--config", "quickstart/grpo") == 2
    err = capsys.readouterr().err
    assert err.count("FSDP on GPUs only") == 1
    assert "--accelerate_config cpu_ddp" in err


def test_check_tells_what_an_engine_shares(capsys):
    asked = ("--accelerate_config", "zero3", "--config", "quickstart/grpo")
    assert command("check", *asked, "--num_processes", "4") == 0  # a plan, of another machine
    plan = " ".join(capsys.readouterr().out.split())
    assert "engine DeepSpeed ZeRO-3: each process has its share of weights, gradients, Adam, reference" in plan
    assert "memory per process about" in plan
    assert (
        command("check", "--accelerate_config", "cpu_ddp", "--num_processes", "2", "--config", "quickstart/grpo") == 0
    )
    plan = " ".join(capsys.readouterr().out.split())
    assert "engine DDP: each process has a whole copy" in plan
    assert "memory per replica about" in plan


ALL = ("weights", "gradients", "Adam", "reference", "teachers")
ENGINES = {
    "single": Engine(),
    "ddp": Engine(),
    "cpu_ddp": Engine(),
    "fsdp2": Engine("FSDP2", ALL),
    "fsdp2_offload": Engine("FSDP2", ALL, ALL),
    "zero1": Engine("DeepSpeed ZeRO-1", ("Adam",)),
    "zero2": Engine("DeepSpeed ZeRO-2", ("gradients", "Adam")),
    "zero3": Engine("DeepSpeed ZeRO-3", ALL),
}


@pytest.mark.parametrize("name", ENGINES)
def test_every_shipped_configuration_has_its_engine(name):
    assert engine_of(Launch(accelerate_config(name))) == ENGINES[name]


def test_options_and_files_of_deepspeed_say_what_is_split_and_what_leaves_the_device(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}')
    by_options = Launch(options=("--use_deepspeed", "--zero_stage", "1", "--offload_optimizer_device", "cpu"))
    by_file = Launch(options=("--use_deepspeed", "--deepspeed_config_file", str(file)))
    assert engine_of(by_options) == Engine("DeepSpeed ZeRO-1", ("Adam",), ("Adam",))
    assert engine_of(by_file) == Engine("DeepSpeed ZeRO-3", ALL, ("weights",))
    file.write_text("[]")
    assert engine_of(by_file) == Engine("DeepSpeed ZeRO-0")
    sizes = {"weights": 80, "gradients": 40, "Adam": 160, "activations": 7}
    with planned_processes(4):
        assert shares(sizes, engine_of(by_options)) == ({"weights": 80, "gradients": 40, "activations": 7}, 40)
        assert shares(sizes, ENGINES["zero3"]) == ({"weights": 20, "gradients": 10, "Adam": 40, "activations": 7}, 0)
        assert shares(sizes, Engine()) == (sizes, 0)


def test_a_run_that_lacks_a_process_ends_before_the_recipe_is_read(monkeypatch, capsys):
    monkeypatch.setenv(ASKED, "2")
    with pytest.raises(SystemExit, match="2"):
        main(["--config", "no/such"])
    assert "num_processes=2: the launch has 1" in capsys.readouterr().err


@pytest.fixture
def train_command(tmp_path) -> list[str]:
    """Trains a recipe whose groups of eight take two processes with four rows each."""
    batch = {"per_device_train_batch_size": 4, "num_generations": 8, "gradient_accumulation_steps": 1, "max_steps": 1}
    named = {"dataset_name": "quickstart/addition", "reward_funcs": ["format"], "output_dir": str(tmp_path / "out")}
    recipe = tiny.TRAINING | batch | named | {"model_name_or_path": tiny.save(tmp_path / "model")}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return ["-m", "grpo_ext.commands.cli", "train", "--config", str(tmp_path / "recipe.yaml")]


@pytest.mark.slow
def test_two_processes_on_a_cpu_train_together_and_resume(train_command, tmp_path):
    with (tmp_path / "recipe.yaml").open("a") as recipe:
        recipe.write("num_processes: 2\naccelerate_config: cpu_ddp\nmain_process_port: 0\n")
    train_command += ["--save_strategy", "steps", "--save_steps", "1"]
    run([sys.executable, *train_command], HF_HOME=str(tmp_path))  # where accelerate's own default would lie
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert (tmp_path / "out" / "checkpoint-1" / "objective.json").exists()
    assert "Resuming from" in run_forked(*train_command, "--max_steps", "2")
    assert (tmp_path / "out" / "checkpoint-2").exists()


@pytest.mark.slow
def test_a_configuration_that_starts_one_process_of_two_is_refused(train_command, tmp_path):
    alone = yaml.safe_load(CONFIG.read_text()) | {"distributed_type": "MULTI_CPU"}
    (tmp_path / "launch.yaml").write_text(yaml.safe_dump(alone))
    train_command += ["--accelerate_config", str(tmp_path / "launch.yaml")]
    done = forked(*train_command)
    assert done.returncode != 0
    assert "num_processes=2: the launch has 1" in done.stdout
    assert not (tmp_path / "out").exists()
