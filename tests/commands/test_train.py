"""`python -m grpo_ext.train`: from a recipe to a saved model, resuming, refusing; real prompts of GSM8K."""

import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from grpo_ext import ConfigError
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.train import main, train
from grpo_ext.trainer.output_lock import LOCK_FILE
from support import tiny

pytestmark = pytest.mark.usefixtures("few_rows")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture
def recipe(model_path, tmp_path):
    """Write a recipe, with changes, and return the arguments that name it."""

    def write(**changes):
        values = {
            "model_name_or_path": model_path,
            "dataset_name": "quickstart/addition",
            "loss_type": "grpo",
            "reward_funcs": ["format", {"name": "tags", "weight": 0.5}, "accuracy"],
            "output_dir": str(tmp_path / "out"),
            **{k: v for k, v in tiny.TRAINING.items() if k not in ("disable_tqdm", "save_strategy")},
            "disable_tqdm": True,
            "save_steps": 2,
            "max_steps": 4,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values | changes))
        return ["--config", str(path)]

    return write


def weights(folder) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_recipe_becomes_a_saved_model(recipe, model_path, tmp_path):
    trainer = train(load_recipe(recipe()))
    assert trainer.state.global_step == 4
    assert trainer.reward_func_names == ["format", "tags", "accuracy"]
    assert trainer.reward_weights.tolist() == [1.0, 0.5, 1.0]
    saved = json.loads((tmp_path / "out" / "objective.json").read_text())
    assert saved["loss_type"] == "grpo"
    assert saved["paper"].endswith("arXiv:2402.03300")
    assert torch.equal(
        weights(tmp_path / "out"), torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    )


def test_a_run_without_memory_ends_with_2_and_one_message(recipe, capsys, monkeypatch):
    def full(*_):
        raise MemoryError("planted")

    monkeypatch.setattr("grpo_ext.train.build_trainer", full)
    with pytest.raises(SystemExit) as left:
        main(recipe())
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert "too little memory (MemoryError: planted). Halve per_device_train_batch_size" in said
    assert "Traceback" not in said


def test_a_second_call_resumes(recipe, tmp_path, capsys):
    """And ends at the very weights of a run that was never stopped."""
    model = tiny.save(tmp_path / "model", dtype=torch.float64, max_position_embeddings=1024)
    steady = {"model_name_or_path": model, "dtype": "auto", "lr_scheduler_type": "constant"}
    steady |= {"reward_funcs": [{"name": "spread", "func": "support.tiny:spread"}], "reward_workers": 0}
    whole = train(load_recipe(recipe(**steady, output_dir=str(tmp_path / "whole"))))
    train(load_recipe(recipe(**steady, max_steps=2)))
    trainer = train(load_recipe(recipe(**steady, max_steps=4)))
    assert "Resuming from" in capsys.readouterr().out
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3, 4]
    assert whole.state.log_history[0]["grad_norm"] > 0
    assert weights(tmp_path / "out").dtype == torch.float64
    torch.testing.assert_close(weights(tmp_path / "out"), weights(tmp_path / "whole"), rtol=0, atol=1e-9)


