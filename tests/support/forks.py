"""Scripts in forks of a process that has imported what they need: they start at once, where Python takes 8 seconds.

`forks.py MODULE...` imports the modules, and answers each line of its input, a function's name and its arguments.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from multiprocessing import connection, get_context
from pathlib import Path

TESTS = Path(__file__).parents[1]
GRACE = 20.0
"""Seconds that the others have to end once a fork has failed, as under a launcher."""
TRAINER = ("datasets", "peft", "transformers.trainer", "grpo_ext.trainer.grpo_trainer")  # the last without vLLM
WITH_DEEPSPEED = ("deepspeed", *TRAINER)
WITH_VLLM = (*TRAINER, "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker")


class Forks:
    """A process that has imported some modules, and its forks."""

    def __init__(self, *modules: str, environment: Mapping[str, str]) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        line = [sys.executable, __file__, *modules]
        self.process = subprocess.Popen(line, **pipes, env=os.environ | environment)
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


def become(line: list[str], environment: dict[str, str], folder: str, said: str) -> None:
    """Be `python LINE` in a folder, of a script or of a module after `-m`."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it may be another one there
    output = os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    module = line[0] == "-m"
    sys.argv = line[module:]
    first = folder if module else str(Path(line[0]).parent)
    given = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = dict.fromkeys([first, *given, str(TESTS), *sys.path[1:]])
    try:
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which forks leave out


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
    for module in sys.argv[1:]:
        import_module(module)
    gc.freeze()  # a collection in a fork would copy all of the memory
    for function, *given in map(json.loads, iter(requests.readline, "")):
        print(json.dumps(globals()[function](*given)), file=answers, flush=True)
    os._exit(0)  # at once


if __name__ == "__main__":
    main()
