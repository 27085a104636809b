"""Child processes: they import what their parent can, end with it, and are killed with all that they started."""

import contextlib
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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_ext import warden
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


_MOST_DESCRIPTORS, _SPARE_DESCRIPTORS = 2**16, 64
"""To which their limit is raised; left for others."""


# Processes.


def free_descriptors(*, raised: bool = True) -> int:
    """Return how many children's descriptors fit into this process's hard limit, to which its limit is `raised`."""
    import resource  # not on Windows, where this module must still import

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if raised else soft, hard))
            soft = wanted
    return (2**18 if soft == resource.RLIM_INFINITY else soft) - len(os.listdir("/dev/fd")) - _SPARE_DESCRIPTORS


def start_python(program: str, arguments: Iterable[object], fds: Sequence[int]) -> "subprocess.Popen[bytes]":
    """Start Python source in a group of its own, which signals of the terminal do not reach; it imports what we can.

    Args:
        program: the source.
        arguments: its command line.
        fds: descriptors that it inherits.
    """
    command = [sys.executable, "-c", program, *map(str, arguments)]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
    return subprocess.Popen(command, pass_fds=fds, env=_importing(os.environ), **options)


def _importing(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Python imports what we can."""
    return {**variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class Warded:
    """A command with a warden, which ends all that it starts: when it ends, by `end`, or when this process is killed.

    Args:
        command: program and arguments.
        fds: descriptors that it inherits.
        options: of `subprocess.Popen`.

    Attributes:
        process: the warden, which ends as the command does.
    """

    def __init__(self, command: Sequence[str], fds: Sequence[int] = (), **options: Any) -> None:
        self._lifeline, of_warden = socket.socketpair()
        try:
            with of_warden:
                number = of_warden.fileno()
                line = [sys.executable, "-I", "-S", warden.__file__, str(number), *command]
                own: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
                self.process = subprocess.Popen(line, pass_fds=[number, *fds], **own, **options)
        except BaseException:
            self._lifeline.close()
            raise

    def interrupt(self) -> None:
        """Have the warden end everything, and do not wait."""
        with contextlib.suppress(OSError):  # it has ended
            self._lifeline.shutdown(socket.SHUT_WR)

    def end(self, grace: float = 0.0) -> int:
        """End everything after `grace` seconds in which the command may exit. Return its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace)
        self.interrupt()
        return kill_group(self.process, 2 * warden.ENDING_SECONDS)

    def left(self) -> tuple[int | None, bool]:
        """Return, once it has ended, the errno of a command that was not started, and whether something may still run.

        It can be called once.
        """
        with self._lifeline:
            self._lifeline.setblocking(False)
            with contextlib.suppress(OSError):
                last = self._lifeline.recv(16)
                number = last.removesuffix(warden.ENDED).decode()
                return int(number) if number.isdecimal() else None, not last.endswith(warden.ENDED)
        return None, True


def kill_group(process: "subprocess.Popen[bytes]", grace: float) -> int:
    """Kill a process with its group, after `grace` seconds in which it may exit. Return its exit code."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def describe_exit(code: int) -> str:
    """Return how a process with this exit code ended."""
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"it was killed by {names.get(-code, f'signal {-code}')}"
    return f"it ended with exit code {code}"


# In the child.


def end_with_parent(parent: int) -> None:
    """End this process soon after its parent; any thread of the parent may have started it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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
    """A process that answers framed requests, with a socket to it, a warden, and a folder for its temporary files.

    Args:
        program: Python source. Its arguments are a descriptor, the memory limit and `fds`; see `begin`.
        memory_gib: memory it may use; 0 for no limit.
        fds: further descriptors that it inherits.
        withheld: environment variables that it does not get.
    """

    def __init__(self, program: str, memory_gib: float, fds: Sequence[int] = (), withheld: Iterable[str] = ()) -> None:
        with _starting:
            channel, of_child = socket.socketpair()
            self.stream = FrameStream(channel, LARGEST_ANSWER)
            self.folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{_pid_namespace()}_{os.getpid()}_"))
            try:
                with of_child:
                    fds = [of_child.fileno(), *fds]
                    command = [sys.executable, "-c", program, *map(str, (fds[0], memory_gib, *fds[1:]))]
                    env = _importing({**os.environ, "TMPDIR": str(self.folder)})
                    self._warded = Warded(command, fds, env={n: v for n, v in env.items() if n not in set(withheld)})
                    self.process = self._warded.process
            except BaseException:
                self._discard()
                raise
            _children.add(self)

    def interrupt(self) -> None:
        """Kill it with all that it started, for another thread that waits for its answer and then calls `kill`."""
        self._warded.interrupt()

    def kill(self, grace: float = 0.0) -> int:
        """Kill it with all that it started, after `grace` seconds in which it may exit. Return the exit code."""
        if self in _children:
            self._warded.end(grace)
            if self._warded.left()[1]:  # the warden was killed
                _end_those_of(self.folder)
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
        child.interrupt()
    for child in list(_children):
        with contextlib.suppress(Exception):
            child.kill()


def remove_stale_folders() -> None:
    """Remove the folders of children whose parent was killed, and end what still runs there."""
    prefix = f"{FOLDER_PREFIX}{_pid_namespace()}_"
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*_*"):
        parent = folder.name.removeprefix(prefix).partition("_")[0]
        with contextlib.suppress(FileNotFoundError):  # it has just been removed
            own = folder.lstat().st_uid == getattr(os, "getuid", int)()
            if own and parent.isdecimal() and not _is_alive(int(parent)):
                _end_those_of(folder)
                shutil.rmtree(folder, ignore_errors=True)


def _end_those_of(folder: Path) -> None:
    """Kill the processes, but for this one, that work in a child's folder or keep their temporary files there."""
    place = f"{folder}/"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's
            variables = (process / "environ").read_bytes().decode(errors="replace").split("\0")
            places = [os.readlink(process / "cwd"), *(v[7:] for v in variables if v.startswith("TMPDIR="))]
            if any(f"{one}/".startswith(place) for one in places) and int(process.name) != os.getpid():
                warden.kill_with_group(int(process.name))


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
    descriptor, memory_gib = sys.argv[1:3]
    if (size := int(float(memory_gib) * 2**30)) > 0:  # an allocation beyond raises, instead of a machine that swaps
        import resource  # not on Windows, where this module must still import

        resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    protect()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return socket.socket(fileno=int(descriptor))
