"""A checkpoint is whole or not there: killed at any file operation, on a full disk, in place of a damaged one."""

import json
import os
import resource
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import transformers
from transformers import TrainerCallback

import tiny
from grpo_ext import ConfigError, GRPOExtConfig, GRPOExtTrainer
from grpo_ext.errors import SaveError
from grpo_ext.trainer.checkpoints.choice import newest_sound, numbered
from grpo_ext.trainer.checkpoints.manifest import MANIFEST, damage, files_in, seal
from grpo_ext.trainer.checkpoints.writing import SAVING, put_in_place, recover, remove_if_empty, rotate
from trainers import build

STEPS = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def checkpoint(folder: Path, step: int, sealed: bool = True, name: str | None = None) -> Path:
    """A folder with a few files, one of them in a folder of its own."""
    path = folder / (name or f"checkpoint-{step}")
    (path / "shards").mkdir(parents=True)
    for file in ("model.safetensors", "optimizer.pt", "shards/0.distcp"):
        (path / file).write_text(f"{file} of step {step}" * 9)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    if sealed:
        seal(path, step=step)
    return path


def save(out: Path, step: int, limit: int | None = None) -> None:
    """What the trainer does when a checkpoint's files have been written."""
    folder, final = out / SAVING / f"checkpoint-{step}", out / f"checkpoint-{step}"
    seal(folder, step=step)
    put_in_place(folder, final)
    rotate(final, limit, None)
    remove_if_empty(folder.parent)


# Killed.


def killed_at(operation: int, action) -> bool:
    """Run in a child that dies before its n-th file operation; whether it died."""
    child = os.fork()
    if child == 0:
        left = [operation]

        def count(event, _):
            if event in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate"):
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)

        sys.addaudithook(count)
        action()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("there", "limit"),
    [([1, 2], 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (([1], 1), ([1, 2, 3], 1), ([2], None)))],
)
def test_killed_at_any_file_operation_of_a_save(there, limit, tmp_path):
    """Before it, the elder ones are sound; after it, the new one; nothing half is ever seen, nothing stays behind."""
    last = max(there)
    for operation in range(1, 500):
        out = tmp_path / str(operation)
        for step in there:
            checkpoint(out, step)
        checkpoint(out / SAVING, last + 1, sealed=False)
        died = killed_at(operation, lambda out=out: save(out, last + 1, limit))
        for path in numbered(out):
            assert damage(path) == [], (operation, path)
        assert numbered(out)
        recover(out)
        assert newest_sound(out) in (str(out / f"checkpoint-{last}"), str(out / f"checkpoint-{last + 1}"))
        assert not (out / SAVING).exists()
        if not died:
            break
    assert operation > 10
    assert newest_sound(out) == str(out / f"checkpoint-{last + 1}")
    assert len(numbered(out)) == min(limit or 9, len(there) + 1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_while_a_damaged_checkpoint_is_replaced(tmp_path):
    for operation in range(1, 500):
        out = tmp_path / str(operation)
        checkpoint(out, 1)
        (checkpoint(out, 2) / "optimizer.pt").unlink()
        checkpoint(out / SAVING, 2, sealed=False)
        died = killed_at(operation, lambda out=out: save(out, 2))
        recover(out)
        assert newest_sound(out) in (str(out / "checkpoint-1"), str(out / "checkpoint-2"))
        if not died:
            break
    assert newest_sound(out) == str(out / "checkpoint-2")
    assert names(out) == ["checkpoint-1", "checkpoint-2"]


def test_a_sealed_checkpoint_that_was_not_yet_renamed_counts(tmp_path):
    checkpoint(tmp_path, 1)
    checkpoint(tmp_path / SAVING, 2)
    checkpoint(tmp_path / SAVING, 3, sealed=False)
    recover(tmp_path)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert damage(tmp_path / "checkpoint-2") == []


# Rotation.


def test_rotation_spares_the_newest_the_best_and_what_has_another_name(tmp_path):
    for step in (1, 2, 3, 4, 5):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 0, name="checkpoint-old")
    checkpoint(tmp_path, 8, name="checkpoint-8.bak")
    (tmp_path / "checkpoint-9").write_text("a file")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoint-10").symlink_to(tmp_path / "elsewhere")
    rotate(tmp_path / "checkpoint-5", 1, str(tmp_path / "checkpoint-2"))
    left = ["checkpoint-10", "checkpoint-2", "checkpoint-5", "checkpoint-8.bak", "checkpoint-9", "checkpoint-old"]
    assert [name for name in names(tmp_path) if name.startswith("checkpoint")] == left


def test_rotation_takes_what_is_damaged_first(tmp_path):
    for step in (1, 2, 3):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-2" / "optimizer.pt").unlink()
    rotate(tmp_path / "checkpoint-3", 2, None)
    assert [path.name for path in numbered(tmp_path)] == ["checkpoint-3", "checkpoint-1"]


def test_rotation_goes_by_when_they_were_written(tmp_path):
    """A run that was begun anew in the same folder does not lose its own to an elder run's of more steps."""
    for step in (50, 100, 2, 4):
        checkpoint(tmp_path, step)
    rotate(tmp_path / "checkpoint-4", 2, None)
    assert [path.name for path in numbered(tmp_path)] == ["checkpoint-4", "checkpoint-2"]


