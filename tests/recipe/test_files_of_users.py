"""A user's functions beside their recipe: found wherever the run starts, in every process, never another recipe's."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers.integrations import deepspeed

from grpo_ext import ConfigError
from grpo_ext.errors import UnknownNameError
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.aggregation import aggregations
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.preflight import Preflight
from grpo_ext.registry import import_path, located, portable
from grpo_ext.train import train
from support import tiny
from support.processes import run_forked

REWARD = "def f(completions, **_):\n    return [{value}.0] * len(completions)\n"


@pytest.fixture(autouse=True)
def _own_imports(monkeypatch, tmp_path):
    """Start in an empty folder, and take back what is imported."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def write(folder, **files):
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


pytestmark = pytest.mark.usefixtures("few_rows")
QUICK = {"model_name_or_path": "quickstart", "dataset_name": "quickstart/addition", "reward_funcs": ["accuracy"]}


def recipe(folder, **settings):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(QUICK | tiny.TRAINING | settings))
    return load_recipe(["--config", str(folder / "recipe.yaml")])


def test_a_file_that_parses_a_command_line_of_its_own_is_named(tmp_path):
    write(tmp_path, rewards="import sys\nsys.exit(2)")
    with pytest.raises(UnknownNameError, match=r"cannot import .*rewards\.py.*SystemExit\(2\)"):
        import_path(f"{tmp_path / 'rewards.py'}:f")


@pytest.mark.cases(2)
@pytest.mark.parametrize("path", ["rewards:f", "rewards.f", "./rewards.py:f", "rewards.py:f", "../a/rewards.py:f"])
def test_each_of_two_recipes_has_its_own_file_in_workers_and_without(path, tmp_path, runtime):
    specs = []
    for value, name in ((1, "a"), (2, "b")):
        write(tmp_path / name, rewards=REWARD.format(value=value))
        specs += recipe(tmp_path / name, reward_funcs=[{"name": name, "func": path}]).rewards
    expected = [1.0, 1.0 if ".." in path else 2.0]
    for workers in (0, 1):
        functions = runtime(*specs, workers=workers).functions
        assert [function(prompts=["?"], completions=["x"]) for function in functions] == [[v] for v in expected]


def test_the_recipes_folder_comes_before_the_working_directory(tmp_path, monkeypatch):
    write(tmp_path / "a", mine=REWARD.format(value=1))
    write(tmp_path / "elsewhere", mine=REWARD.format(value=2), other=REWARD.format(value=3))
    specs = recipe(
        tmp_path / "a",
        reward_funcs=[
            {"name": n, "func": p} for n, p in (("x", "./mine.py:f"), ("y", "mine:f"), ("z", "./other.py:f"))
        ],
    ).rewards
    monkeypatch.chdir(tmp_path)
    assert [spec.callable(["c"]) for spec in specs] == [[1.0], [1.0], [3.0]]


def test_a_file_may_import_what_lies_beside_it_and_a_package_its_own_modules(tmp_path):
    write(
        tmp_path / "a",
        rewards="import beside\n\ndef f(completions, **_):\n    import late\n    return [beside.V + late.V]\n",
        beside="V = 1",
        late="V = 0.5",
        **{
            "pack/__init__": "",
            "pack/parts": "V = 2",
            "pack/rewards": "from .parts import V\n\ndef f(completions, **_):\n    return [float(V)]\n",
        },
    )
    specs = recipe(tmp_path / "a", reward_funcs=["rewards:f", {"name": "g", "func": "pack.rewards:f"}]).rewards
    assert [spec.callable(["c"]) for spec in specs] == [[1.5], [2.0]]
    assert specs[1].function == "pack.rewards:f"


def test_a_package_whose_name_is_taken_is_read_as_files(tmp_path):
    for value, name in ((1, "a"), (2, "b")):
        write(tmp_path / name, **{"pack/__init__": "", "pack/rewards": REWARD.format(value=value)})
    found = [recipe(tmp_path / name, reward_funcs=["pack.rewards:f"]).rewards[0].callable(["c"]) for name in "ab"]
    assert found == [[1.0], [2.0]]


def test_losses_and_every_other_axis_are_found_there_too(tmp_path):
    shapes = "def loss(per_token_logps, advantages): return -{v} * per_token_logps * advantages\n"
    shapes += "def advantage(rewards): return {v} * rewards\n"
    shapes += "def total(loss, mask, totals): return {v} * (loss * mask).sum()\n"
    shapes += "def kl(log_ref_ratio): return {v} * log_ref_ratio.exp()\n"
    for value, name in ((1, "a"), (2, "b")):
        write(tmp_path / name, own=shapes.format(v=value))
        objective = recipe(
            tmp_path / name,
            loss_type="own:loss",
            advantage_estimator="./own.py:advantage",
            loss_aggregation="own.total",
            kl_estimator="own:kl",
            beta=0.1,
        ).training.objective
        assert estimators[objective.advantage](torch.ones(1, 2)).tolist() == [[value, value]]
        assert kl_estimators[objective.kl](torch.zeros(1, 1)).item() == value
        assert aggregations[objective.aggregation](torch.ones(1, 2), torch.ones(1, 2), None).item() == 2 * value


