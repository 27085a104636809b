"""Batches as they were recorded: computed again under any loss, refused where they do not fit."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig

from grpo_ext.commands import replay
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.errors import ConfigError
from grpo_ext.trainer import recording
from grpo_ext.trainer.one_step import block_of, check_credit
from grpo_ext.trainer.recording import read, runs_of, whole
from support import tiny
from support.commands import command
from support.pure import objective
from support.trainers import build, scripted_rollout, weights

SETTINGS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "max_steps": 3,
    "learning_rate": 0.02,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_only_model": True,
    "record_batches": 1,
    "loss_type": "grpo",
}
"""Windows of two steps of two micro-batches, of which the third step begins a second one."""


def recorded(model_path, folder, **settings):
    trainer = build(model_path, folder, rollout=scripted_rollout, rows=64, **(SETTINGS | settings))
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def run(model_path, tmp_path_factory):
    """A run that has recorded all of its steps, and its log."""
    folder = tmp_path_factory.mktemp("run")
    trainer = recorded(model_path, folder)
    return folder, [row for row in trainer.state.log_history if "loss" in row]


def again(step_folder, **changes):
    contents = whole(step_folder)
    return replay.compute(contents, replay.recorded_weights(step_folder, contents[0]), changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "dapo", "beta": 0.1, "num_iterations": 2},
        {"loss_type": "gspo", "entropy_coef": 0.01},
        {"loss_type": "bnpo", "loss_defaults": "trl"},
        {"loss_type": "rloo", "beta": 0.1},
    ],
    ids=lambda settings: settings["loss_type"],
)
def test_the_loss_is_the_one_that_the_run_logged(settings, model_path, tmp_path):
    trainer = recorded(model_path, tmp_path, max_steps=2, **settings)
    row, folder = trainer.state.log_history[1], tmp_path / "batches" / "step_2"
    found = again(folder)
    assert found.loss == pytest.approx(replay.recorded(whole(folder))["loss"], rel=1e-6)
    assert found.loss == pytest.approx(row["loss"], rel=1e-5, abs=1e-7)
    assert found.grad_norm == pytest.approx(row["grad_norm"], rel=1e-5)
    for name in found.figures:
        assert found.figures[name] == pytest.approx(row[name], rel=1e-5, abs=1e-7), name


@pytest.mark.slow
def test_an_adapter_is_computed_again_from_its_checkpoint(model_path, tmp_path, capsys):
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    trainer = recorded(model_path, tmp_path, max_steps=2, peft_config=adapter)
    found = again(tmp_path / "batches" / "step_2")
    assert found.grad_norm == pytest.approx(trainer.state.log_history[1]["grad_norm"], rel=1e-5)
    assert list(found.blocks) == ["layers.0", "layers.1"]
    assert command("replay", tmp_path / "batches" / "step_1") == 2
    assert "the adapter at its initialization is not on the disk" in capsys.readouterr().err


def test_under_another_loss_it_is_what_that_loss_would_have_been(run, model_path, tmp_path):
    """dr_grpo makes other advantages of the same rewards, and has other denominators."""
    folder, log = run
    other = recorded(model_path, tmp_path, max_steps=1, loss_type="dr_grpo").state.log_history[0]
    found = again(folder / "batches" / "step_1", loss_type="dr_grpo")
    assert other["grad_norm"] != pytest.approx(log[0]["grad_norm"], rel=0.01)
    assert found.grad_norm == pytest.approx(other["grad_norm"], rel=1e-5)
    assert found.loss == pytest.approx(other["loss"], rel=1e-5, abs=1e-7)


def test_replay_prints_and_writes_the_step(run, tmp_path, capsys):
    folder = run[0] / "batches" / "step_2"
    output = tmp_path / "step.json"
    assert command("replay", folder, "--loss_type", "cispo", "--beta=0", "--output", output) == 0
    out = capsys.readouterr().out
    assert "The loss is that of the run" in out
    assert "cispo(epsilon_high=5.0)" in out
    content = json.loads(output.read_text())
    there, here = content["recorded loss"], content["changed"]
    norms = torch.tensor(list(there["blocks"].values()))
    assert list(there["blocks"]) == ["embed_tokens", "layers.0", "layers.1", "norm", "lm_head"]
    assert norms.norm().item() == pytest.approx(there["grad_norm"], rel=1e-5)
    assert there["grad_norm"] != pytest.approx(here["grad_norm"], rel=0.01)
    kept = read(folder / "rank_0.pt")["micro_batches"]
    assert len(there["tokens"]) == sum(int(batch["completion_mask"].sum()) for batch in kept)
    token = there["tokens"][0]
    cut = min(max(token["ratio"], 0.8), 1.2)
    assert token["term"] == pytest.approx(
        -min(token["ratio"] * token["advantage"], cut * token["advantage"]), rel=1e-4
    )
    assert any(abs(token["ratio"] - 1) > 1e-3 for token in there["tokens"])  # the window's second step
    assert content["texts"][str(token["id"])].strip() == tiny.WORDS[token["id"]].strip()


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        ("--losstype: no setting has this name. Did you mean", ["--losstype", "grpo"]),
        ("learning_rate: the loss of a recorded step does not depend on it", ["--learning_rate", "1"]),
        ("the recorded run had no reference (beta 0)", ["--beta", "0.1"]),
        slow("it needs more than this batch's rewards. Keep the recorded", ["--loss_type", "reinforce_pp_baseline"]),
        slow("it needs the rewards of the whole generation, and this step is", ["--advantage_estimator", "batch"]),
        ("its token", ["--model", "{other}"]),
        ("no such folder", ["--model", "{run}/nowhere"]),
        ("unknown format", ["--output", "step.txt"]),
    ],
)
def test_options_that_do_not_fit_the_recording_are_refused(words, argv, run, tmp_path, capsys):
    other = tmp_path / "other"
    if "{other}" in argv:
        tiny.model().save_pretrained(other)
        shuffled = tiny.tokenizer()
        shuffled.backend_tokenizer.model = type(shuffled.backend_tokenizer.model)(
            {word: i for i, word in enumerate([*tiny.WORDS[:3], *reversed(tiny.WORDS[3:])])}, unk_token="<unk>"
        )
        shuffled.save_pretrained(other)
    argv = [word.format(run=run[0], other=other) for word in argv]
    assert command("replay", run[0] / "batches" / "step_2", *argv) == 2
    assert words.format(run=run[0]) in capsys.readouterr().err


def test_damaged_or_foreign_recordings_are_refused(run, tmp_path, capsys):
    def damaged(name, change):
        folder = tmp_path / name / "batches" / "step_2"
        shutil.copytree(run[0] / "batches" / "step_2", folder)
        change(folder / "rank_0.pt")
        return folder

    def flip(path):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    def rewrite(**changed):
        return lambda path: torch.save(torch.load(path) | changed, path)

    cases = {
        "cut": (lambda path: path.write_bytes(path.read_bytes()[:5000]), "is damaged, or not a recorded batch"),
        "flipped": (flip, "is damaged"),
        "text": (lambda path: path.write_text("no"), "is damaged, or not a recorded batch"),
        "later": (rewrite(format=9), "has format 9, and grpo-ext"),
        "else": (lambda path: torch.save([1], path), "is not a recorded batch"),
        "two": (rewrite(processes=2), "lacks rank_1.pt: 2 processes have recorded"),
        "rewards": (rewrite(micro_batches=[]), "a reward gave NaN or inf, from before the batch was formed"),
        "moved": (lambda path: None, "the weights before step 2 were not kept"),
        "gone": (lambda path: path.unlink(), "the folder holds no recorded batch"),
    }
    for name, (change, words) in cases.items():
        folder = damaged(name, change)
        argv = ["--model", str(run[0] / "checkpoint-1")] if name == "rewards" else []
        assert command("replay", folder, *argv) == 2, name
        assert words in capsys.readouterr().err, name
    assert command("replay", run[0]) == 2
    assert "the folder holds the steps 1, 2, 3. Name one" in capsys.readouterr().err


def test_training_on_recordings_is_gone():
    with pytest.raises(ConfigError, match=r"replay_batches='there': it is gone: .*`grpo-ext replay` computes one"):
        GRPOExtConfig("out", replay_batches="there")


def test_recorded_advantages_of_tokens_are_not_averaged_over_a_completion():
    of_tokens, of_completions = {"advantages": torch.ones(2, 3)}, {"advantages": torch.ones(2)}
    with pytest.raises(ConfigError, match="loss_type='gmpo': the recorded advantages differ by token"):
        check_credit(objective("gmpo"), [of_tokens])
    check_credit(objective("gmpo"), [of_completions])
    check_credit(objective("gspo"), [of_tokens])


def test_it_is_recorded_every_nth_step_from_the_first_and_never_fills_the_disk(
    model_path, tmp_path, monkeypatch, caplog
):
    trainer = recorded(model_path, tmp_path / "a", record_batches=2, save_strategy="no")
    assert sorted(path.name for path in (tmp_path / "a" / "batches").iterdir()) == ["step_1", "step_3"]
    content = read(tmp_path / "a" / "batches" / "step_1" / "rank_0.pt")
    places = sum(batch["completion_ids"].numel() for batch in content["micro_batches"])
    assert recording.size(content) / places < 40
    monkeypatch.setattr(recording, "RESERVE", 2**70)
    full = recorded(model_path, tmp_path / "b", save_strategy="no")
    assert "could not be recorded (it needs" in caplog.text
    assert not list((tmp_path / "b" / "batches").iterdir())
    assert torch.equal(weights(trainer.model), weights(full.model))


def test_parts_of_a_character_stay_in_one_run():
    assert runs_of([1, 2, 3, 4, 2], {2, 3}) == [(1,), (2, 3), (4,), (2,)]


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.3.mlp.up_proj.weight", "layers.3"),
        ("base_model.model.model.layers.11.self_attn.q_proj.lora_A.default.weight", "layers.11"),
        ("transformer.h.0.ln_1.bias", "h.0"),
        ("model.embed_tokens.weight", "embed_tokens"),
    ],
)
def test_blocks(name, block):
    assert block_of(name) == block
