"""Scripts in forks of a process that has imported what they need: they start at once, where Python takes 8 seconds.

`forks.py MODULE...` imports the modules, and answers each line of its input, a function's name and its arguments.
"""

import atexit
import ctypes
import fcntl
import gc
import json
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing import connection, get_context
from pathlib import Path

TESTS = Path(__file__).parents[1]
GRACE = 20.0
"""Seconds that the others have to end once a fork has failed, as under a launcher."""
TRAINER = ("datasets", "peft", "transformers.trainer", "grpo_ext.trainer.grpo_trainer")  # the last without vLLM
WITH_DEEPSPEED = ("deepspeed", *TRAINER)
WITH_VLLM = (*TRAINER, "vllm.entrypoints.openai.api_server", "vllm.v1.worker.cpu_worker", "support.forked_vllm")


class Forks:
    """A process that has imported some modules, and its forks."""

    def __init__(self, *modules: str, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "pass_fds": [theirs.fileno()]}
        line = [sys.executable, __file__, str(theirs.fileno()), *modules, ROOM]
        self.process = subprocess.Popen(line, **pipes, env=os.environ | environment | {"ROOM": ROOM})
        self.origin = Origin(ours)
        theirs.close()
        atexit.register(self.process.kill)

    def ask(self, *request):
        """What a function of this file answers there."""
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def run(
        self, line: list[str], environments: list[dict[str, str]], folder: str, said: str, patience: float
    ) -> list[int]:
        """Exit codes of `python LINE` in each environment, side by side; what they print goes into the file `said`."""
        return self.ask("exit_codes", line, environments, folder, said, patience)


class Fork:
    """One fork in a session of its own, `python LINE` to those who watch, signal and kill it; as a `Popen`."""

    def __init__(self, forks: Forks, line: list[str], environment: dict[str, str], said: str) -> None:
        self.forks, self.returncode = forks, None
        self.pid = forks.ask("start", line, environment, os.getcwd(), said)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.forks.ask("ended", self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float = 3600.0) -> int:
        if self.returncode is None:
            self.returncode = self.forks.ask("ended", self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def forks(*modules: str, environment: tuple[tuple[str, str], ...] = ()) -> Forks:
    """One for all tests of this process."""
    return Forks(*modules, environment=dict(environment))


def become(line: list[str], environment: dict[str, str], folder: str, said: str | None) -> None:
    """Be `python LINE` in a folder, of a script, of a module after `-m` or of a program after `-c`."""
    children = Origin.forked()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    show(line, environment)
    tempfile.tempdir = None  # it may be another one there
    if said is not None:
        output = os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
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

        def execute(popen, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
            line = python_line(args)
            if not line or not chosen(line):
                return stock(popen, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            pipes, new_session = rest[3:9], rest[14]
            given = [one if one != -1 else number for number, one in enumerate((pipes[0], pipes[3], pipes[5]))]
            ignored = [n for n in SIGNALS if signal.getsignal(n) == signal.SIG_IGN]
            sys.stdout.flush()
            child = {"line": line, "environment": dict(os.environ if env is None else env), "ignored": ignored}
            child |= {"folder": str(cwd or os.getcwd()), "session": new_session, "first": preexec_fn}
            popen.pid = self.child(child | {"fds": [0, 1, 2, *pass_fds]}, [*given, *pass_fds])
            popen._child_created = True
            popen._close_pipe_fds(*pipes)

        subprocess.Popen._execute_child = execute
        return lambda: setattr(subprocess.Popen, "_execute_child", stock)

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
        become(child["line"], child["environment"], child["folder"], None)
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


def exit_codes(
    line: list[str], environments: list[dict[str, str]], folder: str, said: str, patience: float
) -> list[int]:
    """Negative for a signal; soon after one has failed, the others are killed."""
    ranks = [get_context("fork").Process(target=become, args=(line, one, folder, said)) for one in environments]
    for rank in ranks:
        rank.start()
    until = time.monotonic() + patience
    while running := [rank for rank in ranks if rank.exitcode is None]:
        connection.wait([rank.sentinel for rank in running], timeout=max(0.0, until - time.monotonic()))
        if time.monotonic() >= until:
            for rank in running:
                rank.kill()
        if any(rank.exitcode for rank in ranks):
            until = min(until, time.monotonic() + GRACE)
    return [rank.exitcode for rank in ranks]


STARTED = {}


def alone(*given) -> None:
    """Be a process whose signals are not those that the tests ignore."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    become(*given)


def start(line: list[str], environment: dict[str, str], folder: str, said: str) -> int:
    process = get_context("fork").Process(target=alone, args=(line, environment, folder, said))
    process.start()
    STARTED[process.pid] = process
    return process.pid


def ended(pid: int, patience: float) -> int | None:
    """Its exit code, or None where it goes on after some seconds."""
    STARTED[pid].join(patience)
    return STARTED[pid].exitcode


def main() -> None:
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what reads or prints here does not meddle with them
    os.dup2(2, 1)
    sys.path[0] = str(TESTS)
    for module in sys.argv[2:-1]:
        import_module(module)
    gc.freeze()  # a collection in a fork would copy all of the memory
    connection = socket.socket(fileno=int(sys.argv[1]))
    if os.fork() == 0:
        serve(connection)
    connection.close()
    for function, *given in map(json.loads, iter(requests.readline, "")):
        print(json.dumps(globals()[function](*given)), file=answers, flush=True)
    os._exit(0)  # at once


if __name__ == "__main__":
    main()
