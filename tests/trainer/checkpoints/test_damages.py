"""Each damage of damages.yaml: the run goes on from a sound checkpoint or is refused, and the user is told."""

import functools
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from grpo_ext import ConfigError
from grpo_ext.trainer.checkpoints.manifest import MANIFEST, _digest, damage, seal
from support import tiny
from support.resuming import checkpoint_to_resume
from support.trainers import build

CASES = yaml.safe_load((Path(__file__).parent / "damages.yaml").read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three checkpoints of a run that was stopped."""
    folder = tmp_path_factory.mktemp("run")
    model = tiny.save(folder / "model")
    build(model, folder / "out", max_steps=3, save_strategy="steps", save_steps=1).train()
    return folder / "out"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit(path: Path) -> None:
    content = json.loads(path.read_text())
    content["files"].popitem()
    path.write_text(json.dumps(content))


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def clear(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("a file")


def dangle(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to(path.parent / "nowhere")


def link(path: Path) -> None:
    path.rename(path.parent / "moved")
    path.symlink_to(path.parent / "moved")


def plain(path: Path) -> None:
    clear(path)
    (path / "trainer_state.json").write_text('{"global_step": 3, ')


def copy(path: Path, target: Path) -> None:
    if path.is_dir():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(path, target)
    else:
        shutil.copy(path, target)


def truncate(path: Path, part: float) -> None:
    os.truncate(path, int(path.stat().st_size * part))


def nest(path: Path) -> None:
    path.write_text("[" * 100_000)


def reseal(path: Path) -> None:
    """Remove a file, as if the checkpoint had been saved without it."""
    path.unlink()
    content = json.loads((path.parent / MANIFEST).read_text())
    kept = {name: value for name, value in content.items() if name not in ("format", "written", "files", "digest")}
    seal(path.parent, **kept)


def forge(run: Path, name: str, entry: str) -> None:
    """Write a manifest anew, with another entry and the right digest."""
    path = run / "checkpoint-3" / MANIFEST
    content = json.loads(path.read_text())
    del content["digest"]
    content["files"][name] = json.loads(entry)
    path.write_text(json.dumps(content | {"digest": _digest(content)}))


VERBS = {
    "remove": remove,
    "empty": functools.partial(truncate, part=0),
    "halve": functools.partial(truncate, part=0.5),
    "lock": lambda path: path.chmod(0),
    **{f.__name__: f for f in (flip, edit, folder, clear, file, dangle, link, plain, copy, nest)},
}


def place(run: Path, word: str) -> Path:
    """A path in checkpoint-3, or (`checkpoint-1/...`) beside it, or (`../...`) of the run."""
    return run / word if word.startswith("checkpoint-") else run / "checkpoint-3" / word


def inflict(run: Path, do: str) -> None:
    verb, _, rest = do.partition(" ")
    words = rest.split(" ", 1) if verb == "write" else rest.split()
    if verb == "write":
        place(run, words[0]).write_text(words[1])
    elif verb == "forge":
        forge(run, *words)
    elif verb == "reseal":
        reseal(place(run, *words))
    elif words[0].split("/")[0].isdecimal():
        for word in words:
            steps, name = word.split("/")
            for step in steps:
                VERBS[verb](run / f"checkpoint-{step}" / name)
    else:
        VERBS[verb](*(Path(os.path.normpath(place(run, word))) for word in words))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["damage"].replace(" ", "-"))
def test_a_damaged_checkpoint_is_named_and_not_used(case, run, tmp_path, caplog):
    here = tmp_path / "out"
    shutil.copytree(run, here)
    inflict(here, case["do"])
    if case["do"].startswith("lock") and os.access(place(here, case["do"].split()[1]), os.R_OK):
        pytest.skip("root may read everything")
    asked = str(here / case["ask"]) if "ask" in case else None
    if case.get("from") == "refused":
        with pytest.raises(ConfigError) as refused:
            checkpoint_to_resume(here, asked)
        assert case["told"] in str(refused.value)
        assert caplog.text == ""
        return
    assert checkpoint_to_resume(here, asked) == str(here / case.get("from", "checkpoint-2"))
    assert (case["told"] in caplog.text) if case["told"] else (caplog.text == "")


def test_an_untouched_checkpoint_is_sound(run):
    for step in (1, 2, 3):
        assert damage(run / f"checkpoint-{step}") == []
    assert sorted(path.name for path in run.iterdir() if path.is_dir()) == [f"checkpoint-{i}" for i in (1, 2, 3)]


def test_a_change_of_any_file_is_found(run, tmp_path):
    """No file of a checkpoint can lose a byte or a bit unnoticed."""
    shutil.copytree(run / "checkpoint-3", tmp_path / "checkpoint-3")
    names = [p.name for p in (run / "checkpoint-3").iterdir()]
    assert len(names) > 10
    for name in names:
        for harm in (remove, flip, functools.partial(truncate, part=0.9)):
            harm(tmp_path / "checkpoint-3" / name)
            assert damage(tmp_path / "checkpoint-3"), name
            shutil.copy(run / "checkpoint-3" / name, tmp_path / "checkpoint-3" / name)
    assert damage(tmp_path / "checkpoint-3") == []
