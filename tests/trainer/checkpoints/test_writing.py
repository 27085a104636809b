"""A checkpoint is complete or absent: after a kill at any file operation, on a full disk, replacing a damaged one."""

import errno
import json
import os
import resource
import shutil
import stat
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from transformers import TrainerCallback

from grpo_ext import ConfigError, GRPOExtConfig, GRPOExtTrainer
from grpo_ext.errors import SaveError
from grpo_ext.trainer.checkpoints import manifest
from grpo_ext.trainer.checkpoints.choice import newest_sound, numbered
from grpo_ext.trainer.checkpoints.manifest import MANIFEST, damage, files_in, seal, sync
from grpo_ext.trainer.checkpoints.writing import SAVING, put_in_place, recover, remove_if_empty, rotate
from support import tiny
from support.killed import killed_at
from support.run_folders import checkpoint
from support.trainers import build

STEPS = {"save_strategy": "steps", "save_steps": 1}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save(out: Path, step: int, limit: int | None = None) -> None:
    """What the trainer does when a checkpoint's files have been written."""
    folder, final = out / SAVING / f"checkpoint-{step}", out / f"checkpoint-{step}"
    seal(folder, step=step)
    put_in_place(folder, final)
    rotate(final, limit, None)
    remove_if_empty(folder.parent)


# Killed.


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
    assert operation > 5
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


