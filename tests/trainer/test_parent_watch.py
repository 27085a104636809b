"""The command that started the launcher: found among the ancestors, and watched whatever the clock says."""

import os
import subprocess
import sys

import psutil
import pytest

from grpo_ext.trainer.signals import ancestor, is_alive


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    process.stdin.close()


@pytest.mark.skipif(not psutil.LINUX, reason="the boot time is read from /proc")
def test_a_clock_that_is_set_ends_no_run(child, monkeypatch):
    """Linux derives the start of a process from its boot time, which moves when the clock is set."""
    command = psutil.Process(child.pid)
    began = command.create_time()
    boot_time = psutil._psplatform.boot_time()
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot_time + 3600)
    monkeypatch.setattr(psutil._psplatform, "BOOT_TIME", boot_time + 3600, raising=False)  # of older versions
    assert psutil.Process(child.pid).create_time() - began > 3000
    assert is_alive(command)


def test_a_command_that_was_killed_is_gone(child):
    command = psutil.Process(child.pid)
    assert is_alive(command)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(command)  # a zombie, until its parent asks for its end
    child.wait()
    assert not is_alive(command)


def test_only_an_ancestor_is_watched(child):
    """Not a process that is gone, another's, or one of another machine with the same number."""
    assert ancestor(str(os.getppid())) == psutil.Process(os.getppid())
    for other in (None, "", str(child.pid), str(os.getpid()), "4194999", f"{os.getppid()} 1.0 elsewhere"):
        assert ancestor(other) is None
