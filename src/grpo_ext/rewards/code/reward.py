"""Judge code by tests: each program runs in a sandbox, its tests in another that it can neither read nor change."""

import contextlib
import functools
import importlib.util
import json
import marshal
import os
import re
import selectors
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_ext.rewards.code import sandbox
from grpo_ext.rewards.code.column import Pair, Tests, parse_tests
from grpo_ext.rewards.protocol import OptionError, rewards
from grpo_ext.rewards.text import Completion, answer_block, completion_text

_FENCE = re.compile(r"^[ \t]*```([^\n`]*)$", re.MULTILINE)
_POLL_SECONDS = 0.05
# Wrapper of a program with standard input: `exit` as of `site`, and /dev/stdin, which needs a /proc.
_SCRIPT = """\
def start(source):
    import builtins, io, os, sys
    opened = open
    def open_(file, *args, **kwargs):
        return opened(os.dup(0) if str(file) == "/dev/stdin" else file, *args, **kwargs)
    builtins.open = io.open = open_
    builtins.exit = builtins.quit = sys.exit
    del globals()["start"]
    exec(compile(source, __file__, "exec", dont_inherit=True), globals())
"""


@rewards.register("code", independent=True)
def code(
    completions: list[Completion],
    tests: list[Tests | None],
    *,
    partial: bool = True,
    timeout: float = 5.0,
    total_timeout: float = 30.0,
    memory_mb: int = 512,
    workers: int | None = None,
    packages: bool = False,
    min_protection: str = "isolated",
    **_: object,
) -> list[float | None]:
    """Share of the tests that the completion's last ```python block passes (all or nothing unless `partial`).

    Column `tests`: a list of assertions, one test program, or, for a program that reads its standard input, a list of
    {input, output} or one {inputs, outputs} (or any of these as JSON). `timeout` is in seconds per test; a test that
    has not ended after `total_timeout` of one program (at least `timeout`) fails: keep it below the entry's own
    timeout, or a program that hangs scores None instead of 0.0. `workers`: how many programs run at once (default: the
    number of cores). `packages` lets programs import what is installed here. See `sandbox` for `min_protection`;
    SECURITY.md lists what a program can and cannot do to be paid. Without code: 0.0.
    None: no tests, or tests of another form or without an assertion.

    Raises:
        ValueError: an option out of range. SandboxError: this machine cannot contain untrusted programs.
    """
    if workers is not None and workers < 1:
        raise OptionError("workers", workers, "no program would run", "Set workers >= 1.")
    limits = sandbox.Limits(timeout=timeout, memory_mb=memory_mb)
    unknown = min_protection not in sandbox.PROTECTIONS  # an error even for an empty batch
    score = functools.partial(
        _score,
        partial=partial,
        total_timeout=max(total_timeout, timeout),
        limits=limits,
        packages=packages,
        method=sandbox.available(min_protection) if completions or unknown else "",
    )
    programs = [extract_code(completion_text(c)) for c in completions]
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        return list(pool.map(score, programs, map(parse_tests, tests)))


