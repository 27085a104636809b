"""Going back to a checkpoint, or to the beginning: once, whatever kills it, and then the same command continues."""

import json
import shutil
from pathlib import Path

import pytest

from grpo_ext import ConfigError
from grpo_ext.config.resuming import REQUEST_FILE, Request, noted, requested
from grpo_ext.evaluation import results
from grpo_ext.report import reading
from grpo_ext.trainer import nonfinite
from grpo_ext.trainer.checkpoints.choice import Sound, numbered
from grpo_ext.trainer.checkpoints.finish import RECORDS, write_finished
from grpo_ext.trainer.checkpoints.starting import _beginning, _carried_out, _start
from support.killed import killed_at
from support.run_folders import checkpoint

HERE = {"max_steps": 9, "num_train_epochs": 1.0}
"""The record of the run that starts again: longer than what it finds."""


def trains(out: Path, asked, *steps: int) -> str | None:
    """What `grpo-ext train` does but for training: begins where it should, and saves some steps."""
    begin = _beginning(out, asked, HERE)
    if begin.over:
        return begin.over
    if begin.request is not None:
        _carried_out(out, begin.request)
    _start(out, begin.checkpoint, HERE)
    for step in steps:
        checkpoint(out, step)
    return begin.checkpoint and Path(begin.checkpoint).name


def ends(out: Path, step: int, steps: int = 8) -> None:
    """What the end of a run leaves."""
    (out / "model.safetensors").write_text(f"model of step {step}")
    write_finished(out, ["model.safetensors"], HERE | {"max_steps": steps}, step=step, max_steps=steps)


