"""A checkpoint whose files hold anything, under a manifest that fits: one message, exit code 2, and nothing is run."""

import io
import json
import os
import shutil

import pytest
import torch

from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.train import main, train
from grpo_ext.trainer.checkpoints.manifest import MANIFEST, seal
from support import adapted, tiny

SETTINGS = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}


class Planted:
    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def saved(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def state(**changes) -> bytes:
    return json.dumps({"global_step": 1, "log_history": [], **changes}).encode()


DEEP = b"[" * 5_000 + b"]" * 5_000
POISON = {
    "trainer_state.json": {
        "deep": DEEP,
        "nulls": state(max_steps=None),
        "texts": state(stateful_callbacks="x", total_flos="x"),
        "rows": state(log_history=["x"]),
        "a key": state(planted=1),
        "nan": state(epoch=float("nan")),
    },
    "config.json": {"deep": DEEP, "list": b"[]", "torn": b'{"model_type": "ll'},
    **{
        file: {"torn": None, "another": saved(value), "pickle": "pickle"}
        for file, value in {
            "optimizer.pt": [1],
            "scheduler.pt": 0.5,
            "rng_state.pth": [1],
            "run_state_0.pt": 0.5,
        }.items()
    },
    "recipe.json": {"deep": DEEP, "list": b"[]", "nulls": b'{"of_recipe": null, "loss_type": null}'},
    "manifest.json": {"deep": DEEP, "list": b"[]", "text": b'"x"'},
    "model.safetensors": {"torn": None},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    tiny.save(folder / "base")
    train(load_recipe(adapted.write_recipe(folder, str(folder / "base"), folder / "run", **SETTINGS)))
    return folder


@pytest.mark.cases(10)
@pytest.mark.parametrize(("file", "kind"), [(file, kind) for file, kinds in POISON.items() for kind in kinds])
def test_a_poisoned_file_is_one_message(file, kind, whole, tmp_path, capsys):
    checkpoint, content = tmp_path / "run" / "checkpoint-1", POISON[file][kind]
    shutil.copytree(whole / "run" / "checkpoint-1", checkpoint)
    facts = json.loads((checkpoint / MANIFEST).read_text())
    if content is None:
        content = (checkpoint / file).read_bytes()[: (checkpoint / file).stat().st_size // 2]
    if content == "pickle":
        content = saved(Planted(tmp_path / "mark"))
    (checkpoint / file).write_bytes(content)
    if file != MANIFEST:
        (checkpoint / MANIFEST).unlink()
        seal(checkpoint, step=facts["step"])
    argv = adapted.write_recipe(tmp_path, str(whole / "base"), tmp_path / "run", **SETTINGS)
    with pytest.raises(SystemExit) as end:
        main(argv)
    message = capsys.readouterr().err.partition("1 problem in the configuration:\n")[2]
    assert end.value.code == 2
    assert str(checkpoint) in message
    assert message.count("\n") == 1
    assert not (tmp_path / "mark").exists()


def test_a_giant_state_is_not_read(whole, tmp_path, capsys):
    checkpoint = tmp_path / "run" / "checkpoint-1"
    shutil.copytree(whole / "run" / "checkpoint-1", checkpoint)
    for name in ("manifest.json", "../finished.json", "../_request.json"):
        (checkpoint / name).touch()
        os.truncate(checkpoint / name, 2**35)
    with pytest.raises(SystemExit) as end:
        main(adapted.write_recipe(tmp_path, str(whole / "base"), tmp_path / "run", **SETTINGS))
    assert end.value.code == 2
    assert "34,359,738,368 bytes" in capsys.readouterr().err