def contents(folder) -> dict[str, tuple[int, bytes]]:
    """Each file but the lock, with when it was written and what it holds."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != LOCK_FILE]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


STEADY = {"reward_funcs": [{"name": "spread", "func": "support.tiny:spread"}], "reward_workers": 0}


def test_a_run_is_finished_repaired_prolonged_refused_and_restarted(recipe, tmp_path, capsys, caplog):
    """Finished, asked again, its model lost, prolonged, refused, and begun afresh."""
    out = tmp_path / "out"
    train(load_recipe(recipe(**STEADY, max_steps=2, save_steps=1)))
    done, model = contents(out), weights(out)
    assert json.loads((out / "finished.json").read_text())["step"] == 2
    capsys.readouterr()

    assert train(load_recipe(recipe(**STEADY, max_steps=2, save_steps=1))) is None
    assert train(load_recipe(recipe(**STEADY, max_steps=2, save_steps=5))) is None
    said = capsys.readouterr().out
    assert "This run is finished: 2 steps, model in" in said
    assert "Changed since: save_steps 1 -> 5." in said
    assert "Loading weights" not in said
    assert contents(out) == done

    for lost in ("finished.json", "model.safetensors"):  # as after a kill between the last checkpoint and the model
        (out / lost).unlink()
        trainer = train(load_recipe(recipe(**STEADY, max_steps=2, save_steps=1)))
        assert trainer.state.global_step == 2
        assert torch.equal(weights(out), model)
        assert sorted(contents(out)) == sorted(done)
    assert [name for name in done if name.startswith("checkpoint")] == [
        name for name, content in contents(out).items() if name.startswith("checkpoint") and content == done[name]
    ]

    with pytest.raises(ConfigError, match=r"rate: .* loss_type: 'grpo' there, 'dr_grpo' here\. .*another output_dir"):
        train(load_recipe(recipe(**STEADY, max_steps=2, loss_type="dr_grpo", learning_rate=0.5)))
    with pytest.raises(ConfigError, match=r"out: it is of another run: dataset_name: .*seed: 7 there, 8 here"):
        train(load_recipe(recipe(**STEADY, max_steps=3, seed=8, dataset_name="quickstart/guess")))
    with pytest.raises(ConfigError, match=r"max_steps=1: .*checkpoint-2 is already beyond it"):
        train(load_recipe([*recipe(**STEADY, max_steps=1), "--resume_from_checkpoint", str(out / "checkpoint-2")]))

    trainer = train(load_recipe(recipe(**STEADY, max_steps=3, save_steps=1)))
    assert trainer.state.global_step == json.loads((out / "finished.json").read_text())["step"] == 3
    assert "The learning-rate schedule runs to the new end" in caplog.text

    prolonged = contents(out)
    (out / "mine.txt").write_text("a note")
    train(load_recipe([*recipe(**STEADY, max_steps=1, save_steps=1), "--resume_from_checkpoint", "never"]))
    said = capsys.readouterr().out
    (aside,) = out.glob("_before-*")
    assert f"The run that was in {out} is now in {aside}." in said
    assert set(contents(aside)) == set(prolonged)
    names = {path.name for path in out.iterdir()}
    assert {"checkpoint-1", "finished.json", "model.safetensors", "mine.txt"} <= names
    assert "checkpoint-2" not in names
    trainer = train(load_recipe(recipe(**STEADY, max_steps=2, save_steps=1)))
    assert trainer.state.global_step == 2
    assert f"Resuming from {out / 'checkpoint-1'}" in capsys.readouterr().out


def test_a_finished_run_without_checkpoints_is_not_overwritten(recipe, tmp_path):
    train(load_recipe(recipe(**STEADY, max_steps=1, save_strategy="no")))
    with pytest.raises(ConfigError, match="finished there at step 1, and it left no checkpoint to resume from"):
        train(load_recipe(recipe(**STEADY, max_steps=2, save_strategy="no")))
    (tmp_path / "out" / "generation_config.json").write_text("{}")  # by hand
    with pytest.raises(ConfigError, match="finished there at step 1, and it left no checkpoint to resume from"):
        train(load_recipe(recipe(**STEADY, max_steps=1, save_strategy="no")))


def test_another_model_of_the_same_shape_is_refused(recipe, tmp_path):
    model = tiny.save(tmp_path / "model", max_position_embeddings=1024)
    train(load_recipe(recipe(**STEADY, model_name_or_path=model, max_steps=1)))
    tiny.save(tmp_path / "model", seed=1, max_position_embeddings=1024)
    with pytest.raises(ConfigError, match=r"model: 'folder .* there, 'folder .* here"):
        train(load_recipe(recipe(**STEADY, model_name_or_path=model, max_steps=2)))


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["grpo", "beta_bnpo"])
def test_ten_steps_on_gsm8k(loss_type, gsm8k, recipe, tmp_path):
    """Real prompts with all rewards; the BNPO paper's estimator needs each reward's own range to be [0, 1]."""
    rewards = ["accuracy", "format", "tags"]
    if loss_type == "grpo":
        rewards.append({"name": "minimind", "weight": 0.5})
    arguments = recipe(
        loss_type=loss_type,
        reward_funcs=rewards,
        dataset_name=str(gsm8k / "train.jsonl"),
        prompt_column="question",
        answer_column="answer",
        answer_format="gsm8k",
        system_prompt="think first.",
        max_samples=64,
        max_prompt_length=700,
        max_steps=10,
        save_strategy="no",
    )
    trainer = train(load_recipe(arguments))
    assert trainer.state.global_step == 10
    row = trainer.train_dataset[0]
    assert row["prompt"][0] == {"role": "system", "content": "think first."}
    assert row["solution"].lstrip("-").isdigit()
    entries = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(entries) == 10
    assert all(f"rewards/{name}/mean" in entries[0] for name in trainer.reward_func_names)
