"""The sandbox: hostile programs are contained by each method this machine has, honest ones run, nothing is left."""

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo_ext.rewards.code import sandbox
from grpo_ext.rewards.code.sandbox import SandboxError, run
from grpo_ext.rewards.code.sandbox_job import Limits
from grpo_ext.rewards.code.seccomp import bpf_filter
from support.hostile import ATTEMPTS, ENDLESS, KILLERS, TRY

QUICK = Limits(timeout=1.0, memory_mb=256, disk_mb=8, output_kb=64)
PATIENT = Limits(timeout=60.0, memory_mb=256, disk_mb=8, output_kb=64)  # for programs that end by themselves


def works(method: str) -> bool:
    try:
        return run("print(1)", method=method, limits=PATIENT).ok
    except SandboxError:
        return False


WRITTEN = [Path(path) for path in ("/tmp/x", "/x", "/usr/x", "/etc/x", "/dev/shm/x")]
METHODS = [pytest.param(m, marks=[] if works(m) else pytest.mark.skip(f"no {m} here")) for m in sandbox.METHODS[:2]]
on_each_method = pytest.mark.parametrize("method", METHODS)


def descendants() -> set[int]:
    """Every process below this one, however deep."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ProcessLookupError):
            continue
    found: set[int] = set()
    while new := {pid for pid, parent in parents.items() if parent in found | {os.getpid()}} - found:
        found |= new
    return found


@pytest.fixture(scope="module", autouse=True)
def _adopt_orphans():
    """A daemon that escapes becomes our child, where `descendants` sees it."""
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)
    yield
    libc.prctl(36, 0, 0, 0, 0)


def home() -> list[str]:
    """What is in the home directory, apart from Python."""
    python = Path(os.path.realpath(sys.executable)).parents
    return [str(p) for p in Path.home().iterdir() if p.resolve() not in python]


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Things to attack; afterwards all of them are as they were, and nothing is left."""
    outside, temporary = tmp_path / "outside", tmp_path / "temporary"
    outside.mkdir()
    temporary.mkdir()
    (outside / "secret").write_text("BREACH: secret")
    (outside / "shown").write_text("shown")
    (outside / "shown").chmod(0o666)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("GRPO_EXT_TEST_SECRET", "BREACH")
    before, there = descendants(), [path for path in WRITTEN if path.exists()]
    shown = (outside / "shown").stat()
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        unix.bind(os.path.relpath(tmp_path / "socket"))
        name = f"grpo_ext_test_{os.getpid()}"
        abstract.bind("\0" + name)
        for server in (unix, abstract):
            server.listen()
        yield {
            "home": home(), "secret": str(outside / "secret"), "outside": str(outside),
            "shown": str(outside / "shown"), "port": tcp.getsockname()[1], "parent": os.getpid(),
            "unix": str(tmp_path / "socket"), "abstract": name,
        }  # fmt: skip
    assert descendants() <= before
    assert list(temporary.iterdir()) == []
    assert sorted(p.name for p in outside.iterdir()) == ["secret", "shown"]
    assert (outside / "shown").read_text() == "shown"
    after = (outside / "shown").stat()
    assert (after.st_mode, after.st_uid, after.st_mtime) == (shown.st_mode, shown.st_uid, shown.st_mtime)
    assert [path for path in WRITTEN if path.exists()] == there


def attack(program: str, world: dict, method: str, limits: Limits) -> sandbox.ProgramOutcome:
    outcome = run(TRY + program.format(**world), method=method, limits=limits, readable=[world["shown"]])
    assert b"BREACH" not in outcome.stdout + outcome.stderr, outcome
    assert b"SyntaxError" not in outcome.stderr, outcome
    return outcome


@pytest.mark.cases(20)
@on_each_method
@pytest.mark.parametrize("name", ATTEMPTS)
def test_what_is_forbidden_fails(name, method, world):
    outcome = attack(ATTEMPTS[name], world, method, PATIENT)
    assert b"refused" in outcome.stdout or outcome.stopped == "folder or threads", outcome
    assert outcome.returncode == 0 or outcome.stopped, outcome


