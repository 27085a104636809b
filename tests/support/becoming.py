"""A process becomes `python LINE`, and the Python that it starts by `subprocess` becomes so in forks of it as it was.

A fork takes 0.1 seconds where Python and its imports take ten. Others see it as they would see what it stands for:
parent and children, exit code, session, descriptors, and in `/proc` its command line and environment.
"""

import atexit
import ctypes
import fcntl
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

TESTS = Path(__file__).parents[1]


def become(line: list[str], environment: dict[str, str], folder: str) -> None:
    """Be `python LINE` in a folder, of a script, of a module after `-m` or of a program after `-c`."""
    children = Origin.forked()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    show(line, environment)
    tempfile.tempdir = None  # it may be another one there
    children.start_python()
    named = line[0] in ("-m", "-c")
    sys.argv = line[line[0] == "-m" :]
    first = folder if named else str(Path(line[0]).parent)
    given = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = dict.fromkeys([first, *given, str(TESTS), *sys.path[1:]])
    try:
        if line[0] == "-m":
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif line[0] == "-c":
            del sys.argv[1]
            exec(line[1], {"__name__": "__main__"})
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()  # which forks leave out


# What others see of a process.


ROOM = "." * 30000


def show(line: list[str], environment: dict[str, str]) -> None:
    """Let `/proc` show the command line and the environment, over those with which this process began."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, arguments_end, variables, variables_end = map(int, fields[45:49])
    for words, begin, end in (
        ([sys.executable, *line], arguments, arguments_end),
        ([f"{name}={value}" for name, value in environment.items()], variables, variables_end),
    ):
        text = "".join(f"{word}\0" for word in words).encode()
        ctypes.memmove(begin, text[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


# Python's own child processes.


class Origin:
    """A process that has imported some modules and does nothing but fork children for an ancestor, which adopts them.

    `start_python` lets the `subprocess` of this process start Python so; other programs it starts as ever.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.lock = connection, threading.Lock()

    @classmethod
    def forked(cls) -> "Origin":
        """One of this process as it is now."""
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            serve(theirs)
        theirs.close()
        return cls(ours)

    def start_python(self, chosen: Callable[[list[str]], bool] = bool) -> Callable[[], None]:
        """From now on fork where `subprocess` would start Python with `chosen` arguments; returns what undoes it."""
        stock = subprocess.Popen._execute_child

        def execute(popen, args, *rest):
            line = python_line(args)
            if not line or not chosen(line):
                return stock(popen, args, *rest)
            ignored = [n for n in SIGNALS if signal.getsignal(n) == signal.SIG_IGN]
            self.execute(popen, line, rest, ignored)

        subprocess.Popen._execute_child = execute
        return lambda: setattr(subprocess.Popen, "_execute_child", stock)

    def execute(self, popen: subprocess.Popen, line: list[str], options: tuple, ignored: list[int]) -> None:
        """Do what `Popen._execute_child` does with these options, for `python LINE`."""
        _, preexec_fn, _, pass_fds, cwd, env, _, _, _, *pipes, _, _, _, _, _, session, _ = options
        given = [one if one != -1 else number for number, one in enumerate((pipes[0], pipes[3], pipes[5]))]
        child = {"line": line, "environment": dict(os.environ if env is None else env), "ignored": ignored}
        child |= {"folder": str(cwd or os.getcwd()), "session": session, "first": preexec_fn}
        sys.stdout.flush()
        popen.pid = self.child(child | {"fds": [0, 1, 2, *pass_fds]}, [*given, *pass_fds])
        popen._child_created = True
        popen._close_pipe_fds(*pipes)

    def child(self, request: dict, fds: list[int]) -> int:
        """Its process id; its parent is this process."""
        with self.lock:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self.connection, [pickle.dumps(request)], fds)
                return int(self.connection.recv(100))
            finally:
                ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)


PR_SET_CHILD_SUBREAPER = 36
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def python_line(args) -> list[str]:
    """What follows `python -u`, if it is a module, a script, or the program that samples completions."""
    if isinstance(args, (str, bytes, os.PathLike)) or [*args][:1] != [sys.executable]:
        return []
    line = [word for i, word in enumerate(map(str, args)) if i and (i > 1 or word != "-u")]
    kind, *rest = line or [""]
    known = kind == "-m" or kind.endswith(".py") or (kind == "-c" and "rollout.process.child" in rest[0])
    return line if known else []


def serve(connection: socket.socket) -> None:
    """Fork a child for each request, until the other side has ended."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    while True:
        message, fds, *_ = socket.recv_fds(connection, 1 << 20, 250)
        if not message:
            os._exit(0)
        answer, write = os.pipe()
        between = os.fork()
        if between == 0:
            between, pid = os.getpid(), os.fork()
            if pid == 0:
                be_child(pickle.loads(message), fds, between)
            os.write(write, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)  # only then is its child adopted
        connection.send(os.read(answer, 100))
        for fd in (*fds, answer, write):
            os.close(fd)


def be_child(child: dict, fds: list[int], between: int) -> None:
    code = 1
    try:
        while os.getppid() == between:  # until it is adopted
            time.sleep(0.0005)
        spare = [fcntl.fcntl(fd, fcntl.F_DUPFD, 500) for fd in fds]
        os.closerange(0, 500)
        for fd, number in zip(spare, child["fds"], strict=True):
            os.dup2(fd, number)
            os.close(fd)
        for number in SIGNALS:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if number in child["ignored"] else default)
        if child["session"]:
            os.setsid()
        if child["first"]:
            child["first"]()
        become(child["line"], child["environment"], child["folder"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
