"""Run an untrusted Python program without network, other files or surviving processes, and within its limits.

The first method that this kernel allows is used. Both work with and without root:

- `namespaces`: its own namespaces (mount, pid, network, ipc, and user or a fresh uid); its folder is in memory.
- `landlock`: the parent's namespaces, with files closed by Landlock and the rest by the system call filter; its folder
  is a temporary one without subfolders.

A third, `seccomp`, leaves files readable and is used only if the caller does not require more.
"""

import contextlib
import functools
import os
import platform
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO

from grpo_ext.rewards.code import sandbox_job as job
from grpo_ext.rewards.code.sandbox_job import Limits
from grpo_ext.rewards.code.seccomp import MACHINES

DEVNULL, PIPE = subprocess.DEVNULL, subprocess.PIPE
METHODS = ("namespaces", "landlock", "seccomp")
PROTECTIONS = {"isolated": METHODS[:2], "network": METHODS}  # min_protection -> the methods that reach it
_START_SECONDS = 30.0  # for the launcher, on a machine under load; the program's own time starts after it
_POLL_SECONDS = 0.05


class SandboxError(RuntimeError):
    """This machine cannot run an untrusted program as safely as asked."""


@dataclass(frozen=True)
class ProgramOutcome:
    """Result of a program: output, exit code as a shell reports it (128 + signal), and the limit that stopped it.

    `stopped` is "", "time", "output" or "folder or threads"; the kernel's own limits (memory, CPU) show as exit codes.
    """

    stdout: bytes
    stderr: bytes
    returncode: int
    stopped: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, without an error."""
        return self.returncode == 0 and not self.stopped


@dataclass
class Program:
    """A started program. Leaving the `with` block of `start` kills it and removes everything it made."""

    popen: "subprocess.Popen[bytes]"
    limits: Limits
    method: str
    folder: str
    status: int
    started: float = field(default_factory=time.monotonic)

    def wait_until_ready(self) -> None:
        """Wait until the launcher becomes the program, whose time starts now.

        Raises:
            SandboxError: the launcher could not give up a right.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self.status, selectors.EVENT_READ)
            status = os.read(self.status, 4096) if selector.select(_START_SECONDS) else b"!no start within 30 s"
        if status[:1] != b"R":
            reason = status[1:].decode(errors="replace") or "the launcher died"
            raise SandboxError(f"sandbox {self.method!r}: {reason}")
        self.started = time.monotonic()

    @property
    def remaining(self) -> float:
        """Seconds of wall-clock time left."""
        return self.started + self.limits.timeout - time.monotonic()

    def over_limit(self) -> str:
        """Return the limit that is exceeded, or ""; only limits that the kernel does not enforce here."""
        if self.remaining <= 0:
            return "time"
        if self.method == "namespaces":
            return ""
        try:
            sizes = [entry.stat(follow_symlinks=False).st_size for entry in os.scandir(self.folder)]
            with open(f"/proc/{self.popen.pid}/status") as file:
                threads = next((int(line.split()[1]) for line in file if line.startswith("Threads:")), 0)
        except OSError:
            return ""  # it has ended, or removes files while we count
        over = sum(sizes) > self.limits.disk_mb << 20 or len(sizes) > job.MAX_FILES or threads > self.limits.threads
        return "folder or threads" if over else ""

    def kill(self) -> None:
        """Kill the program and every process it started, and wait until they are gone."""
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(signal.SIGTERM if self.method == "namespaces" else signal.SIGKILL)
        try:
            self.popen.wait(5)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


@contextlib.contextmanager
def start_program(
    argv: Sequence[str],
    files: Mapping[str, bytes],
    limits: Limits,
    *,
    method: str,
    readable: Sequence[str] = (),
    packages: bool = False,
    forks: bool = False,
    pass_fds: Sequence[int] = (),
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
) -> Iterator[Program]:
    """Start `argv` in a sandbox with `files` (name -> content); kill it and clean up at the end.

    `readable` lists paths that it may read besides Python and /usr; `packages` adds site-packages;
    `forks` lets it start processes, for a program of ours.

    Raises:
        SandboxError: this is not Linux, or on `wait_until_ready`.
    """
    read_status, write_status = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, read_status)
        with contextlib.closing(os.fdopen(write_status, "wb", buffering=0)):
            folder = stack.enter_context(job.folder(method))
            described = job.describe(argv, files, limits, method, folder, readable, packages, forks)
            with job.sealed(described) as file:
                popen = subprocess.Popen(
                    job.launch_command(file.fileno(), write_status),
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=(file.fileno(), write_status, *pass_fds),
                    env={},
                    cwd="/",
                    start_new_session=True,
                )
        stack.enter_context(popen)
        program = Program(popen, limits, method, folder, read_status)
        try:
            yield program
        finally:
            program.kill()


