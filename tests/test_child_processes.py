"""Processes that others start: their ends, together and with their parent."""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest

from grpo_ext.child_processes import kill_group
from grpo_ext.warden import die_with_parent
from support.processes import PATIENCE

PARENT = '''
import os, signal, subprocess, sys
from functools import partial
from grpo_ext.warden import die_with_parent
child = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("told")))
print("up", flush=True)
signal.pause()
"""
end = partial(die_with_parent, os.getpid(), signal.{number})
subprocess.Popen([sys.executable, "-c", child], preexec_fn=end).wait()
'''


@pytest.mark.parametrize(("number", "words"), [("SIGTERM", "told\n"), ("SIGKILL", "")])
def test_a_process_gets_the_signal_when_its_parent_is_killed(number, words):
    program = PARENT.format(number=number)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "up\n"
        parent.kill()
        assert parent.stdout.read() == words  # its end: both have closed it


def test_a_process_whose_parent_has_ended_before_does_not_begin():
    program = [sys.executable, "-c", "print('begun')"]
    run = subprocess.run(
        program, preexec_fn=partial(die_with_parent, os.getpid() + 1, signal.SIGKILL), capture_output=True
    )
    assert (run.returncode, run.stdout) == (1, b"")


def test_a_group_ends_after_the_grace_in_which_its_leader_may_exit():
    """The leader exits by itself, and what it has left behind is killed."""
    leader = "import subprocess; subprocess.Popen(['sleep', '86400']); print('up', flush=True); raise SystemExit(3)"
    command = [sys.executable, "-c", leader]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, text=True) as process:
        assert process.stdout.readline() == "up\n"
        assert kill_group(process, PATIENCE) == 3
        assert process.stdout.read() == ""  # both have closed it


def test_a_leader_that_does_not_exit_is_killed():
    process = subprocess.Popen(["sleep", "86400"], start_new_session=True)
    assert kill_group(process, 0.1) == -signal.SIGKILL
