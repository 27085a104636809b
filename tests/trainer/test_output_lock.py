"""One run for each `output_dir`."""

import os
import subprocess
import sys

import pytest

from grpo_ext import ConfigError
from grpo_ext.trainer.output_lock import LOCK_FILE, output_lock

HOLD = "import sys, time; from pathlib import Path; from grpo_ext.trainer.output_lock import output_lock\n"
HOLD += "with output_lock(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(600)"


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_run_is_refused_and_names_the_first(holder, tmp_path):
    message = rf"another run writes there \(process {holder.pid} on .*, since 2"
    with pytest.raises(ConfigError, match=message), output_lock(tmp_path):
        pass


def test_a_killed_holder_holds_nothing(holder, tmp_path):
    holder.kill()
    holder.wait()
    with output_lock(tmp_path):
        assert str(os.getpid()) in (tmp_path / LOCK_FILE).read_text()
    assert not (tmp_path / LOCK_FILE).read_text()


def test_only_the_main_process_holds_it(holder, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    held = (tmp_path / LOCK_FILE).read_text()
    with output_lock(tmp_path):
        assert str(holder.pid) in (tmp_path / LOCK_FILE).read_text() == held


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_that_outlives_its_run_holds_nothing(tmp_path):
    """A dataloader's worker takes seconds to see that the run was killed; the next start may be sooner."""
    (stay, leave), (begun, begin) = os.pipe(), os.pipe()
    with output_lock(tmp_path):
        child = os.fork()
        if child == 0:
            os.close(leave)
            os.write(begin, b".")
            os.read(stay, 1)
            os._exit(0)
        os.read(begun, 1)
    try:
        with output_lock(tmp_path):
            assert str(os.getpid()) in (tmp_path / LOCK_FILE).read_text()
    finally:
        os.close(leave)
        os.waitpid(child, 0)
        for end in (stay, begun, begin):
            os.close(end)


def test_a_released_folder_can_be_locked_again(tmp_path):
    for _ in range(2):
        with output_lock(tmp_path / "new" / "folder"):
            assert str(os.getpid()) in (tmp_path / "new" / "folder" / LOCK_FILE).read_text()


def test_a_link_in_place_of_the_lock_is_refused_and_its_target_kept(tmp_path):
    (tmp_path / "own").write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_FILE).symlink_to(tmp_path / "own")
    with pytest.raises(ConfigError, match="not writable"), output_lock(tmp_path / "run"):
        pass
    assert (tmp_path / "own").read_text() == "kept"


def test_a_folder_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    message = r"file/out': it is not writable \(Not a directory\)"
    with pytest.raises(ConfigError, match=message), output_lock(tmp_path / "file" / "out"):
        pass


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"), output_lock(tmp_path):
        pass
