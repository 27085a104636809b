"""The program of a reward worker: scores what its parent sends through a socket, until the parent closes it.

A request is a pickle: (function path, arguments by name, each pickled by itself, seed). An answer is a JSON array, so
that nothing that a function writes is executed by the trainer: ["loaded"] when the function is imported, then
["scored", values, log_extra calls, log_metric calls], ["failed", last lines of the traceback] or ["misshapen", what is
wrong with the returned list].
"""

import asyncio
import contextlib
import inspect
import json
import os
import pickle
import random
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from grpo_ext.child_processes import begin, traceback_tail
from grpo_ext.frames import frame, pickled, read_frame


def packed_call(path: str, arguments: Mapping[str, object], *more: object) -> bytes:
    """Return a request; `more` follows the arguments.

    Raises:
        ValueError: an argument cannot be pickled; the message names it.
    """
    sent = {}
    for name, value in arguments.items():
        try:
            sent[name] = pickled(value)
        except Exception as error:  # pickle calls the value's own methods, which raise what they like
            raise ValueError(
                f"{name!r} cannot be sent to a worker process ({type(error).__name__}: {error}). Remove the column, "
                "write **_ in the function's signature if it does not use it, or set isolate: false."
            ) from error
    return pickled((path, sent, *more))


def unpacked_arguments(arguments: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the arguments of a request.

    Raises:
        ValueError: an argument cannot be read; the message names it.
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


def send_answer(channel: socket.socket, answer: object) -> None:
    """Write an answer.

    Raises:
        ValueError: JSON cannot hold it.
    """
    channel.sendall(frame(json.dumps(answer).encode()))


def logging_callbacks() -> tuple[dict[str, Callable], list[tuple[str, list]], list[tuple[str, float]]]:
    """Return TRL's `log_extra` and `log_metric`, and the two lists in which they keep what a function logs."""
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


def _score(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple:
    """Call the function as TRL does and collect what it logs; the parent checks the values."""
    callbacks, extras, metrics = logging_callbacks()
    process = os.getpid()
    try:
        values = function(**{**arguments, **callbacks})
        if inspect.isawaitable(values):

            async def wait() -> object:
                return await values

            values = asyncio.run(wait())
        logged = [(column, [_plain(value) for value in column_values]) for column, column_values in extras]
        return "scored", [_plain(value) for value in listed_rewards(values)], logged, metrics
    finally:
        if os.getpid() != process:  # the function has forked; its copy must not answer a second time
            os._exit(0)


class NotRewards(TypeError):
    """A reward did not return one number or None per completion; the message is complete."""


def listed_rewards(values: Any) -> list[Any]:
    """Return what a reward returned as a list: a list, a tuple, an array, a tensor or a generator of values.

    Raises:
        NotRewards: anything else.
    """
    if values is not None and not isinstance(values, str | bytes | Mapping | set):
        with contextlib.suppress(TypeError):  # a number, a tensor without dimensions
            return list(values)
    raise NotRewards(
        f"it returned {safe_repr(values)}, which is not a list. Return a list of one number or None per completion."
    )


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: a number, a text, None, or a list of them."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # without its class
    if type(value) in (list, tuple):
        return [_plain(part) for part in value]
    try:
        return float(value) if hasattr(value, "__float__") else repr(value)
    except Exception:  # such as a tensor of several elements
        return safe_repr(value)


def safe_repr(value: object) -> str:
    """Return the beginning of `repr(value)`, or its type's name if `__repr__` raises."""
    try:
        return repr(value)[:200]
    except Exception:
        return f"a {type(value).__name__}"


def _serve(channel: socket.socket) -> None:
    """Answer requests until the parent closes its end."""
    from grpo_ext.rewards.catalogue import rewards

    requests = channel.makefile("rb")
    while True:
        try:
            path, arguments, seed = pickle.loads(read_frame(requests))
        except EOFError:
            return
        try:
            function, columns = rewards[path], unpacked_arguments(arguments)
            send_answer(channel, ["loaded"])
            seed_all(seed)
            send_answer(channel, _score(function, columns))
        except NotRewards as error:
            send_answer(channel, ["misshapen", str(error)])
        except BaseException as error:  # the function is the user's: it may raise anything
            send_answer(channel, ["failed", traceback_tail(error)])


def seed_all(seed: int) -> None:
    """Seed the global generators of `random`, and of NumPy and torch where they are imported."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def main() -> None:
    """Run a worker; its descriptor and limits come as arguments."""
    with begin() as channel:
        with contextlib.suppress(ImportError):
            import numpy  # noqa: F401  so that `seed_all` seeds it, even for a function that imports it when called
        _serve(channel)
