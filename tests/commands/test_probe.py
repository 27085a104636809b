"""`grpo-ext check --probe`: real steps that leave nothing behind, parts that add up, advice by hand, refusals."""

import re
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_ext import GRPOExtConfig
from grpo_ext.commands import probe
from grpo_ext.commands.advice import Measured, helpful
from grpo_ext.commands.probe import NAMES, Windows, figures, memory_row, seconds_of, shown
from grpo_ext.errors import RewardError, RolloutDrift, ServerLost
from support import tiny
from support.commands import command

GIB = 2**30
CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "num_generations": 4, "gradient_checkpointing": False}
PARTS = dict.fromkeys(NAMES, 0.0)


def config(**settings) -> GRPOExtConfig:
    return GRPOExtConfig(**CPU | {"per_device_train_batch_size": 8, "max_steps": 9} | settings)


@pytest.mark.parametrize(
    ("settings", "warm", "measured"),
    [
        ({}, 1, 1),
        ({"num_iterations": 3}, 3, 3),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 8}, 4, 4),
        ({"rollout_engine": "process", "rollout_ahead": 2}, 2, 1),
    ],
)
def test_a_probe_measures_a_generation_behind_those_that_warm_up(settings, warm, measured):
    assert Windows.of(config(**settings)) == (warm, measured)


def test_the_parts_add_up_to_the_step_and_the_run():
    logs = [{"time/rollout": 3.0, "time/forward_backward": 1.0}, {"time/forward_backward": 2.0, "time/training": 0.5}]
    seconds = seconds_of(logs)
    assert seconds == PARTS | {"rollout": 1.5, "forward_backward": 1.5, "training": 0.25}
    rows = dict(shown(Measured(seconds, 0, throughput=1234.4, length=8.6), config(), 100, 2))
    assert rows["a step"] == "3.25 s, the mean of one generation's steps, without the first 2, which warm up"
    assert [rows[f"  {name}"] for name in ("rollout", "forward and backward", "the rest")] == [
        "1.50 s, 46%",
        "1.50 s, 46%",
        "0.25 s, 8%",
    ]
    assert rows["tokens"] == "1,234 a second, prompts and completions; 9 a completion"
    assert rows["the whole run"].startswith("100 steps x 3.25 s = 5:25, without evaluations and saving")


def test_a_step_without_a_rollout_has_no_figures():
    assert figures([{"tokens_per_second": 4.0, "completions/clipped_ratio": 0.5}, {}])["cut"] == 0.5


def test_memory_stands_beside_its_estimate():
    found = Measured(PARTS, 3 * GIB, before=GIB)
    assert memory_row(found, 5 * GIB, process=True) == (
        "peak 3.00 GiB of the process, 2.00 GiB beyond what Python and its libraries had before the model; "
        "estimated 5.00 GiB"
    )
    assert memory_row(found, None, process=False) == "peak 3.00 GiB allocated, not estimated"


def advised(device=100 * GIB, *, seconds=(), settings=None, **measured):
    found = Measured(PARTS | dict(seconds), **{"peak": GIB} | measured)
    return helpful(found, config(**settings or {}), device)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"seconds": {"rollout": 8.0, "training": 2.0}}, "rollouts are 80% of a step: free cores"),
        ({"cut": 0.75, "settings": {"max_completion_length": 96}}, "75% of the completions are cut off at max_comple"),
        ({"silent": 0.5}, "50% of the groups have equal rewards"),
        ({"peak": 9 * GIB, "device": 10 * GIB}, "memory is near its limit (9.00 GiB of 10.00 GiB): gradient_checkp"),
        ({"peak": 9 * GIB, "device": 10 * GIB, "settings": {"gradient_checkpointing": True}}, "GiB): micro_batch_t"),
        ({"seconds": {"rewards": 1.0, "training": 3.0}}, "rewards are 25% of a step: more reward_workers"),
        ({"seconds": {"logps": 1.0, "training": 3.0}, "settings": {"beta": 0.1}}, "25% of a step: beta: 0"),
        ({"seconds": {"optimizer": 1.0, "training": 2.0}}, "the optimizer is 33% of a step: use_peft: true"),
        (
            {"seconds": {"forward_backward": 6.0, "training": 4.0}, "settings": {"gradient_checkpointing": True}},
            "forward and backward are 60% of a step: gradient_checkpointing: false",
        ),
    ],
)
def test_each_advice_has_its_measured_part(case, words):
    (line,) = advised(**case)
    assert words in line


