"""The job of the sandbox's launcher: limits, readable paths, environment, system call filter."""

import contextlib
import functools
import marshal
import math
import os
import platform
import secrets
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from grpo_ext.rewards.code.seccomp import MACHINES, bpf_filter

MAX_FILES = 1024  # in its folder
WORKING_FOLDER = "/sandbox"  # working folder of a program in its own mount namespace
_GRACE_SECONDS = 30.0  # after which a namespace ends itself
_READABLE = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/nix/store")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


@dataclass(frozen=True)
class Limits:
    """Limits of one program: wall-clock and CPU seconds, address space, folder, output, files, threads.

    Raises:
        ValueError: a limit that is not positive, or too small for an interpreter to start.
    """

    timeout: float = 5.0
    memory_mb: int = 512
    disk_mb: int = 16
    output_kb: int = 1024
    open_files: int = 64
    threads: int = 64
    cpu_seconds: float | None = None  # None: as many as timeout

    def __post_init__(self) -> None:
        least_of = {"timeout": 0.0, "memory_mb": 31, "disk_mb": 0, "output_kb": 0, "threads": 0, "open_files": 15}
        for name, least in least_of.items():
            if not getattr(self, name) > least:
                raise ValueError(f"{name}={getattr(self, name)}: no program can run. Set {name} > {least}.")


def describe(
    argv: Sequence[str],
    files: Mapping[str, bytes],
    limits: Limits,
    method: str,
    folder: str,
    readable: Sequence[str],
    packages: bool,
    forks: bool,
) -> bytes:
    """Return the launcher's code and its job, as `sandbox_child.py` reads them."""
    isolated, machine = method == "namespaces", platform.machine()
    site_packages = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    installed = sorted(site_packages) if packages else []
    paths, links = _visible([*readable, *installed])
    return _launcher() + marshal.dumps(
        {
            "method": method,
            "parent": os.getpid(),
            "argv": list(argv),
            "env": {**_environment(folder), "PYTHONPATH": os.pathsep.join(installed)},
            "files": dict(files),
            "folder": folder,
            "readable": paths,
            "links": links,
            "limits": _rlimits(limits, isolated),
            "filter": bpf_filter(machine, isolated=isolated, forks=forks) if machine in MACHINES else b"",
            "max_files": MAX_FILES,
            "disk_bytes": limits.disk_mb << 20,
            "deadline_s": max(limits.timeout, limits.cpu_seconds or 0) + _GRACE_SECONDS,
            "uid": (1 << 30) + secrets.randbelow(1 << 29),
        }
    )


@functools.cache
def _launcher() -> bytes:
    path = Path(__file__).with_name("sandbox_child.py")
    return marshal.dumps(compile(path.read_text(), "sandbox_child", "exec"))


def launch_command(job_fd: int, status_fd: int) -> list[str]:
    """Return the command that starts the launcher from a file with the bytes of `describe`."""
    code = "import marshal, sys; exec(marshal.load(open(int(sys.argv[1]), 'rb', closefd=False)))"
    return [python(), "-I", "-S", "-B", "-c", code, str(job_fd), str(status_fd)]


def _rlimits(limits: Limits, isolated: bool) -> dict[str, int]:
    values = {
        "CPU": math.ceil(limits.cpu_seconds or limits.timeout) + 1,
        "AS": limits.memory_mb << 20,
        "FSIZE": limits.disk_mb << 20,
        "NOFILE": limits.open_files,
        "CORE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
    }
    if isolated:  # counted per uid or user namespace, which only the program and its launchers use
        values["NPROC"] = limits.threads + 3
    return values


def _environment(folder: str) -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX"), "1")
    return {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **threads}


@functools.cache
def python() -> str:
    """Return the path of the interpreter, without the links of a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _visible(extra: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the real paths to show, without nested ones, and the links of the root (/bin -> usr/bin)."""
    prefix = os.path.realpath(sys.base_prefix)
    wanted = [*_READABLE, *_DEVICES, *(os.path.join(prefix, name) for name in ("bin", "lib", "lib64")), *extra]
    links = {path: os.readlink(path) for path in ("/bin", "/lib", "/lib64") if os.path.islink(path)}
    paths: list[str] = []
    for path in sorted({os.path.realpath(p) for p in [*wanted, python()] if os.path.exists(p)}):
        if not paths or not path.startswith(paths[-1] + "/"):
            paths.append(path)
    return paths, links


@contextlib.contextmanager
def folder(method: str) -> Iterator[str]:
    """Yield the program's working folder: a path inside its namespace, or a temporary folder."""
    if method == "namespaces":
        yield WORKING_FOLDER
    else:  # its removal reopens folders that the program has closed to us
        with tempfile.TemporaryDirectory(prefix="grpo_ext_sandbox_", ignore_cleanup_errors=True) as path:
            yield path


@contextlib.contextmanager
def sealed(content: bytes) -> Iterator[IO[bytes]]:
    """Yield a file in memory that a process that inherits it can read, but neither change nor grow."""
    import fcntl  # missing on systems where this module must still import

    with os.fdopen(os.memfd_create("job", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC), "w+b", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) or 0 :]
        file.seek(0)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
        yield file