def left(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


RECORDED = ("evaluation/held_out/step_4.json", "evaluation/held_out/step_6_samples.jsonl", "failures/step_6/rank_0.pt")


def a_finished_run(out: Path) -> Path:
    """Checkpoints 2 to 8, a log and a model."""
    trains(out, None, 2, 4, 6, 8)
    (out / "metrics.jsonl").write_text("{}\n")
    (out / "mine.txt").write_text("a note")
    for name in RECORDED:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    ends(out, 8)
    return out


def contents(*folders: Path) -> dict[str, bytes]:
    """All files of some folders, by their path in each; no path may be in two of them."""
    found: dict[str, bytes] = {}
    for folder in folders:
        for path in folder.rglob("*"):
            name = str(path.relative_to(folder))
            if path.is_file() and not name.startswith("_") and not name.endswith(".part"):
                assert name not in found
                found[name] = path.read_bytes()
    return found


GOING_BACK = {
    "never": ("never", None, []),
    "to one of its own": ("{out}/checkpoint-4", "checkpoint-4", ["checkpoint-4", "checkpoint-2"]),
    "to another run's": ("{out}/../elsewhere/checkpoint-5", "checkpoint-5", []),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("where", GOING_BACK)
@pytest.mark.cases(3)
def test_killed_at_any_file_operation_of_going_back(where, tmp_path):
    """By the same command the run begins where it was to begin, and each file of the old one is there, once."""
    asked, begins, stay = GOING_BACK[where]
    for operation in range(1, 500):
        out = a_finished_run(tmp_path / str(operation) / "out")
        trains(out.parent / "elsewhere", None, 5)
        before, wanted = contents(out), asked.format(out=out)
        begin = _beginning(out, wanted, HERE)
        died = killed_at(operation, lambda out=out, b=begin: _carried_out(out, b.request))
        assert trains(out, wanted) == begins
        assert contents(out, *out.glob("_before-*")) == before
        assert [path.name for path in numbered(out)] == stay
        assert not (out / "finished.json").exists()
        before = contents(out)
        (out / "metrics.jsonl").write_text("of a start that was killed before its first checkpoint")
        assert trains(out, wanted) == trains(out, None) == begins
        assert contents(out).keys() == {*before, "metrics.jsonl"}
        if not died:
            break
    assert operation > 8


@pytest.mark.parametrize("where", GOING_BACK)
@pytest.mark.parametrize("old_order", ["finished", "killed"])
def test_a_repeated_command_resumes_its_own_run(where, old_order, tmp_path):
    """As SLURM's requeue has it: each start makes a step or two, and the run comes to its end."""
    asked, begins, _ = GOING_BACK[where]
    out = a_finished_run(tmp_path / "out")
    if old_order == "killed":
        (out / "finished.json").unlink()
    trains(tmp_path / "elsewhere", None, 5)
    wanted = asked.format(out=out)
    assert trains(out, wanted) == begins  # killed before its first checkpoint
    assert trains(out, wanted, 6) == begins
    assert trains(out, wanted, 7) == "checkpoint-6"
    assert trains(out, None, 8) == "checkpoint-7"
    assert trains(out, wanted, 9) == "checkpoint-8"
    ends(out, 9, 9)
    assert "This run is finished: 9 steps" in trains(out, wanted)
    assert "This run is finished: 9 steps" in trains(out, None)
    assert len(list(out.glob("_before-*"))) == 1


def test_the_requested_checkpoint_may_be_deleted_later(tmp_path):
    """Rotation deletes it; the repeated command has no need of it."""
    out = a_finished_run(tmp_path)
    asked = str(out / "checkpoint-4")
    trains(out, asked, 5)
    for gone in ("checkpoint-2", "checkpoint-4"):
        (out / gone).rename(tmp_path / f"gone-{gone}")
    assert trains(out, asked, 6) == "checkpoint-5"


def test_another_request_is_carried_out(tmp_path):
    out = a_finished_run(tmp_path)
    trains(out, str(out / "checkpoint-4"), 5, 6)
    assert trains(out, str(out / "checkpoint-2"), 3) == "checkpoint-2"
    assert trains(out, "never", 1) is None
    assert trains(out, "never", 2) == "checkpoint-1"
    assert [path.name for path in numbered(out)] == ["checkpoint-2", "checkpoint-1"]
    assert len(list(out.glob("_before-*"))) == 3


def test_what_was_moved_aside_can_be_resumed(tmp_path):
    """It is a checkpoint of another folder: all that is in this one goes aside."""
    out = a_finished_run(tmp_path)
    trains(out, str(out / "checkpoint-4"), 5, 6)
    [aside] = out.glob("_before-*")
    assert trains(out, str(aside / "checkpoint-8"), 9) == "checkpoint-8"
    assert [path.name for path in numbered(out)] == ["checkpoint-9"]
    assert trains(out, None) == "checkpoint-9"


@pytest.mark.parametrize("link", ["of the folder", "of the checkpoint"])
def test_a_checkpoint_of_the_folder_that_is_named_by_a_link_stays(link, tmp_path):
    out = a_finished_run(tmp_path / "out")
    path = tmp_path / "link"
    path.symlink_to(out if link == "of the folder" else out / "checkpoint-4")
    trains(out, str(path / "checkpoint-4" if link == "of the folder" else path))
    assert [path.name for path in numbered(out)] == ["checkpoint-4", "checkpoint-2"]


def test_never_starts_over_if_the_recipe_has_changed(tmp_path, caplog):
    """A changed recipe is no repeated command: continuing it would be refused, and `never` is the cure named there."""
    trains(tmp_path, "never", 2)
    changed = HERE | {"seed": 8}
    with pytest.raises(ConfigError, match=r"seed: .* --resume_from_checkpoint never"):
        _beginning(tmp_path, None, changed)
    begin = _beginning(tmp_path, "never", changed)
    assert begin.checkpoint is None
    assert begin.request is not None
    assert "seed" in caplog.text


def test_a_fresh_start_does_not_silently_start_over(tmp_path, caplog):
    trains(tmp_path, "never", 2)
    (tmp_path / "checkpoint-2" / "manifest.json").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoint-2 is damaged.*--resume_from_checkpoint never"):
        _beginning(tmp_path, None, HERE)
    assert trains(tmp_path, "never", 1) is None
    assert "checkpoint-2 is damaged" in caplog.text
    assert [path.name for path in tmp_path.glob("_before-*/*")] == ["checkpoint-2"]


def test_a_script_that_goes_back_leaves_nothing_newer_behind(tmp_path):
    """`train(resume_from_checkpoint=PATH)` goes back each time, and True then continues what it began."""
    out = a_finished_run(tmp_path)
    for _ in range(2):
        assert Path(_start(out, str(out / "checkpoint-4"), HERE)).name == "checkpoint-4"
        assert [path.name for path in numbered(out)] == ["checkpoint-4", "checkpoint-2"]
        checkpoint(out, 5)
    assert Path(_start(out, True, HERE)).name == "checkpoint-5"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(("asked", "stay"), [(None, []), ("checkpoint-4", ["checkpoint-4", "checkpoint-2"])])
def test_a_script_that_is_killed_while_it_goes_back_finishes_the_move(asked, stay, tmp_path):
    """`train()` begins at step 0: it leaves no older run's checkpoints, of which the newest would be resumed from."""
    for operation in range(1, 500):
        out = a_finished_run(tmp_path / str(operation))
        before, wanted = contents(out), str(out / asked) if stay else asked
        died = killed_at(operation, lambda out=out, w=wanted: _start(out, w, HERE))
        _start(out, wanted, HERE)
        assert contents(out, *out.glob("_before-*")) == before
        assert [path.name for path in numbered(out)] == stay
        if not died:
            break
    assert operation > 8


def test_a_script_that_begins_in_a_folder_without_checkpoints_moves_nothing(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert _start(tmp_path, None, HERE) is None
    assert left(tmp_path) == ["metrics.jsonl"]


def test_a_script_that_may_not_resume_there_moves_nothing(tmp_path):
    out = a_finished_run(tmp_path)
    before = contents(out)
    with pytest.raises(ConfigError, match="seed"):
        _start(out, str(out / "checkpoint-4"), HERE | {"seed": 8})
    assert contents(out) == before
    assert noted(out) is None


def test_a_sealed_checkpoint_of_a_killed_run_is_moved_aside_too(tmp_path):
    """It gets its name before the old run is moved, not after."""
    trains(tmp_path, None, 2)
    checkpoint(tmp_path / "_saving", 3)
    assert trains(tmp_path, "never") is None
    assert numbered(tmp_path) == []
    assert sorted(path.name for path in tmp_path.glob("_before-*/*")) == ["checkpoint-2", "checkpoint-3"]


def test_the_folders_of_records_are_those_that_a_run_writes():
    assert set(RECORDS) == {
        *(results.EVALUATION, nonfinite.FOLDER, reading.COMPLETIONS, "reward_failures"),
    }


@pytest.mark.parametrize(
    "note",
    ["", "[" * 100_000, "[]", '{"asked": "never"}', '{"asked": "never", "step": "1"}', '{"asked": 1, "step": 1}'],
)
def test_a_damaged_request_file_is_ignored(note, tmp_path):
    (tmp_path / REQUEST_FILE).write_text(note)
    assert noted(tmp_path) is None
    (tmp_path / REQUEST_FILE).write_text(json.dumps({"asked": "never", "step": -1}))
    assert noted(tmp_path) == Request("never", -1)


def test_values_of_resume_from_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word in ("never", "NEVER", "false", False):
        assert requested(word) == "never"
    for word in (None, "", True, "true", "last"):
        assert requested(word) is None
    assert requested("a") == requested(tmp_path / "a") == requested(Sound("./a")) == str(tmp_path / "a")


def stock(out: Path, step: int) -> Path:
    """A checkpoint as plain TRL writes it."""
    path = checkpoint(out, step, sealed=False)
    shutil.rmtree(path / "shards")
    (path / "recipe.json").unlink()
    (path / "scheduler.pt").write_text("x")
    return path


@pytest.mark.parametrize("again", ["the same command", "the plain command"])
def test_a_start_from_a_checkpoint_of_plain_trl_is_repeated(again, tmp_path):
    """What has no manifest and is no newer than the checkpoint of the request is not what the request began."""
    stock(tmp_path, 3)
    asked = str(stock(tmp_path, 5))
    repeated = asked if again == "the same command" else None
    assert trains(tmp_path, asked) == "checkpoint-5"  # killed before its first checkpoint
    assert trains(tmp_path, repeated, 6) == "checkpoint-5"
    assert trains(tmp_path, repeated, 7) == "checkpoint-6"
    for begun in (6, 7):
        (tmp_path / f"checkpoint-{begun}" / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"No sound checkpoint in .* checkpoint-7 takes it|checkpoint-6 is damaged"):
        trains(tmp_path, repeated)


@pytest.mark.parametrize("aside", [False, True])
def test_a_folder_that_was_moved_still_finds_the_checkpoint_of_its_request(aside, tmp_path):
    """By the plain command, after a kill before the first checkpoint; also in a copy that another user made."""
    out = a_finished_run(tmp_path / "out")
    asked = out / "checkpoint-4"
    if aside:
        trains(out, str(asked), 5)
        asked = next(out.glob("_before-*")) / "checkpoint-8"
    trains(out, str(asked))
    moved = out.rename(tmp_path / "moved")
    begin = _beginning(moved, None, HERE)
    assert begin.checkpoint == str(moved / asked.relative_to(out))


@pytest.mark.parametrize("again", ["never", None])
def test_a_checkpoint_that_a_user_put_back_is_resumed_from(again, tmp_path):
    out = a_finished_run(tmp_path)
    trains(out, "never")
    next(out.glob("_before-*/checkpoint-8")).rename(out / "checkpoint-8")
    assert trains(out, again) == "checkpoint-8"
    assert len(list(out.glob("_before-*"))) == 1


def test_records_of_another_attempt_are_moved_aside(tmp_path):
    """An evaluation after the step that is gone back to is of other weights, also where both attempts have one."""
    out = a_finished_run(tmp_path)
    for attempt in ("second", "third"):
        trains(out, str(out / "checkpoint-4"), 5, 6)
        assert [path.name for path in (out / "evaluation" / "held_out").iterdir()] == ["step_4.json"]
        (out / "evaluation" / "held_out" / "step_6.json").write_text(f"of the {attempt}")
        (out / REQUEST_FILE).unlink()
    assert len(list(out.glob("_before-*"))) == 2