def test_no_advice_without_a_reason_and_three_at_most():
    nothing = advised(seconds={"training": 1.0, "logps": 1.0}, cut=0.1, silent=0.4)
    assert nothing == ["nothing stands out: no part, no length and no memory is near a limit."]
    assert advised(device=None, peak=10**12) == nothing
    ahead = {"rollout_engine": "process", "rollout_ahead": 1}
    assert advised(seconds={"rollout": 9.0}, settings=ahead) == nothing
    many = advised(GIB, peak=GIB, cut=1.0, silent=1.0, seconds={"rollout": 9.0, "rewards": 3.0})
    assert [line.split()[0] for line in many] == ["memory", "100%", "100%"]


# The command.


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Return the words of a probe of a tiny model, with changes."""
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.chdir(tmp_path)
    model = tiny.save(tmp_path / "model", max_position_embeddings=1024)
    keys = {"model_name_or_path": model, "output_dir": str(tmp_path / "out"), "max_completion_length": 16}

    def words(*further):
        pairs = (word for name, value in keys.items() for word in (f"--{name}", value))
        return ["check", "--config", "quickstart/grpo", "--probe", *pairs, *further]

    return words


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(probe, "build_trainer", load)


@pytest.mark.slow
@pytest.mark.usefixtures("few_rows")
def test_a_probe_trains_and_leaves_nothing(recipe, tmp_path, capsys):
    each = ("--save_steps", "1", "--eval_strategy", "steps", "--eval_steps", "1", "--eval_on_start", "true")
    before = sorted(tmp_path.iterdir())
    assert command(*recipe(*each, "--per_device_train_batch_size", "8", "--logging_steps", "50")) == 0
    assert sorted(tmp_path.iterdir()) == before
    out = capsys.readouterr().out
    assert "probe: step 2 of 2 is done" in out
    whole = float(re.search(r"a step +([\d.]+) s", out)[1])
    parts = [float(s) for s in re.findall(r"^    \w.*  ([\d.]+) s, +\d+%", out, re.M)]
    assert len(parts) >= 5
    assert sum(parts) == pytest.approx(whole, abs=0.005 * (len(parts) + 1))
    assert re.search(r"the whole run +120 steps x ", out)
    assert re.search(r"memory +peak [\d.]+ GiB of the process, .* estimated 0\.\d\d GiB", out)
    assert "what would help" in out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--num_processes", "2"), "--probe: a probe runs in this process, and the launch has 2 by accelerate"),
        (("--accelerate_config", "single"), "Leave out the launch to probe one process."),
        pytest.param(
            ("--use_vllm", "true", "--vllm_mode", "server"),
            "a probe would push its weights to the server",
            marks=pytest.mark.vllm,
        ),
        (("--epsilon", "-1"), "epsilon=-1"),
    ],
)
def test_what_cannot_be_probed_is_refused_before_a_model_is_loaded(recipe, nothing_is_loaded, words, error, capsys):
    assert command(*recipe(*words)) == 2
    assert error in capsys.readouterr().err


@pytest.mark.cases(1)
@pytest.mark.parametrize("error", [RewardError, RolloutDrift, ServerLost])
def test_an_error_of_a_step_is_one_line(recipe, error, monkeypatch, capsys):
    def fail(*args):
        raise error("the sampler and the reward are gone")

    monkeypatch.setattr(probe, "build_trainer", fail)
    assert command(*recipe()) in (2, 75)
    assert capsys.readouterr().err.strip().endswith("the sampler and the reward are gone")


@pytest.fixture
def temporary(tmp_path_factory, monkeypatch) -> Path:
    """The folder of temporary files of this test alone."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def probes(temporary) -> list[Path]:
    return list(temporary.glob("grpo_ext_probe_*"))


def test_the_folder_of_a_probe_stays_only_where_an_error_names_it(temporary):
    for error in (OSError("no space"), KeyboardInterrupt()):
        with pytest.raises(type(error)), probe.temporary_folder():
            raise error
    assert not probes(temporary)
    with pytest.raises(OSError, match=r"batch\.pt"), probe.temporary_folder() as folder:
        raise OSError(f"The batch is in {folder}/batch.pt")
    assert probes(temporary) == [Path(folder)]


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_probe_and_leaves_nothing(recipe, number, tmp_path, temporary, monkeypatch, capsys):
    before, stock = sorted(tmp_path.iterdir()), probe.trained

    def trained(trainer, windows):
        training_step = trainer.training_step
        monkeypatch.setattr(trainer, "training_step", lambda *a: signal.raise_signal(number) or training_step(*a))
        return stock(trainer, windows)

    monkeypatch.setattr(probe, "trained", trained)
    assert command(*recipe()) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "grpo-ext check: interrupted."
    assert sorted(tmp_path.iterdir()) == before
    assert not probes(temporary)


def test_a_gpu_reports_what_was_allocated(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    assert probe.peak_memory(SimpleNamespace(type="cuda")) == 7
    assert probe.peak_memory(torch.device("cpu")) > GIB / 10