def test_an_option_that_names_a_function_is_found_there(tmp_path):
    write(tmp_path / "a", model="def s(chats):\n    return [0.25] * len(chats)\n")
    entry = {"name": "minimind", "kwargs": {"scorer": "./model.py:s", "reasoning": False}}
    [spec] = recipe(tmp_path / "a", reward_funcs=[entry]).rewards
    assert spec.callable(prompts=["?"], completions=["x"], **spec.kwargs) == [0.25]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("./rewrads.py:f", ["no such file: ", "rewrads.py", "Did you mean 'rewards.py'?"]),
        ("sub/none.py:f", ["no such file: ", "counts from the recipe's folder"]),
        ("./rewards.py:g", ["rewards.py' has no 'g'"]),
        ("./rewards.py", ["'./rewards.py' names no function. Write ./rewards.py:NAME."]),
        ("rewards.py", ["names no function"]),
        ("./broken.py:f", ["cannot import ", "broken.py:f", "SyntaxError"]),
    ],
)
def test_what_is_not_there_is_told(path, words, tmp_path):
    write(tmp_path / "a", rewards=REWARD.format(value=1), broken="def broken(:")
    for settings in ({"reward_funcs": [path]}, {"loss_type": path}):
        with pytest.raises(ConfigError) as error:
            recipe(tmp_path / "a", **settings)
        assert all(word in str(error.value) for word in words)


def test_the_record_of_a_run_holds_no_folder(tmp_path):
    write(tmp_path / "a", mine=REWARD.format(value=1))
    path = located("./mine.py:f", tmp_path / "a")
    assert path == f"{tmp_path / 'a' / 'mine.py'}:f"
    assert portable(path) == "mine:f"
    assert [portable(other) for other in ("accuracy", "a.b:f", "12:30", "")] == ["accuracy", "a.b:f", "12:30", ""]
    assert import_path(path)(["x", "y"]) == [1.0, 1.0]


def own_run(tmp_path, folder):
    """A recipe with reward and loss beside it."""
    source = "import helper\n\ndef f(completions, **_):\n    return [helper.score(c) for c in completions]\n"
    source += "def loss(per_token_logps, advantages):\n    return -per_token_logps * advantages\n"
    write(folder, mine=source, helper="def score(completion):\n    return float(len(str(completion)))\n")
    settings = {
        "model_name_or_path": tiny.save(tmp_path / "model"),
        "dataset_name": "quickstart/addition",
        "reward_funcs": ["./mine.py:f"],
        "reward_workers": 1,
        "loss_type": "mine:loss",
        "output_dir": str(tmp_path / "out"),
        **tiny.TRAINING | {"save_strategy": "steps", "save_steps": 1, "max_steps": 1},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
    return str(folder / "recipe.yaml")


@pytest.mark.slow
def test_a_run_goes_on_where_the_recipes_folder_was_moved(tmp_path):
    train(load_recipe(["--config", own_run(tmp_path, tmp_path / "first")]))
    (tmp_path / "first").rename(tmp_path / "second")
    trainer = train(load_recipe(["--config", str(tmp_path / "second" / "recipe.yaml"), "--max_steps", "2"]))
    assert [entry["rewards/f/errors"] for entry in trainer.state.log_history[:2]] == [0, 0]
    assert trainer.state.log_history[1]["rewards/f/mean"] > 0


@pytest.mark.slow
def test_processes_of_accelerate_find_it_from_another_folder(tmp_path):
    command = "-m", "grpo_ext.commands.cli", "train", "--num_processes", "2", "--config"
    run_forked(*command, own_run(tmp_path, tmp_path / "first"))
    entry, *_ = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())["log_history"]
    assert entry["rewards/f/errors"] == 0
    assert entry["rewards/f/mean"] > 0


@pytest.mark.parametrize("adapter", [{}, {"use_peft": True, "lora_target_modules": ["q_proj"]}])
def test_a_model_on_disk_is_looked_at_under_zero_3(tmp_path, monkeypatch, adapter):
    """There transformers partitions what it builds, which a model without data cannot be; parts of a model as well."""
    parameters = sum(p.numel() for p in tiny.model().parameters())
    model = {"model_name_or_path": tiny.save(tmp_path / "model"), **adapter}
    engine = SimpleNamespace(is_zero3=lambda: True)
    monkeypatch.setattr(deepspeed, "_hf_deepspeed_config_weak_ref", lambda: engine)
    preflight = Preflight()
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({**QUICK, **tiny.TRAINING, **model}))
    load_recipe(["--config", str(tmp_path / "r.yaml")], preflight)
    assert deepspeed.is_deepspeed_zero3_enabled()
    assert preflight.policy.parameters == parameters
    assert (preflight.policy.trained < parameters) == bool(adapter)
