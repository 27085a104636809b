"""A reward worker: a process that scores what its parent sends through a pair of pipes, until the parent closes them.

A frame on the two pipes is an 8-byte length and a body. A request is a pickle: (function path, arguments by name, each
pickled by itself, seed). An answer is a JSON array, so that nothing that a function writes is executed by the trainer:
["loaded"] when the function is imported, then ["scored", values, log_extra calls, log_metric calls], ["failed", last
lines of the traceback] or ["misshapen", what is wrong with the list that it returned].
"""

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import pickle
import random
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

LENGTH = struct.Struct("<Q")
TRACEBACK_LINES = 6
_PR_SET_PDEATHSIG = 1


def send(pipe: BinaryIO, message: Any) -> None:
    """Write one answer.

    Raises:
        ValueError: JSON cannot hold it.
    """
    body = json.dumps(message).encode()
    pipe.write(LENGTH.pack(len(body)) + body)
    pipe.flush()


def receive(pipe: BinaryIO) -> Any:
    """Read one request.

    Raises:
        EOFError: the other side has closed.
    """
    header = pipe.read(LENGTH.size)
    if len(header) < LENGTH.size:
        raise EOFError
    return pickle.loads(pipe.read(LENGTH.unpack(header)[0]))


def packed(path: str, arguments: dict[str, Any], *more: Any) -> bytes:
    """A request; `more` follows the arguments.

    Raises:
        ValueError: naming an argument that cannot be sent.
    """
    sent = {}
    for name, value in arguments.items():
        try:
            sent[name] = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # pickle calls the value's own methods, which raise what they like
            raise ValueError(
                f"{name!r} cannot be sent to a worker process ({type(error).__name__}: {error}). Remove the column, "
                "write **_ in the function's signature if it does not use it, or set isolate: false."
            ) from error
    return pickle.dumps((path, sent, *more), protocol=pickle.HIGHEST_PROTOCOL)


def unpacked(arguments: dict[str, bytes]) -> dict[str, Any]:
    """The arguments of a request.

    Raises:
        ValueError: naming one that cannot be read.
    """
    read = {}
    for name, value in arguments.items():
        try:
            read[name] = pickle.loads(value)
        except Exception as error:
            raise ValueError(
                f"{name!r} cannot be read in a worker process ({type(error).__name__}: {error}). Define its class in "
                "a module that can be imported, or set isolate: false."
            ) from None
    return read


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent is gone, however hard it hangs (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_memory(gib: float) -> None:
    """Make an allocation beyond `gib` a MemoryError instead of a machine that swaps."""
    if gib > 0:
        import resource  # not on Windows, where this module is imported for what else it has

        size = int(gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def callbacks() -> tuple[dict[str, Callable], list[tuple[str, list]], list[tuple[str, float]]]:
    """TRL's `log_extra` and `log_metric`, and the two lists in which they keep what a function logs."""
    extras: list[tuple[str, list]] = []
    metrics: list[tuple[str, float]] = []
    return (
        {
            "log_extra": lambda column, values: extras.append((str(column), list(values))),
            "log_metric": lambda name, value: metrics.append((str(name), float(value))),
        },
        extras,
        metrics,
    )


def score(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple:
    """Call the function as TRL does and collect what it logs; the values are checked by the parent."""
    given, extras, metrics = callbacks()
    process = os.getpid()
    try:
        values = function(**{**arguments, **given})
        if inspect.isawaitable(values):

            async def wait() -> Any:
                return await values

            values = asyncio.run(wait())
        logged = [(column, [plain(value) for value in column_values]) for column, column_values in extras]
        return "scored", [plain(value) for value in listed(values)], logged, metrics
    finally:
        if os.getpid() != process:  # the function has forked, and a copy of it would answer a second time
            os._exit(0)


class NotValues(TypeError):
    """What a reward returned is not one value per completion; the message says all of it."""


def listed(values: Any) -> list[Any]:
    """What a reward returned as a list: a list, a tuple, an array, a tensor or a generator of values.

    Raises:
        NotValues: anything else.
    """
    if values is not None and not isinstance(values, str | bytes | Mapping | set):
        with contextlib.suppress(TypeError):  # a number, a tensor without dimensions
            return list(values)
    raise NotValues(
        f"it returned {shown(values)}, which is no list. Return a list of one number or None a completion."
    )


def plain(value: Any) -> Any:
    """A value that the parent can read whatever the function has imported: a number, a text or None."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # without its class
    if type(value) in (list, tuple):
        return [plain(part) for part in value]
    try:
        return float(value) if hasattr(value, "__float__") else repr(value)
    except Exception:  # such as a tensor of several elements
        return shown(value)


def shown(value: Any) -> str:
    """A value in a message, whatever its own `__repr__` does."""
    try:
        return repr(value)[:200]
    except Exception:
        return f"a {type(value).__name__}"


def last_lines(error: BaseException) -> str:
    """The end of a traceback, where the news is, in one line."""
    if isinstance(error, NotValues):
        return str(error)
    lines = [line.strip() for line in "".join(traceback.format_exception(error)).strip().split("\n")]
    return " | ".join(line for line in lines[-TRACEBACK_LINES:] if line.strip("^~ "))[-1500:]


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the parent closes its side."""
    from grpo_ext.rewards.catalogue import rewards

    while True:
        try:
            path, arguments, seed = receive(requests)
        except EOFError:
            return
        try:
            function, columns = rewards[path], unpacked(arguments)
            send(answers, ["loaded"])
            seed_all(seed)
            send(answers, score(function, columns))
        except NotValues as error:
            send(answers, ["misshapen", str(error)])
        except BaseException as error:  # the function is the user's: it may raise anything
            send(answers, ["failed", last_lines(error)])


def seed_all(seed: int) -> None:
    """Seed the global generators of `random`, and of NumPy and torch where they are imported."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def started() -> bool:
    """Begin as a worker does, by the limits that come as arguments; whether the parent is still there."""
    die_with_parent()
    if os.getppid() != int(sys.argv[4]):  # the parent died before the kernel was told
        return False
    limit_memory(float(sys.argv[3]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return True


def main() -> None:
    """Entry point: descriptors and limits come as arguments."""
    if not started():
        return
    with contextlib.suppress(ImportError):
        import numpy  # noqa: F401  so that it can be seeded before a function that imports it when it is called
    with open(int(sys.argv[1]), "rb") as requests, open(int(sys.argv[2]), "wb") as answers:
        serve(requests, answers)


if __name__ == "__main__":
    main()
