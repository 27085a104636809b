"""`grpo-ext` for a newcomer: help, lists, a first project."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo_ext import __version__
from grpo_ext.commands import env
from grpo_ext.commands.arguments import COMMANDS
from grpo_ext.objective.losses import losses
from grpo_ext.recipe.files import packaged_recipes
from grpo_ext.recipe.parsing import all_keys, load_recipe
from grpo_ext.recipe.parts import subjects
from grpo_ext.rewards.catalogue import rewards
from support.commands import command
from support.processes import PATIENCE

ROOT = Path(__file__).parents[2]


@pytest.fixture
def said(capsys):
    """Run a command; return its exit code, stdout and stderr."""

    def run(*argv) -> tuple[int, str, str]:
        return command(*argv), *capsys.readouterr()

    return run


def test_help_lists_all_commands_in_groups(said):
    code, out, _ = said("--help")
    assert code == 0
    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert [line for line in out.splitlines() if line.endswith(":")] == [
        "Getting started:", "Training:", "After training:", "Reference:"
    ]  # fmt: skip
    assert out.count("\n") < 40
    assert said()[0] == 2
    for name, entry in COMMANDS.items():
        assert callable(importlib.import_module(f"grpo_ext.commands.{entry.module or name}").run)
        code, out, _ = said(name, "--help")
        assert (code, f"usage: grpo-ext {name} " in out, out.count("\n") < 30) == (0, True, True)


def test_a_wrong_command_suggests_the_right_one(said):
    code, out, err = said("chek", "--config", "x")
    assert (code, out, err) == (2, "", "grpo-ext: no command 'chek'. Did you mean 'check'?\n")
    assert "docs/migrating.md" in said("migrate", "config.yaml")[2]


def test_help_all_lists_each_key_once(said):
    found = [f.name for fields in subjects().values() for f in fields]
    assert sorted(found) == all_keys()
    assert next(iter(subjects().values()))[0].name == "loss_type"
    assert said("train", "--help-all")[1].count("\n  --") == len(found)


def test_the_lists_are_complete(said):
    assert said("--version")[1] == f"grpo-ext {__version__}\n"
    out = said("losses")[1]
    assert all(row.formula in out and row.paper in out for row in losses.values())
    assert "grpo, deepseek_math\n" in out
    out = said("rewards")[1]
    names = {name for line in out.splitlines() if not line.startswith(" ") for name in line.split(", ")}
    assert names == set(rewards)
    assert "columns: solution" in out
    assert "style='think_answer'" in out
    assert "max_length (must be set)" in out
    assert [line.split()[0] for line in said("recipes")[1].splitlines()] == list(packaged_recipes())


def test_env_names_no_host_user_or_folder(said, monkeypatch):
    monkeypatch.setattr(env, "GPUS", ("echo", "H200, 143771 MiB, 570.1"))
    out = said("env")[1]
    for name in ("grpo-ext", "python", "torch", "trl", "transformers", "accelerate", "peft", "system", "CPU"):
        assert f"\n{name} " in f"\n{out}"
    assert "H200, 143771 MiB" in out
    private = [os.uname().nodename, str(Path.home()), os.environ.get("USER", "-no-user-"), str(ROOT), sys.prefix]
    assert [text for text in private if len(text) > 4 and text in out] == []


def test_a_closed_pipe_is_not_an_error():
    for unbuffered in ("", "1"):
        line = f"{sys.executable} -m grpo_ext rewards | head -1"
        done = subprocess.run(
            line, shell=True, capture_output=True, text=True, timeout=PATIENCE,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
        assert (done.stdout, done.stderr) == ("accuracy\n", "")


def test_a_command_prints_its_own_lines_only(tmp_path):
    line = [sys.executable, "-m", "grpo_ext", "report", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("1 problem in the configuration:")
    assert len(done.stderr.splitlines()) == 2


# A project to begin with.


def test_a_new_project_passes_check_and_its_tests(said, tmp_path, monkeypatch):
    folder = tmp_path / "deep" / "mine"
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--of-a-folder-above"\n')
    code, out, _ = said("new", str(folder))
    assert code == 0
    assert f"cd {folder}" in out
    laid = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert laid == ["README.md", "data/questions.csv", "pytest.ini", "recipe.yaml", "rewards.py", "test_rewards.py"]
    monkeypatch.chdir(folder)
    recipe = load_recipe(["--config", "recipe.yaml"])
    assert [spec.name for spec in recipe.rewards] == ["accuracy", "format", "digits"]
    own = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(own, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert "6 passed" in done.stdout, done.stdout


@pytest.mark.parametrize(("name", "told"), [("full", "not empty: it holds 'mine.txt'"), ("file", "it is a file")])
def test_new_overwrites_no_file(name, told, said, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    code, _, err = said("new", str(tmp_path / name))
    assert code == 2
    assert told in err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]
    assert (tmp_path / "file").read_text() == "mine"
    assert said("new")[0] == said("new", "--force")[0] == 2
    (tmp_path / "empty").mkdir()
    assert said("new", str(tmp_path / "empty"))[0] == 0


@pytest.mark.slow
def test_the_notebook_runs(quickstart_model, tmp_path, monkeypatch, capsys):
    """Its cells one after the other, as a kernel runs them, with 4 steps for 40; what is drawn is not seen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr("grpo_ext.trainer.setup.ensure_once", lambda _: quickstart_model)
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    names: dict = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        shorter = cell.replace("max_steps=40", "max_steps=4").replace("logging_steps=4", "logging_steps=2")
        exec(compile(shorter, f"cell {number}", "exec"), names)
    out = capsys.readouterr().out
    assert "step 4/4   trained in" in out
    assert list(names["log"].index) == [2, 4]
    assert names["trainer"].reward_func_names == ["accuracy", "format", "carries"]


BY_TURN = """
def by_turn(trajectory, **_):
    return [[turn.reward for turn in one.turns] for one in trajectory]
"""
"""The example of docs/environments.md, "Trajectories"."""


@pytest.mark.parametrize(("changed", "code", "twice"), [({}, 0, True), ({"weight": 0.0}, 0, False), (None, 2, False)])
def test_a_reward_by_turn_is_accepted_beside_environments(changed, code, twice, tmp_path, monkeypatch, said):
    (tmp_path / "turns.py").write_text(BY_TURN)
    recipe = yaml.safe_load((ROOT / "recipes/quickstart/guess.yaml").read_text())
    game = recipe.pop("environments")[0]
    recipe["reward_funcs"] = ["./turns.py:by_turn"]
    if changed is not None:
        recipe["environments"] = [game | changed]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
    found, out, err = said("check", "--config", "recipe.yaml")
    assert (found, "counts twice" in " ".join(out.split())) == (code, twice), err
    assert ("no column 'trajectory'" in err) == (code == 2)