# A whole trainer.


def test_a_checkpoint_holds_ours_and_trls_and_nothing_stays_aside(model_path, tmp_path):
    build(model_path, tmp_path, max_steps=3, save_total_limit=2, **STEPS).train()
    assert [path.name for path in numbered(tmp_path)] == ["checkpoint-3", "checkpoint-2"]
    assert not (tmp_path / SAVING).exists()
    manifest = json.loads((tmp_path / "checkpoint-3" / MANIFEST).read_text())
    assert manifest["step"] == 3
    assert set(manifest["files"]) == set(files_in(tmp_path / "checkpoint-3"))
    for name in ("run_state_0.pt", "objective.json", "recipe.json", "optimizer.pt", "model.safetensors"):
        assert manifest["files"][name]["size"] == (tmp_path / "checkpoint-3" / name).stat().st_size


class At(TrainerCallback):
    """Does something after a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


@contextmanager
def room_restored():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("fails", ["model.safetensors", "optimizer.pt"])
def test_a_full_disk_leaves_the_elder_ones_and_says_so(fails, model_path, tmp_path):
    """No file may grow beyond a size that the named one would have: as on a full disk, writing ends in the middle."""
    out = tmp_path / "out"
    first = build(model_path, out, max_steps=1, **STEPS)
    first.train()
    limit = (out / "checkpoint-1" / fails).stat().st_size - 1000
    trainer = build(model_path, out, max_steps=3, **STEPS)
    with room_restored() as room:
        trainer.add_callback(At(2, lambda: room(limit)))
        with pytest.raises(SaveError, match=r"checkpoint-2 could not be written .*GB free.*Untouched: checkpoint-1\."):
            trainer.train(resume_from_checkpoint=True)
    assert [path.name for path in numbered(out)] == ["checkpoint-1"]
    assert not (out / SAVING).exists()
    again = build(model_path, out, max_steps=3, **STEPS)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3
    assert [path.name for path in numbered(out)] == ["checkpoint-3", "checkpoint-2", "checkpoint-1"]


def test_an_output_dir_that_is_no_folder_any_more(model_path, tmp_path):
    out = tmp_path / "out"

    def turn_into_a_file():
        shutil.rmtree(out)
        out.write_text("")

    trainer = build(model_path, out, max_steps=1, **STEPS)
    trainer.add_callback(At(1, turn_into_a_file))
    with pytest.raises(SaveError, match=r"checkpoint-1 could not be written .*No checkpoint was there before"):
        trainer.train()


def test_a_damaged_checkpoint_is_written_anew(model_path, tmp_path, caplog):
    build(model_path, tmp_path, max_steps=2, **STEPS).train()
    (tmp_path / "checkpoint-2" / "optimizer.pt").write_bytes(b"")
    trainer = build(model_path, tmp_path, max_steps=2, **STEPS)
    trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-2 is damaged: optimizer.pt has 0 bytes" in caplog.text
    assert damage(tmp_path / "checkpoint-2") == []
    assert names(tmp_path) == ["README.md", "checkpoint-1", "checkpoint-2", "metrics.jsonl"]


def test_the_best_checkpoint_is_known_by_its_final_name(model_path, tmp_path):
    """And is spared, and so is the last one, which transformers deletes before the model has been saved."""
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    limits = {"max_steps": 3, "save_total_limit": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "num_tokens", "greater_is_better": False}
    args = GRPOExtConfig(str(tmp_path), **(tiny.TRAINING | STEPS | evaluation | best | limits))
    data = {"train_dataset": tiny.prompts(16), "eval_dataset": tiny.prompts(2)}
    trainer = GRPOExtTrainer(model_path, [tiny.count_a], args, processing_class=tiny.tokenizer(), **data)
    trainer.train()
    at_best = tmp_path / f"checkpoint-{trainer.state.best_global_step}"
    assert trainer.state.best_global_step < 3
    assert trainer.state.best_model_checkpoint == str(at_best)
    assert json.loads((at_best / "trainer_state.json").read_text())["best_model_checkpoint"] == str(at_best)
    assert [path.name for path in numbered(tmp_path)] == ["checkpoint-3", at_best.name]
    assert damage(at_best) == damage(tmp_path / "checkpoint-3") == []


def test_the_hub_is_sent_what_has_its_final_name(model_path, tmp_path, monkeypatch):
    """Files are read in the background, long after a folder aside would have been renamed."""
    sent = []
    monkeypatch.setattr(
        transformers.Trainer, "_push_from_checkpoint", lambda _, folder: sent.append((folder, damage(Path(folder))))
    )
    trainer = build(model_path, tmp_path, max_steps=2, **STEPS)
    trainer.add_callback(At(1, lambda: setattr(trainer.args, "push_to_hub", True)))
    trainer.train()
    assert sent == [(str(tmp_path / f"checkpoint-{step}"), []) for step in (1, 2)]


def test_weights_alone_are_not_gone_on_from(model_path, tmp_path):
    build(model_path, tmp_path, max_steps=1, save_only_model=True, **STEPS).train()
    with pytest.raises(ConfigError, match=r"holds weights alone \(save_only_model\)"):
        build(model_path, tmp_path, max_steps=2, **STEPS).train(resume_from_checkpoint=True)