def run(
    source: str,
    *,
    stdin: str = "",
    limits: Limits = Limits(),  # noqa: B008  frozen
    min_protection: str = "isolated",
    method: str | None = None,
    readable: Sequence[str] = (),
    packages: bool = False,
    forks: bool = False,
) -> ProgramOutcome:
    """Run Python `source` in a sandbox and wait for it; never raises because of the program.

    It has an empty environment, `stdin`, Python and /usr, and writes only to its working folder. With `packages` it
    can import this environment's site-packages. `min_protection` is "isolated" (no network, no other files, no other
    processes) or "network" (files may be open to it). `method` forces one of METHODS. `forks`: as `start_program`.

    Raises:
        SandboxError: this machine cannot give `min_protection`. ValueError: unknown `min_protection`.
    """
    method = method or available(min_protection)
    with (
        job.sealed(stdin.encode("utf-8", "surrogatepass")) as text,
        start_program(
            [*python_argv(packages), "main.py"],
            {"main.py": source.encode("utf-8", "surrogatepass")},
            limits,
            method=method,
            readable=readable,
            packages=packages,
            forks=forks,
            stdin=text,
        ) as program,
    ):
        program.wait_until_ready()
        return _collect(program)


def python_argv(packages: bool) -> list[str]:
    """Return the interpreter's command line inside the sandbox, up to the script."""
    return [job.python(), *(("-s", "-P", "-S", "-B") if packages else ("-I", "-S", "-B")), "-X", "utf8"]


def available(min_protection: str = "isolated") -> str:
    """Return the strongest of METHODS that works here, tested once per process.

    Raises:
        SandboxError: none reaches `min_protection`; the message names what each lacks. ValueError: unknown level.
    """
    if min_protection not in PROTECTIONS:
        levels = ", ".join(PROTECTIONS)
        raise ValueError(f"min_protection={min_protection!r}: no such level. Choose one of {levels}.")
    method, problems = _probe()
    if method in PROTECTIONS[min_protection]:
        return str(method)
    raise SandboxError(
        f"cannot shut off the network and the files for an untrusted program on this machine ({'; '.join(problems)}). "
        f"Use Linux 5.13 or newer with Landlock, or user namespaces (in a container: --security-opt "
        f"seccomp=unconfined)" + (", or min_protection: network, which leaves files readable." if method else ".")
    )


@functools.cache
def _probe() -> tuple[str | None, tuple[str, ...]]:
    problems = []
    if not sys.platform.startswith("linux"):
        return None, (f"{sys.platform}: Linux only",)
    for method in METHODS:
        if method != "namespaces" and platform.machine() not in MACHINES:
            problems.append(f"{method}: no table of system calls for {platform.machine()}")
            continue
        try:
            outcome = run("print(6 * 7)", method=method, limits=replace(Limits(), timeout=_START_SECONDS))
        except (SandboxError, OSError) as error:
            problems.append(str(error))
            continue
        if outcome.stdout == b"42\n" and outcome.ok:
            return method, tuple(problems)
        problems.append(f"{method}: Python does not start there: {outcome.stderr[-300:].decode(errors='replace')}")
    return None, tuple(problems)


def _collect(program: Program) -> ProgramOutcome:
    """Read both outputs up to the limit until the program ends or exceeds a limit."""
    limit, output, stopped = program.limits.output_kb << 10, {1: bytearray(), 2: bytearray()}, ""
    with selectors.DefaultSelector() as selector:
        for number, pipe in ((1, program.popen.stdout), (2, program.popen.stderr)):
            assert pipe is not None
            selector.register(pipe, selectors.EVENT_READ, number)
        while selector.get_map() and not stopped:
            for key, _ in selector.select(min(_POLL_SECONDS, max(0.0, program.remaining))):
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                elif len(output[key.data]) + len(chunk) > limit:
                    stopped = "output"
                output[key.data] += chunk[: limit - len(output[key.data])]
            stopped = stopped or program.over_limit()
    while not stopped and program.popen.poll() is None:  # its outputs are closed, it is not
        stopped = program.over_limit()
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.popen.wait(min(_POLL_SECONDS, max(0.0, program.remaining)))
    seconds = time.monotonic() - program.started
    program.kill()
    code = program.popen.returncode
    return ProgramOutcome(bytes(output[1]), bytes(output[2]), code if code >= 0 else 128 - code, stopped, seconds)