@pytest.mark.cases(10)
@on_each_method
@pytest.mark.parametrize("name", ENDLESS)
def test_what_does_not_end_is_ended(name, method, world):
    start, limits = time.monotonic(), QUICK
    by = {"stdout by the gigabyte": "output", "stderr by the gigabyte": "output"}
    if method == "landlock" and name == "thread bomb":  # a busy machine starts no 64 threads in a second
        by[name], limits = "folder or threads", PATIENT
    outcome = attack(ENDLESS[name], world, method, limits)
    if name != "many small files":  # which limit comes first depends on the disk
        assert outcome.stopped == by.get(name, "time"), outcome
    assert outcome.stopped
    assert not outcome.ok
    assert outcome.seconds < limits.timeout + 20
    assert time.monotonic() - start < 120
    assert len(outcome.stdout) <= QUICK.output_kb << 10 >= len(outcome.stderr)


@on_each_method
@pytest.mark.parametrize("name", KILLERS)
def test_what_kills_kills_itself_at_most(name, method, world):
    attack(KILLERS[name], world, method, QUICK)
    assert run("print(1)", method=method, limits=PATIENT).stdout == b"1\n"


OPEN = ("read the home directory", "spoil what it may read", "tcp", "unix sockets", "environment")


@pytest.mark.parametrize("name", [*OPEN, "names of files by a watch"])
def test_the_attacks_succeed_outside_the_sandbox(name, tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_EXT_TEST_SECRET", "1")
    (tmp_path / "secret").touch()
    (tmp_path / "shown").touch()
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(os.path.relpath(tmp_path / "socket"))
        unix.listen()
        fields = {
            "home": home(), "secret": str(tmp_path / "secret"), "shown": str(tmp_path / "shown"),
            "port": tcp.getsockname()[1], "unix": str(tmp_path / "socket"), "abstract": "x",
        }  # fmt: skip
        program = ATTEMPTS[name].format(**fields)
        done = subprocess.run([sys.executable, "-c", TRY + program], capture_output=True, text=True, cwd=tmp_path)
    assert "BREACH" in done.stdout, done


@on_each_method
def test_the_program_dies_with_its_parent(method, world):
    code = (
        "from grpo_ext.rewards.code import sandbox\n"
        f"sandbox.run('import time; print(1); time.sleep(1e6)', method={method!r}, limits=sandbox.Limits(timeout=300))"
    )
    before = descendants()
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": world["outside"]})
    wanted = 4 if method == "namespaces" else 2
    wait_for(lambda: len(descendants() - before) >= wanted)
    time.sleep(0.3)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert parent.returncode == -signal.SIGKILL
    wait_for(lambda: not reaped() and descendants() <= before)
    assert descendants() <= before
    for folder in Path(world["outside"]).glob("grpo_ext_sandbox_*"):  # nobody is left to remove it
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def wait_for(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


# honest programs


@on_each_method
@pytest.mark.parametrize(
    ("source", "stdin", "stdout", "returncode"),
    [
        ("print(input() + '!')", "grüß\n", "grüß!\n", 0),
        ("import sys; sys.exit(3)", "", "", 3),
        ("import sys; print(sys.stdin.read(1) or 'closed')", "", "closed\n", 0),
        ("1 / 0", "", "", 1),
        ("print(__name__, [n for n in dir() if n[0] != '_'])", "", "__main__ []\n", 0),
        ("open('a', 'w').write('x'); print(open('a').read())", "", "x\n", 0),
        ("import tempfile; f = tempfile.TemporaryFile(); f.write(b'x'); print(1)", "", "1\n", 0),
        ("import asyncio; print(asyncio.run(asyncio.sleep(0, 7)))", "", "7\n", 0),
        ("import concurrent.futures as c; print(list(c.ThreadPoolExecutor(8).map(abs, [-1, 2])))", "", "[1, 2]\n", 0),
        ("import random, hashlib, decimal, re, json, datetime, uuid; print(len(str(uuid.uuid4())))", "", "36\n", 0),
        ("print(sum(map(int, input().split())))", " ".join(map(str, range(100_000))), "4999950000\n", 0),
    ],
)
def test_honest_programs_run(method, source, stdin, stdout, returncode):
    outcome = run(source, stdin=stdin, method=method, limits=Limits(timeout=60.0))
    assert (outcome.stdout.decode(), outcome.returncode, outcome.stopped) == (stdout, returncode, "")


COUNT_THREADS = """
import threading, time
threading.stack_size(65536)
count = 1
try:
    while count < 1000:
        threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
        count += 1
except RuntimeError:
    pass
print(count, flush=True)
"""


@pytest.mark.parametrize("method", METHODS[:1])
def test_in_namespaces_a_program_is_nobody_and_alone(method):
    source = "import os; print(os.getuid() > 0 < os.getgid(), os.getpid() == os.getpgrp() == os.getsid(0))"
    assert run(source, method=method, limits=PATIENT).stdout == b"True True\n"
    threads = int(run(COUNT_THREADS, method=method, limits=Limits(timeout=60.0, threads=20)).stdout)
    assert 10 <= threads <= 22


@pytest.mark.cases(1)
@on_each_method
def test_many_run_at_once(method, world):
    with ThreadPoolExecutor(8) as pool:
        said = pool.map(lambda n: run(f"print({n})", method=method, limits=PATIENT).stdout, range(40))
        assert list(said) == [f"{n}\n".encode() for n in range(40)]


@on_each_method
def test_a_folder_is_the_programs_own(method):
    source = "import os; print(os.listdir('.')); open('left', 'w')"
    assert [run(source, method=method).stdout for _ in range(2)] == [b"['main.py']\n"] * 2


@on_each_method
def test_packages_are_there_on_request(method):
    source = "import yaml; print(yaml.safe_load('[1]'))"
    assert run(source, method=method, packages=True, limits=PATIENT).stdout == b"[1]\n"
    assert b"ModuleNotFoundError" in run(source, method=method, limits=PATIENT).stderr


@pytest.mark.slow
@on_each_method
def test_exit_codes_are_a_shells(method):
    assert run("import ctypes; ctypes.string_at(0)", method=method).returncode == 128 + signal.SIGSEGV
    assert run("while True: pass", method=method, limits=QUICK).stopped == "time"
    cpu = run("while True: pass", method=method, limits=Limits(timeout=60.0, cpu_seconds=0.5))
    assert (cpu.returncode, cpu.stopped) == (128 + signal.SIGKILL, "")


@on_each_method
def test_the_callers_signals_and_limits_do_not_matter(method):
    code = (
        "import resource, signal\n"
        "from grpo_ext.rewards.code import sandbox\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        f"ended = sandbox.run('while True: pass', method={method!r}, limits=sandbox.Limits(timeout=0.5))\n"
        f"print(ended.stopped, sandbox.run('print(1)', method={method!r}).stdout)"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "time b'1\\n'\n", done
    assert time.monotonic() - start < 60


# what it says about itself


@pytest.mark.parametrize("found", [None, "seccomp"])
def test_too_little_protection_is_refused(found, monkeypatch):
    monkeypatch.setattr(sandbox, "_probe", lambda: (found, ("namespaces: denied", "landlock: ENOSYS")))
    with pytest.raises(SandboxError, match=r"cannot shut off.*namespaces: denied; landlock: ENOSYS.*Use Linux"):
        run("print(1)")
    if found:
        assert sandbox.available("network") == "seccomp"
        assert run("print(1)", min_protection="network").ok
    else:
        with pytest.raises(SandboxError, match="cannot shut off"):
            sandbox.available("network")


def test_a_launcher_that_fails_is_an_error_not_an_outcome(monkeypatch):
    if not works("namespaces"):
        pytest.skip("no namespaces here")
    monkeypatch.setattr(sandbox.job, "WORKING_FOLDER", "/dev/null/folder")
    with pytest.raises(SandboxError, match="sandbox 'namespaces': "):
        run("print(1)", method="namespaces")


@pytest.mark.parametrize(
    "options",
    [{"timeout": 0}, {"memory_mb": 8}, {"disk_mb": 0}, {"output_kb": 0}, {"open_files": 3}],
)
def test_limits_out_of_range(options):
    [(name, value)] = options.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Limits(**options)


# the filter, by an interpreter of its own: the machine at hand runs one of the two architectures


def decide(code: bytes, architecture: int, number: int, *arguments: int) -> int:
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(list(arguments) + [0] * 6)[:6])
    program, at, accumulator = list(struct.iter_unpack("<HBBI", code)), 0, 0
    while True:
        operation, if_true, if_false, k = program[at]
        at += 1
        if operation == 0x06:
            return k
        if operation == 0x20:
            accumulator = struct.unpack_from("<I", data, k)[0]
        elif operation == 0x54:
            accumulator &= k
        else:
            at += if_true if (accumulator == k if operation == 0x15 else accumulator >= k) else if_false


ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
X86, ARM = 0xC000003E, 0xC00000B7


@pytest.mark.parametrize(
    ("machine", "architecture", "number", "arguments", "shared", "isolated"),
    [
        ("x86_64", X86, 0, (), ALLOW, ALLOW),  # read
        ("x86_64", X86, 41, (), EPERM, EPERM),  # socket
        ("x86_64", X86, 53, (1, 1), ALLOW, ALLOW),  # socketpair, stream
        ("x86_64", X86, 53, (1, 1 | 0o2000000), ALLOW, ALLOW),  # and close-on-exec
        ("x86_64", X86, 53, (1, 2), EPERM, EPERM),  # datagram
        ("x86_64", X86, 57, (), EPERM, EPERM),  # fork
        ("x86_64", X86, 56, (0x11,), EPERM, EPERM),  # clone as fork
        ("x86_64", X86, 56, (0x3D0F00,), ALLOW, ALLOW),  # clone as a thread
        ("x86_64", X86, 56, (0x10000011,), EPERM, EPERM),  # clone with a user namespace
        ("x86_64", X86, 435, (), ENOSYS, ENOSYS),  # clone3
        ("x86_64", X86, 62, (1, 9), EPERM, ALLOW),  # kill
        ("x86_64", X86, 90, (), EPERM, ALLOW),  # chmod
        ("x86_64", X86, 101, (), EPERM, EPERM),  # ptrace
        ("x86_64", X86, 157, (1, 0), EPERM, EPERM),  # prctl(PR_SET_PDEATHSIG)
        ("x86_64", X86, 157, (15, 0), ALLOW, ALLOW),  # prctl(PR_SET_NAME)
        ("x86_64", X86, 302, (0, 7), ALLOW, ALLOW),  # prlimit of its own
        ("x86_64", X86, 302, (77, 7), EPERM, EPERM),
        ("x86_64", X86, 72, (3, 8, 1), EPERM, EPERM),  # fcntl(F_SETOWN)
        ("x86_64", X86, 72, (3, 1), ALLOW, ALLOW),
        ("x86_64", X86, 257, (0, 0, 0x200), EPERM, EPERM),  # openat(O_RDONLY | O_TRUNC)
        ("x86_64", X86, 257, (0, 0, 0x241), ALLOW, ALLOW),  # openat(O_WRONLY | O_CREAT | O_TRUNC)
        ("x86_64", X86, 0x40000000 + 41, (), KILL, KILL),  # x32
        ("x86_64", 0x40000003, 102, (), KILL, KILL),  # 32-bit calls
        ("aarch64", ARM, 63, (), ALLOW, ALLOW),
        ("aarch64", ARM, 198, (), EPERM, EPERM),
        ("aarch64", ARM, 220, (0x11,), EPERM, EPERM),
        ("aarch64", ARM, 220, (0x3D0F00,), ALLOW, ALLOW),
        ("aarch64", ARM, 117, (), EPERM, EPERM),
        ("aarch64", ARM, 129, (1, 9), EPERM, ALLOW),
        ("aarch64", ARM, 56, (0, 0, 0x200), EPERM, EPERM),
        ("aarch64", ARM, 57, (), ALLOW, ALLOW),  # close; fork's number elsewhere
        ("aarch64", X86, 0, (), KILL, KILL),
    ],
)
def test_the_filter_refuses_calls_by_number_and_arguments(machine, architecture, number, arguments, shared, isolated):
    for is_isolated, decision in ((False, shared), (True, isolated)):
        assert decide(bpf_filter(machine, isolated=is_isolated), architecture, number, *arguments) == decision
