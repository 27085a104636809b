"""A warden: runs a command, and ends all that it has started, whoever is killed.

This file is also a script, `python -I -S warden.py LIFELINE COMMAND...`, which imports little and starts at once. The
command runs until it ends, or until the other end of the socket LIFELINE is closed, as it is when its owner is killed.
Processes that its descendants leave behind become the warden's children (Linux) and are killed; then the warden ends
as the command did. It sends `ENDED` last: an owner that does not receive it knows that something may still run.
"""

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress

ENDED = b"."
"""Last byte on the lifeline: no descendant is left. Before it comes the errno of a command that cannot be started."""
ENDING_SECONDS = 3.0
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_PAUSE_SECONDS, _LOOKING_SECONDS = 0.002, 1.0


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def die_with_parent(parent: int, number: int) -> None:
    """Have Linux send this process a signal when the thread of `parent` that started it ends, even if it hangs."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def outlive_parent() -> None:
    """Take `die_with_parent` back, in a process that looks after its parent itself."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of the processes that children leave behind (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children(but: Collection[int] = (), seconds: float = ENDING_SECONDS) -> bool:
    """Kill and reap the children of this process except `but`, and those that they hand up as they end.

    Returns:
        Whether none is left after `seconds`.
    """
    end = time.monotonic() + seconds
    while True:
        for child in (alive := [child for child in children() if child not in but]):
            kill_with_group(child)
            with suppress(ChildProcessError):  # reaped by another
                os.waitpid(child, os.WNOHANG)
        if not alive:
            return True
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE_SECONDS)


def kill_with_group(process: int) -> None:
    """Kill a process with its group; it may not lead one yet."""
    for kill in (os.killpg, os.kill):
        with suppress(OSError):  # it is gone, or another user's
            kill(process, signal.SIGKILL)


def children() -> Iterator[int]:
    """Yield the children of this process, zombies too; /proc/PID/task/TID/children is not in every kernel."""
    own = os.getpid()
    for name in filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()  # the name before may hold anything
        except OSError:  # it has ended
            continue
        if int(fields[1]) == own:
            yield int(name)


def main() -> None:
    """Run the command of the command line."""
    lifeline, command, own = int(sys.argv[1]), sys.argv[2:], os.getpid()
    os.set_inheritable(lifeline, False)
    adopt_orphans()
    process = os.fork()
    if process == 0:
        try:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
                signal.signal(number, signal.SIG_DFL)
            os.setsid()  # its signals to its own group do not reach us
            die_with_parent(own, signal.SIGKILL)
            os.execvp(command[0], command)
        except OSError as error:
            os.write(lifeline, str(error.errno).encode())
        os._exit(127)
    _prctl(_PR_SET_DUMPABLE, 0)  # the command may neither trace us nor take the lifeline
    for descriptor in map(int, os.listdir("/dev/fd")):  # those that the command is to inherit
        if descriptor > 2 and descriptor != lifeline:
            with suppress(OSError):  # that of the listing itself
                os.close(descriptor)
    _wait(process, lifeline)
    kill_with_group(process)
    status = os.waitpid(process, 0)[1]
    if end_children():
        with suppress(OSError):  # the owner is gone
            os.write(lifeline, ENDED)
    _end_as(os.waitstatus_to_exitcode(status))


def _wait(process: int, lifeline: int) -> None:
    """Wait until a child has ended, which is not reaped; until the lifeline is closed; or for a signal to end."""
    owner, (wakeup, writer) = os.getppid(), os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    poll = select.poll()  # a descriptor may have any number
    poll.register(lifeline, select.POLLIN)
    poll.register(wakeup, select.POLLIN)
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        readable = [descriptor for descriptor, _ in poll.poll(1000 * _LOOKING_SECONDS)]
        signals = set(os.read(wakeup, 4096)) if wakeup in readable else set()
        # A fork of the owner may keep the lifeline open.
        if lifeline in readable or signals - {signal.SIGCHLD} or os.getppid() != owner:
            return


def _end_as(code: int) -> None:
    """End with an exit code, or by the signal that it stands for."""
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
