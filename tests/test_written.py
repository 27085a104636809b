"""Writers in a folder of others follow no link and write whole files; only `safe_reading` opens files to write."""

import ast
import os
from pathlib import Path

import pytest
import torch

from grpo_ext import safe_reading
from grpo_ext.data.completions import write_completions
from grpo_ext.safe_reading import appending, write_text
from grpo_ext.trainer.nan_report import write

SOURCE = Path(safe_reading.__file__).parent
OWN = {
    "safe_reading.py": "the writers",
    "environments/library/command.py": "a new file, in place of what the program has put there",
    "environments/library/folder.py": "a folder of its own, without links",
    "config/launch.py": "a temporary folder of its own",
    "trainer/checkpoints/manifest.py": "beside, then put in place",
    "rewards/code/sandbox_child.py": "inside the sandbox",
    "rewards/code/peers.py": "descriptors",
    "rewards/code/sandbox.py": "descriptors",
    "rewards/code/sandbox_job.py": "descriptors",
    "rollout/process/memory_file.py": "memory",
}
"""Modules that open files to write by themselves, and why they may."""


def opens_to_write(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name in ("write_text", "write_bytes") and isinstance(call.func, ast.Attribute):
        return True
    words = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
    modes = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    return name in ("open", "fdopen") and any(set(mode) & set("wax+") and len(mode) < 4 for mode in modes)


def test_only_the_writers_open_files_to_write():
    found = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and opens_to_write(node)
    }
    assert found == set(OWN)


WRITERS = {
    "report.html": lambda path: write_text(path, "new"),
    "rows.jsonl": lambda path: write_completions(path, [{"completion": "new"}]),
    "rows.parquet": lambda path: write_completions(path, [{"completion": "new"}]),
    "batch.pt": lambda path: write(path, {"step": torch.ones(1)}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_is_replaced_and_what_it_names_stays(tmp_path, name):
    (tmp_path / "bashrc").write_text("mine")
    path = tmp_path / "run" / name
    path.parent.mkdir()
    path.symlink_to(tmp_path / "bashrc")
    WRITERS[name](path)
    assert (tmp_path / "bashrc").read_text() == "mine"
    assert not path.is_symlink()
    assert path.read_bytes()
    assert os.listdir(path.parent) == [name]
    assert path.stat().st_mode & 0o777 == (tmp_path / "bashrc").stat().st_mode & 0o777


def test_a_link_is_not_appended_to(tmp_path):
    (tmp_path / "bashrc").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "bashrc")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=r"link|regular|No such device"):
            appending(tmp_path / name)
    assert (tmp_path / "bashrc").read_text() == "mine"


def test_a_writer_that_fails_leaves_what_was_there(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "a", "\ud800")
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]
