"""Child processes: they import what their parent can, end with it, and are killed with all that they started."""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from grpo_ext.frames import FrameStream
from grpo_ext.terminal import protect

LOADING_SECONDS = 120.0
"""How long the import of a function or an environment may take, besides its own timeout."""
EXIT_SECONDS = 5.0
"""How long a child that closed its end may take to exit by itself, so that its own exit code is reported."""
LARGEST_ANSWER = 2**28
"""Most bytes of an answer."""
TRACEBACK_LINES = 6
_POLL_SECONDS = 0.5


# Processes.


def start_python(
    program: str, arguments: Iterable[object], fds: Sequence[int], **variables: str
) -> "subprocess.Popen[bytes]":
    """Start Python source in a group of its own, which signals of the terminal do not reach; it imports what we can.

    Args:
        program: the source.
        arguments: its command line.
        fds: descriptors that it inherits.
        variables: added to its environment.
    """
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables},
        start_new_session=True,
    )


def kill_group(process: "subprocess.Popen[bytes]", grace: float = 0.0) -> int:
    """Kill a process with its group, after `grace` seconds in which it may exit. Return its exit code."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def describe_exit(code: int) -> str:
    """Return how a process with this exit code ended."""
    if code < 0:
        known = {number.value: number.name for number in signal.Signals}
        return f"it was killed by {known.get(-code, f'signal {-code}')}"
    return f"it ended with exit code {code}"


# In the child.

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def die_with_parent(parent: int, number: int) -> None:
    """Have Linux send this process a signal when the thread of `parent` that started it ends, even if it hangs."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def end_with_parent(parent: int) -> None:
    """End this process soon after its parent; any thread of the parent may have started it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def adopt_orphans() -> None:
    """Become the parent of the processes that children leave behind (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def traceback_tail(error: BaseException) -> str:
    """Return the last lines of a traceback, joined into one."""
    lines = [line.strip() for line in "".join(traceback.format_exception(error)).strip().split("\n")]
    return " | ".join(line for line in lines[-TRACEBACK_LINES:] if line.strip("^~ "))[-1500:]


# Children that run others' code: they answer framed requests, with a limit of memory and a folder of their own.

FOLDER_PREFIX = "grpo_ext_worker_"
"""Prefix of the children's temporary folders; the PID namespace and the PID of their parent follow."""
_LOCK_SECONDS = 5.0
_children: set["Child"] = set()
"""Children of this process that have not been killed."""
_starting = threading.Lock()
"""Held while a child is started."""


class Child:
    """A process that answers framed requests, with a socket to it and a folder for its temporary files.

    Args:
        program: Python source. Its arguments are a descriptor, the memory limit, our PID and `fds`; see `begin`.
        memory_gib: memory it may use; 0 for no limit.
        fds: further descriptors that it inherits.
    """

    def __init__(self, program: str, memory_gib: float, fds: Sequence[int] = ()) -> None:
        with _starting:
            channel, theirs = socket.socketpair()
            self.stream = FrameStream(channel, LARGEST_ANSWER)
            self.folder = tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{_pid_namespace()}_{os.getpid()}_")
            try:
                with theirs:
                    fds = [theirs.fileno(), *fds]
                    arguments = (fds[0], memory_gib, os.getpid(), *fds[1:])
                    self.process = start_python(program, arguments, fds, TMPDIR=self.folder)
            except BaseException:
                self._discard()
                raise
            _children.add(self)

    def interrupt(self) -> None:
        """Kill it with all that it started, for another thread that waits for its answer and then calls `kill`."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self, grace: float = 0.0) -> int:
        """Kill it with all that it started, after `grace` seconds in which it may exit. Return the exit code."""
        if self in _children:
            kill_group(self.process, grace)
            self._discard()
        return self.process.wait()

    def _discard(self) -> None:
        """Close the socket and remove the folder, in which a sandboxed program may have closed its own to us."""
        _children.discard(self)
        self.stream.channel.close()
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, 0o700)
        shutil.rmtree(self.folder, ignore_errors=True)


def kill_children() -> None:
    """Kill all children of this process and start none from now on; for a process that exits without cleanup."""
    _starting.acquire(timeout=_LOCK_SECONDS)  # never released: another thread would replace the children it misses
    for child in list(_children):
        with contextlib.suppress(Exception):
            child.kill()


def remove_stale_folders() -> None:
    """Remove the folders of children whose parent was killed and could not remove them."""
    prefix = f"{FOLDER_PREFIX}{_pid_namespace()}_"
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*_*"):
        parent = folder.name.removeprefix(prefix).partition("_")[0]
        with contextlib.suppress(FileNotFoundError):  # it has just been removed
            own = folder.lstat().st_uid == getattr(os, "getuid", int)()
            if own and parent.isdecimal() and not _is_alive(int(parent)):
                shutil.rmtree(folder, ignore_errors=True)


def _pid_namespace() -> int:
    """Inode of the PID namespace: containers may share a temporary folder, but not PIDs."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's, or no PID
        return True
    return True


def begin() -> socket.socket:
    """Apply the limits in `sys.argv` to this `Child`. Return its socket."""
    descriptor, memory_gib, parent = sys.argv[1:4]
    die_with_parent(int(parent), signal.SIGKILL)
    if (size := int(float(memory_gib) * 2**30)) > 0:  # an allocation beyond raises, instead of a machine that swaps
        import resource  # not on Windows, where this module must still import

        resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    protect()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return socket.socket(fileno=int(descriptor))