def test_a_sealed_checkpoint_that_was_not_yet_renamed_is_kept(tmp_path):
    checkpoint(tmp_path, 1)
    checkpoint(tmp_path / SAVING, 2)
    checkpoint(tmp_path / SAVING, 3, sealed=False)
    recover(tmp_path)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert damage(tmp_path / "checkpoint-2") == []


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_weights_have_the_mode_that_the_umask_gives(umask, tmp_path):
    """safetensors writes files that only their owner can read."""
    before = os.umask(umask)
    try:
        out = build(tiny.model(), tmp_path / "out", max_steps=1, **STEPS)
        out.train()
        out.save_final(tmp_path / "out")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "out").rglob("*.*") if path.is_file()]
    assert {"model.safetensors", "optimizer.pt"} < {path.name for path in files}
    assert {oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {oct(0o666 & ~umask)}


# Rotation.


def test_rotation_keeps_the_newest_the_best_and_other_names(tmp_path):
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


def test_rotation_deletes_damaged_checkpoints_first(tmp_path):
    for step in (1, 2, 3):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-2" / "optimizer.pt").unlink()
    rotate(tmp_path / "checkpoint-3", 2, None)
    assert [path.name for path in numbered(tmp_path)] == ["checkpoint-3", "checkpoint-1"]


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("jumps_at", range(1, 9))
def test_no_clock_decides_which_checkpoint_is_newer(jumps_at, limit, tmp_path, monkeypatch):
    """A year back before one of eight saves: the newest stay, and the newest is resumed from."""
    now = [time.time_ns()]
    monkeypatch.setattr(time, "time_ns", lambda: now[0])
    for step in range(1, 9):
        now[0] += -(10**9) * 3600 * 24 * 365 if step == jumps_at else 10**9
        checkpoint(tmp_path / SAVING, step, sealed=False)
        save(tmp_path, step, limit)
    assert [path.name for path in numbered(tmp_path)] == [f"checkpoint-{step}" for step in range(8, 8 - limit, -1)]
    assert newest_sound(tmp_path) == str(tmp_path / "checkpoint-8")


# File systems.


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_cannot_sync_folders(code, tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def fsync(descriptor):
        synced.append(descriptor)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    checkpoint(tmp_path / SAVING, 1, sealed=False)
    save(tmp_path, 1)
    assert newest_sound(tmp_path) == str(tmp_path / "checkpoint-1")
    assert synced


def test_an_io_error_of_a_sync_is_raised(tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        sync(tmp_path)


def test_windows_opens_no_folder_and_syncs_what_it_may_write(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(
        manifest, "os", SimpleNamespace(**vars(os) | {"name": "nt", "open": lambda *a: opened.append(a)})
    )
    sync(tmp_path)
    assert opened == []
    (tmp_path / "file").write_text("")
    with pytest.raises(TypeError):  # the descriptor that was not opened
        sync(tmp_path / "file")
    assert opened == [(tmp_path / "file", os.O_RDWR)]


@pytest.fixture
def nfs(monkeypatch):
    """A server that keeps what is open elsewhere: the folders of such files cannot be deleted."""

    def rmtree(path, ignore_errors=False, **kwargs):
        for folder in [path, *(p for p in Path(path).rglob("*") if p.is_dir())]:
            (Path(folder) / ".nfs0001").write_text("open elsewhere")
        for file in [p for p in Path(path).rglob("*") if p.is_file() and not p.name.startswith(".nfs")]:
            file.unlink()
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    monkeypatch.setattr(shutil, "rmtree", rmtree)


def test_files_that_nfs_keeps_do_not_stop_a_run(nfs, model_path, tmp_path):
    """Not in rotation, nor where a checkpoint is replaced, nor at the end; and the next start succeeds."""
    trainer = build(model_path, tmp_path, max_steps=3, save_total_limit=1, **STEPS)
    trainer.train()
    for _ in range(2):
        put_in_place(checkpoint(tmp_path / SAVING, 3), tmp_path / "checkpoint-3")
    trainer.save_final(tmp_path)
    trainer.finish(tmp_path)
    assert (tmp_path / "finished.json").exists()
    assert [path.name for path in numbered(tmp_path)] == ["checkpoint-3"]
    recover(tmp_path)
    assert damage(tmp_path / "checkpoint-3") == []


@pytest.mark.parametrize("kind", ["a link", "a file"])
def test_a_link_or_file_in_place_of_the_saving_folder_is_an_error(kind, model_path, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / SAVING).symlink_to(tmp_path) if kind == "a link" else (out / SAVING).write_text("")
    trainer = build(model_path, out, max_steps=1, **STEPS)
    with pytest.raises(ConfigError, match=rf"_saving: it is {kind}, .*Remove it"):
        trainer.train()
    assert trainer.state.global_step == 0


# A whole trainer.


def test_a_checkpoint_has_trls_files_and_ours_in_its_manifest(model_path, tmp_path):
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
def test_a_full_disk_leaves_the_earlier_checkpoints(fails, model_path, tmp_path):
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


def test_a_file_in_place_of_the_output_dir_is_an_error(model_path, tmp_path):
    out = tmp_path / "out"

    def turn_into_a_file():
        shutil.rmtree(out)
        out.write_text("")

    trainer = build(model_path, out, max_steps=1, **STEPS)
    trainer.add_callback(At(1, turn_into_a_file))
    with pytest.raises(SaveError, match=r"checkpoint-1 could not be written .*No checkpoint was there before"):
        trainer.train()


def test_a_damaged_checkpoint_is_replaced(model_path, tmp_path, caplog):
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


def test_checkpoints_are_pushed_from_their_final_place(model_path, tmp_path, monkeypatch):
    """Files are read in the background, long after a folder aside would have been renamed."""
    sent = []
    monkeypatch.setattr(
        transformers.Trainer, "_push_from_checkpoint", lambda _, folder: sent.append((folder, damage(Path(folder))))
    )
    trainer = build(model_path, tmp_path, max_steps=2, **STEPS)
    trainer.add_callback(At(1, lambda: setattr(trainer.args, "push_to_hub", True)))
    trainer.train()
    assert sent == [(str(tmp_path / f"checkpoint-{step}"), []) for step in (1, 2)]


def test_a_checkpoint_of_only_weights_cannot_be_resumed(model_path, tmp_path):
    build(model_path, tmp_path, max_steps=1, save_only_model=True, **STEPS).train()
    with pytest.raises(ConfigError, match=r"holds only weights \(save_only_model\)"):
        build(model_path, tmp_path, max_steps=2, **STEPS).train(resume_from_checkpoint=True)
