"""Child processes: a `Child` as its parent holds it, and what the child does first (`begin`)."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from grpo_ext.rewards.workers.frames import FrameStream
from grpo_ext.terminal import protect

FOLDER_PREFIX = "grpo_ext_worker_"
"""Prefix of the children's temporary folders; the PID namespace and the PID of their parent follow."""
LOADING_SECONDS = 120.0
"""How long the import of a function or an environment may take, besides its own timeout."""
EXIT_SECONDS = 5.0
"""How long a child that closed its pipe may take to exit by itself, so that its own exit code is reported."""
LARGEST_ANSWER = 2**28
"""Most bytes of an answer."""
_LOCK_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1

_children: set["Child"] = set()
"""Children of this process that have not been killed."""
_starting = threading.Lock()
"""Held while a child is started."""


class Child:
    """A process that answers framed requests, with two pipes and a folder for temporary files.

    Args:
        program: Python source. Its arguments are two descriptors, the memory limit, our PID and `fds`; see `begin`.
        memory_gib: memory it may use; 0 for no limit.
        fds: further descriptors that it inherits.
    """

    def __init__(self, program: str, memory_gib: float, fds: Sequence[int] = ()) -> None:
        with _starting:
            self._start(program, memory_gib, fds)

    def _start(self, program: str, memory_gib: float, fds: Sequence[int]) -> None:
        requests, outgoing = os.pipe()
        incoming, answers = os.pipe()
        os.set_blocking(outgoing, False)  # a child that does not read must not stop us
        self.stream = FrameStream(incoming, outgoing, LARGEST_ANSWER)
        self._open = [outgoing, incoming]
        self._folder = tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{_pid_namespace()}_{os.getpid()}_")
        arguments = (requests, answers, memory_gib, os.getpid(), *fds)
        path = os.pathsep.join(filter(None, sys.path))  # it imports what we can import
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, *map(str, arguments)],
                pass_fds=(requests, answers, *fds),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, "TMPDIR": self._folder},
                start_new_session=True,  # so that it can be killed with all that it started
            )
        except BaseException:
            self._discard()
            raise
        finally:
            os.close(requests)
            os.close(answers)
        _children.add(self)

    def interrupt(self) -> None:
        """Kill it with all that it started, for another thread that waits for its answer and then calls `kill`."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self, grace: float = 0.0) -> int:
        """Kill it with all that it started, after `grace` seconds in which it may exit. Return the exit code."""
        if self._open:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._discard()
        return self.process.wait()

    def _discard(self) -> None:
        """Close the pipes and remove the folder, in which a sandboxed program may have closed its own to us."""
        _children.discard(self)
        while self._open:
            os.close(self._open.pop())
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, 0o700)
        shutil.rmtree(self._folder, ignore_errors=True)


def describe_exit(code: int) -> str:
    """Return how a process with this exit code ended."""
    if code < 0:
        known = {number.value: number.name for number in signal.Signals}
        return f"it was killed by {known.get(-code, f'signal {-code}')}"
    return f"it ended its process with exit code {code}"


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


# In the child.


def begin() -> bool:
    """Apply the limits in `sys.argv` to this child. Return False if its parent is already gone."""
    _, _, memory_gib, parent = sys.argv[1:5]
    die_with_parent()
    if os.getppid() != int(parent):  # it died before `die_with_parent`
        return False
    limit_memory(float(memory_gib))
    protect()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return True


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, even if this process hangs (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_memory(gib: float) -> None:
    """Make an allocation beyond `gib` a MemoryError instead of a machine that swaps; 0 for no limit."""
    if gib > 0:
        import resource  # not on Windows, where this module must still import

        size = int(gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))
