"""`finished.json` of other people's folders: it names no file outside, and a damaged one counts as none."""

import json
from pathlib import Path

import pytest

from grpo_ext import ConfigError
from grpo_ext.trainer.checkpoints.finish import FINISHED_FILE, finished, move_aside, publish, write_finished
from grpo_ext.trainer.checkpoints.starting import _beginning
from support.run_folders import checkpoint

RECORD = {"max_steps": 4, "num_train_epochs": 1.0}
ENTRY = {"size": 6, "sha256": "0" * 64}


def write(out: Path, **changes) -> Path:
    """The end of a run in four steps, with changes."""
    out.mkdir(exist_ok=True)
    content = {"step": 4, "max_steps": 4, "files": {"model.safetensors": ENTRY}, "recipe": RECORD}
    (out / FINISHED_FILE).write_text(json.dumps(content | changes))
    return out


def new_model(out: Path) -> Path:
    (out / "_saving" / "model").mkdir(parents=True)
    (out / "_saving" / "model" / "config.json").write_text("{}")
    return out / "_saving" / "model"


@pytest.mark.parametrize("way", ["../victim.txt", "{folder}/victim.txt", "..\\victim.txt", "link/victim.txt"])
def test_a_file_outside_is_neither_deleted_nor_moved(way, tmp_path, caplog):
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    out = write(tmp_path / "out", files={way.format(folder=tmp_path): ENTRY})
    (out / "link").symlink_to(tmp_path)
    if way.startswith("link"):
        assert finished(out) is not None  # a name like any other, until the link is followed
    else:
        assert finished(out) is None
        assert "finished.json names a file outside of its folder" in caplog.text
    assert publish(new_model(out), out) == ["config.json"]
    assert victim.read_text() == "mine"
    write(out, files={way.format(folder=tmp_path): ENTRY})
    move_aside(out, "_before-now")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"model.safetensors": "text"}},
        {"files": {"model.safetensors": {"size": 1}}},
        {"files": []},
        {"recipe": {}},
        {"recipe": RECORD | {"max_steps": "4"}},
        {"step": None},
    ],
)
def test_a_malformed_record_is_ignored(changes, tmp_path, caplog):
    checkpoint(write(tmp_path / "out", **changes), 2)
    assert _beginning(tmp_path / "out", None, RECORD).checkpoint == str(tmp_path / "out" / "checkpoint-2")
    assert "The run counts as not finished" in caplog.text


@pytest.mark.parametrize("text", ["", "[" * 100_000, "[]", "\\x00"])
def test_an_unreadable_record_is_ignored(text, tmp_path, caplog):
    (tmp_path / FINISHED_FILE).write_text(text)
    assert finished(tmp_path) is None
    assert "The run counts as not finished" in caplog.text


def test_a_run_whose_model_and_checkpoints_are_gone_does_not_start_over(tmp_path):
    (tmp_path / "model.safetensors").write_text("weights")
    write_finished(tmp_path, ["model.safetensors"], RECORD, step=4, max_steps=4)
    assert "This run is finished" in _beginning(tmp_path, None, RECORD).over
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"there at step 4, and its model and checkpoints are gone\. .*never"):
        _beginning(tmp_path, None, RECORD)
    assert _beginning(tmp_path, "never", RECORD).request is not None
