"""A recipe with a mixture of datasets and a reward whose weight moves: stopped after any step, and gone back with."""

import shutil

import pytest
import torch
import yaml

from grpo_ext.errors import NOT_FINISHED, RunInterrupted
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.train import train
from support import tiny
from support.interrupted import logged
from support.trainers import weights


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

    def write(kind: str, output: str, **changes) -> list[str]:
        moving = {
            "name": "spread",
            "func": "support.interrupted:spread",
            "weight_schedule": {"kind": "linear", "to": 0.2},
        }
        values = tiny.TRAINING | {
            "model_name_or_path": str(folder),
            "reward_funcs": [moving, {"name": "again", "func": "support.interrupted:spread_until_told"}],
            "reward_workers": 0,
            "steps_per_generation": 2,
            "logging_steps": 2,
            "max_steps": 6,
            "save_strategy": "steps",
            "save_steps": 1,
            "output_dir": str(tmp_path / output),
        }
        path = tmp_path / f"{output}.yaml"
        path.write_text(yaml.safe_dump(values | data[kind] | changes))
        return ["--config", str(path)]

    return write


@pytest.mark.cases(1)
@pytest.mark.parametrize(("kind", "step"), [("mixture", 4), ("stream", 1)])
def test_a_stopped_run_ends_at_the_same_bits(kind, step, recipe, tmp_path):
    whole = train(load_recipe(recipe(kind, "whole")))
    assert all(row["grad_norm"] > 0 for row in whole.state.log_history if "grad_norm" in row)
    (tmp_path / "stopped").mkdir()
    shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", tmp_path / "stopped" / f"checkpoint-{step}")
    assert same(train(load_recipe(recipe(kind, "stopped"))), whole)


def same(a, b) -> bool:
    return logged(a) == logged(b) and torch.equal(weights(a.model), weights(b.model))


def steps(out) -> list[str]:
    return sorted(path.name for path in out.glob("checkpoint-*"))


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_resumed_from_an_earlier_checkpoint_keeps_it(limit, recipe, tmp_path, monkeypatch, capsys):
    """A finished run, gone back with to its second step and told to end in its third; the plain command then."""
    out = tmp_path / "run"
    whole = train(load_recipe(recipe("mixture", "run")))
    argv = recipe("mixture", "run", save_total_limit=limit)
    monkeypatch.setenv("TOLD_IN_STEP", "3")
    with pytest.raises(RunInterrupted, match=r"saved checkpoint-3 .* Run the same command to resume\."):
        train(load_recipe([*argv, "--resume_from_checkpoint", str(out / "checkpoint-2")]))
    monkeypatch.delenv("TOLD_IN_STEP")
    assert steps(out) == [f"checkpoint-{i}" for i in ((3,) if limit else (1, 2, 3))]
    [aside] = out.glob("_before-*")
    assert steps(aside) == [f"checkpoint-{i}" for i in (3, 4, 5, 6)]
    assert {"finished.json", "model.safetensors", "metrics.jsonl"} <= {path.name for path in aside.iterdir()}
    capsys.readouterr()
    resumed = train(load_recipe(argv))
    assert f"Resuming from {out / 'checkpoint-3'}" in capsys.readouterr().out
    assert same(resumed, whole)


@pytest.mark.slow
def test_a_requeued_job_finishes(recipe, tmp_path, monkeypatch, capsys):
    """SLURM starts the same command again on 75; rotation deletes the checkpoint that the command names."""
    whole = train(load_recipe(recipe("mixture", "run")))
    argv = recipe("mixture", "run", save_total_limit=1)
    argv += ["--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-2")]
    monkeypatch.setenv("TOLD_IN_STEP", "3 5")
    for _ in range(2):
        with pytest.raises(RunInterrupted) as stopped:
            train(load_recipe(argv))
        assert stopped.value.code == NOT_FINISHED
    ended = train(load_recipe(argv))
    assert same(ended, whole)
    assert train(load_recipe(argv)) is None
    said = capsys.readouterr().out
    assert "This run is finished: 6 steps" in said
    assert "carried out by an earlier command: the run resumes" in said
    assert len(list((tmp_path / "run").glob("_before-*"))) == 1


@pytest.mark.slow
def test_a_restarted_run_evaluates_again(recipe, tmp_path):
    """Its samples are kept for a killed evaluation of the same run and step, by the same names."""
    sets = {"eval_sets": [{"name": "held", "dataset_name": str(tmp_path / "b.jsonl"), "every": 1, "limit": 4}]}
    settings = sets | {"max_steps": 2, "temperature": 1.0}
    train(load_recipe(recipe("mixture", "run", **settings)))
    for output, asked in (("run", ["--resume_from_checkpoint", "never"]), ("other", [])):
        train(load_recipe([*recipe("mixture", output, **settings, learning_rate=0.3), *asked]))
    [aside] = (tmp_path / "run").glob("_before-*")
    old, new, other = (
        (folder / "evaluation" / "held" / "step_2_samples.jsonl").read_text().splitlines()[1:]
        for folder in (aside, tmp_path / "run", tmp_path / "other")
    )
    assert old != new == other
