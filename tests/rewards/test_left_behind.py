"""Folders of workers go with them, and those of processes that were killed with the next start."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_ext import child_processes
from grpo_ext.child_processes import kill_children, remove_stale_folders
from grpo_ext.rewards.columns import with_plain_state
from grpo_ext.rewards.workers import pool
from grpo_ext.rewards.workers.pool import Job, Outcome, Pool, Status, Worker
from support.processes import PATIENCE


@pytest.fixture
def temp(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def folder(temp: Path, process: int | str, namespace: int) -> Path:
    made = temp / f"{child_processes.FOLDER_PREFIX}{namespace}_{process}_abc"
    made.mkdir()
    (made / "file").write_text("")
    return made


def test_only_what_belongs_to_nobody_is_removed(temp):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = child_processes._pid_namespace()
    left, ours, another = (
        folder(temp, gone.pid, here),
        folder(temp, os.getpid(), here),
        folder(temp, gone.pid, here + 1),
    )
    remove_stale_folders()
    assert (left.exists(), ours.exists(), another.exists()) == (False, True, True)


def test_what_still_runs_in_such_a_folder_is_ended(temp):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = folder(temp, gone.pid, child_processes._pid_namespace())
    beside = folder(temp, f"{gone.pid}_x", child_processes._pid_namespace() + 1)
    sleep = ["sleep", "3600"]
    there = [
        subprocess.Popen(sleep, cwd=left, start_new_session=True),
        subprocess.Popen(sleep, env={"TMPDIR": str(left / "1")}, start_new_session=True),
    ]
    other = subprocess.Popen(sleep, cwd=beside, env={"TMPDIR": str(beside)}, start_new_session=True)
    try:
        while not Path(f"/proc/{there[1].pid}/environ").read_bytes():  # Linux sets it a moment after `Popen` returns
            time.sleep(0.01)
        remove_stale_folders()
        assert [process.wait(PATIENCE) for process in there] == [-signal.SIGKILL] * 2
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("process", ["9" * 10, "9" * 25, "9" * 200, "-1", "0", "1e9", "\u0663", "x"])
def test_a_folder_without_a_pid_of_ours_is_left(temp, process):
    made = folder(temp, process, child_processes._pid_namespace())
    remove_stale_folders()
    assert made.exists()


def test_a_folder_of_another_user_is_left(temp, monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    made = folder(temp, gone.pid, child_processes._pid_namespace())
    monkeypatch.setattr(os, "getuid", lambda: made.lstat().st_uid + 1)
    remove_stale_folders()
    assert made.exists()


def test_all_workers_of_a_process_end_at_once_and_none_is_started_for_them(temp, monkeypatch):
    monkeypatch.setattr(child_processes, "_starting", threading.Lock())  # which is kept
    with closing(Pool(2)) as workers:
        workers.run([Job("support.faulty:letters", {"completions": ["a"]}, 60.0)] * 2)
        processes = [worker.process for worker in workers._workers]
        assert len(list(temp.glob(f"{child_processes.FOLDER_PREFIX}*"))) == len(processes) > 0
        kill_children()
        assert all(process.poll() is not None for process in processes)
        late = threading.Thread(target=Worker, args=(1.0,), daemon=True)
        late.start()
        late.join(0.5)
        assert not list(temp.glob(f"{child_processes.FOLDER_PREFIX}*"))


@pytest.mark.parametrize(("free", "size"), [(1000, 60), (41, 10), (-3, 1)])
def test_a_pool_has_no_more_workers_than_descriptors_allow(free, size, temp, monkeypatch):
    monkeypatch.setattr(pool, "free_descriptors", lambda: free)
    assert Pool(60).size == size


def test_the_time_in_which_the_end_of_a_worker_is_awaited_is_not_counted_for_others(monkeypatch):
    now = [0.0]
    died = Outcome(Status.DIED)
    dying = SimpleNamespace(stream="dying", deadline=60.0, collect=lambda: now.__setitem__(0, 5.0) or died)
    other = SimpleNamespace(stream="other", deadline=3.0)  # may have answered by then
    monkeypatch.setattr(pool, "wait", lambda streams, until: {"dying"})
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert list(pool._finished([dying, other], seconds=1.0)) == [(dying, died)]


def test_the_state_that_travels_does_not_grow_with_the_log():
    class State:
        def __init__(self, entries):
            self.global_step, self.log_history = entries, [{"loss": i} for i in range(entries)]

    sent = [with_plain_state({"trainer_state": State(n)})["trainer_state"] for n in (3, 2000)]
    assert [state.log_history for state in sent] == [[{"loss": 2}], [{"loss": 1999}]]
    assert [state.global_step for state in sent] == [3, 2000]
