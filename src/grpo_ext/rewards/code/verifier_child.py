"""Score answers by verifiers of reasoning-gym, each in a process of its own, from which only its number comes back.

Run as a program in the sandbox with the right to fork, never imported. Standard input is JSON: `root` (folder of the
package), `modules` (task -> module), `filter` (calls that a verdict may not make, in hexadecimal), `cpu_seconds` of a
verdict, `rows` of (task, answer, entry). The output is a list of numbers as text, "" where the verifier gives none.

These verifiers call `eval` and `parse_expr` on the answer. Here `eval` reads a literal or arithmetic of integers, and
`parse_expr` gets arithmetic only: no attribute, text or index, no name of sympy's that solves the task or leaves it
unevaluated. Should that fail, an answer reaches only its own number: it cannot signal, trace or outlive others.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import functools
import importlib
import json
import keyword
import os
import re
import resource
import select
import signal
import sys
import time
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP = 1, 22
_WALL_SECONDS = 12.0  # per CPU second: other processes may be in the way
_MOST_AT_ONCE = 32
_REAL = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_TOKEN = re.compile(rf"{_REAL}(?!\w)|\w+|\S", re.ASCII)
_FUNCTIONS = "Abs|E|I|Rational|pi|sqrt|exp|log|ln|erf|a?(?:sin|cos|tan|cot|sec|csc)h?"
_ARITHMETIC = re.compile(rf"{_REAL}|[-+*/(),]|{_FUNCTIONS}", re.ASCII)
_COUNTED = re.compile(r"\d+|[-+*/()]", re.ASCII)  # a verifier that counts numbers in the text would not see 0x10 or pi
_BITS = re.compile(r"\d+|0x[0-9a-fA-F]+|[-+*/%()<>&|^~]", re.ASCII)


def main() -> None:
    """Read the job, write the numbers."""
    job = json.load(sys.stdin)
    verifiers = {task: _verifier(job["root"], task, name) for task, name in job["modules"].items()}
    if sympy := sys.modules.get("sympy"):
        vars(sympy)["simplify"](vars(sympy)["parse_expr"]("sin(x)**2 + 7*x**3/(x + 1)"))  # fills caches for all
    calls = [functools.partial(_score, *verifiers[task], answer, entry) for task, answer, entry in job["rows"]]
    itself, *numbers = _results([lambda: 1.0, *calls], bytes.fromhex(job["filter"]), job["cpu_seconds"])
    if not itself:
        sys.exit("the process of a verdict does not start")
    print(json.dumps(numbers))


def _verifier(root: str, task: str, name: str) -> tuple[str, Any, Callable[..., float]]:
    """Return the task, its module and its verifier, without the packages' own code, which imports all tasks."""
    folders = name.split(".")[:-1]
    for i in range(len(folders)):
        package = types.ModuleType(".".join(folders[: i + 1]))
        package.__path__ = [os.path.join(root, *folders[1 : i + 1])]
        sys.modules.setdefault(package.__name__, package)
    module = importlib.import_module(name)
    return task, module, importlib.import_module("reasoning_gym.factory").get_score_answer_fn(task)


def _score(task: str, module: Any, verifier: Callable[..., float], answer: str | None, entry: dict[str, Any]) -> float:
    module.eval = _evaluated
    if sympy := sys.modules.get("sympy"):
        parse, names = vars(sympy)["parse_expr"], {*vars(builtins), *vars(sympy), *keyword.kwlist}
        for place in (module, sympy):
            if vars(place).get("parse_expr") == parse:
                vars(place)["parse_expr"] = functools.partial(_parsed, parse, task, names)
    return float(verifier(answer=answer, entry=entry))


def _evaluated(text: str) -> Any:
    bits = all(map(_BITS.fullmatch, re.findall(r"\w+|\S", text, re.ASCII)))
    return eval(text, {"__builtins__": {}}) if bits else ast.literal_eval(text)


def _parsed(parse: Callable[..., Any], task: str, names: set[str], text: str, **options: Any) -> Any:
    """Parse arithmetic only: where sympy cannot solve a task, the row's own answer is an unevaluated integral."""
    pattern, symbols = (_COUNTED, False) if task in ("countdown", "puzzle24") else (_ARITHMETIC, True)
    for token in _TOKEN.findall(text):
        symbol = symbols and token.isascii() and token.isidentifier() and token not in names
        if not (symbol or pattern.fullmatch(token)):
            raise ValueError(f"{token!r} is not arithmetic")
    return parse(text, **options)


def _results(calls: list[Callable[[], float]], filter_: bytes, cpu_seconds: int) -> list[str]:
    """Return what each call returns in a process of its own, as text, "" where it fails, ends or takes too long."""
    numbers: list[str] = []
    most = min(_MOST_AT_ONCE, len(os.sched_getaffinity(0)))
    for first in range(0, len(calls), most):
        started = [_start(call, filter_, cpu_seconds) for call in calls[first : first + most]]
        deadline = time.monotonic() + _WALL_SECONDS * cpu_seconds
        for pipe, pid in started:
            written = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]
            numbers.append(os.read(pipe, 32).decode("ascii", "replace") if written else "")
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(pipe)
    return numbers


def _start(call: Callable[[], float], filter_: bytes, cpu_seconds: int) -> tuple[int, int]:
    """Return the pipe on which a new process writes its number, and its PID."""
    number, pipe = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _restrict(pipe, filter_, cpu_seconds)
            os.write(pipe, repr(call()).encode())
        finally:
            os._exit(0)
    os.close(pipe)
    return number, pid


def _restrict(pipe: int, filter_: bytes, cpu_seconds: int) -> None:
    """Keep of the process only its pipe, its memory and `cpu_seconds`."""
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.closerange(3, pipe)
    os.closerange(pipe + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    libc, code = ctypes.CDLL(None), ctypes.create_string_buffer(filter_)
    program = (ctypes.c_uint64 * 2)(len(filter_) // 8, ctypes.addressof(code))
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or (
        filter_ and libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0)
    ):
        os._exit(1)


if __name__ == "__main__":
    main()