def extract_code(text: str) -> str:
    """Return the last fenced block marked as Python, else the last unmarked one, else `<answer>`, else everything.

    Text before `</think>` is ignored.
    """
    answer = text.rpartition("</think>")[2]
    blocks = _blocks(answer)
    for languages in (("python", "py", "python3"), ("",)):
        fitting = [body for language, body in blocks if language in languages]
        if fitting:
            return fitting[-1]
    if blocks:
        return ""
    block = answer_block(answer)
    return answer if block is None else block


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return (language, body) of each fenced block; only a fence without a language closes one."""
    blocks, opening = [], None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif not fence[1].strip():
            blocks.append((opening[1].strip().lower(), text[opening.end() + 1 : fence.start()]))
            opening = None
    return blocks


def judge(
    program: str,
    tests: Sequence[str],
    limits: sandbox.Limits,
    *,
    deadline: float,
    method: str,
    packages: bool = False,
    partial: bool = True,
) -> list[bool]:
    """Return whether `program` passes each of the Python `tests`.

    A test in which the program ends or times out fails; a new process runs the rest, until the `deadline` (monotonic).
    Without `partial` the first failure ends the run.

    Raises:
        SandboxError: the sandbox does not start.
    """
    verdicts: list[bool] = []
    while len(verdicts) < len(tests) and time.monotonic() < deadline:
        verdicts_read = _run_tests(program, tests, len(verdicts), limits, deadline, method, packages)
        if not verdicts_read.startswith(b"r"):  # the program ended or hung before it was ready, and would again
            break
        verdicts += [v == ord("1") for v in verdicts_read[1:][: len(tests) - len(verdicts)]]
        if len(verdicts) < len(tests):
            verdicts.append(False)
        if not partial and False in verdicts:
            break
    return verdicts + [False] * (len(tests) - len(verdicts))


def _score(
    program: str, tests: list[Any], *, partial: bool, total_timeout: float, limits: sandbox.Limits, **options: Any
) -> float | None:
    if not tests:
        return None
    if not program.strip():
        return 0.0
    run = judge if isinstance(tests[0], str) else _run_pairs
    deadline = time.monotonic() + total_timeout
    verdicts = run(program, tests, limits, deadline=deadline, partial=partial, **options)
    passed = sum(verdicts) / len(tests)
    return passed if partial else float(passed == 1)


def _run_pairs(
    program: str, pairs: Sequence[Pair], limits: sandbox.Limits, *, deadline: float, partial: bool, **options: Any
) -> Iterator[bool]:
    """Yield until `deadline` whether the output for each input is the expected one, which the program never sees."""
    script = f"{_SCRIPT}start({program!r})\n"
    for pair in pairs:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        limits = replace(limits, timeout=min(limits.timeout, left))
        outcome = sandbox.run(script, stdin=pair["input"], limits=limits, **options)
        passed = outcome.ok and _lines(outcome.stdout.decode(errors="replace")) == _lines(pair["output"])
        yield passed
        if not (passed or partial):
            return


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@functools.cache
def _peers() -> bytes:
    """Return the peers' script as a .pyc file, compiled once for all runs."""
    compiled = compile(Path(__file__).with_name("peers.py").read_text(), "peers", "exec")
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(compiled)


def _run_tests(
    program: str,
    tests: Sequence[str],
    first: int,
    limits: sandbox.Limits,
    deadline: float,
    method: str,
    packages: bool,
) -> bytes:
    """Return the output of the tests from `first` on, until they end or a time limit passes."""
    limits = replace(limits, cpu_seconds=limits.timeout * (len(tests) - first + 1))
    launch = functools.partial(_launch, limits=limits, method=method, packages=packages)
    with contextlib.ExitStack() as stack:
        with _crossed_pipes() as (for_program, for_tests):
            source = program.encode("utf-8", "surrogatepass")
            a = stack.enter_context(launch("program", for_program, {"main.py": source}, stdout=sandbox.DEVNULL))
            listed = {"tests.json": json.dumps(list(tests)).encode()}
            b = stack.enter_context(launch("tests", for_tests, listed, str(first), stdout=sandbox.PIPE))
        a.wait_until_ready()
        b.wait_until_ready()
        return _listen(a, b, deadline)


def _launch(
    role: str,
    fds: tuple[int, int],
    files: dict[str, bytes],
    *arguments: str,
    limits: sandbox.Limits,
    method: str,
    packages: bool,
    stdout: int,
) -> contextlib.AbstractContextManager[sandbox.Program]:
    [name] = files
    return sandbox.start_program(
        [*sandbox.python_argv(packages), "peers.pyc", role, *map(str, fds), name, *arguments],
        {"peers.pyc": _peers(), **files},
        limits,
        method=method,
        packages=packages,
        pass_fds=fds,
        stdout=stdout,
        stderr=sandbox.DEVNULL,
    )


@contextlib.contextmanager
def _crossed_pipes() -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield (read, write) for each of two processes; closed here once they have inherited them."""
    (read_a, write_b), (read_b, write_a) = os.pipe(), os.pipe()
    try:
        yield (read_a, write_a), (read_b, write_b)
    finally:
        for fd in (read_a, write_a, read_b, write_b):
            os.close(fd)


def _listen(program: sandbox.Program, tests: sandbox.Program, deadline: float) -> bytes:
    output = b""
    assert tests.popen.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(tests.popen.stdout, selectors.EVENT_READ)
        while not (tests.over_limit() or program.over_limit() or time.monotonic() > deadline):
            for key, _ in selector.select(min(_POLL_SECONDS, max(0.0, tests.remaining))):
                chunk = os.read(key.fd, 4096)
                if not chunk:
                    return output
                output += chunk
                program.started = tests.started = time.monotonic()  # each test has its own time
    return output
