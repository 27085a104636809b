"""One attempt's environment in the process where it runs: asked by name, answering in what JSON can hold.

`serve` is the same in a process of its own and in a thread: frames of an 8-byte length and a body, pickles in, JSON
out, so that nothing an environment writes is ever executed by who reads it.
"""

import asyncio
import inspect
import json
import os
import pickle
import re
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from grpo_ext.environments.content import CURE, is_parts, medium, text_of
from grpo_ext.environments.protocol import REWARD, Conversation, Message, Step
from grpo_ext.environments.tools import methods_of
from grpo_ext.rewards.workers.worker import last_lines, shown

LENGTH = struct.Struct("<Q")
RAISED, GARBAGE = "raised", "garbage"
"""Kinds of failure that are known here."""

_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]{4,}")
"""What Python shows of an object that has no text of its own; another number in each run."""

Maker = Callable[[], Any]


class Garbage(TypeError):
    """What an environment returned is none of what it may return; the message says all of it."""


class Seat:
    """An environment (or None) and its tools; made when it is reset.

    Args:
        make: of the environment.
        functions: further tools.
        seed: of the prompt; a `Conversation` sees it.
    """

    def __init__(self, make: Maker | None, functions: Sequence[Callable[..., Any]], seed: int) -> None:
        """Nothing of the environment's own runs yet."""
        self._make, self._functions, self._seed = make, functions, seed
        self._environment: Any = None
        self._tools: dict[str, Callable[..., Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def answer(self, request: tuple[str, Any]) -> dict[str, Any]:
        """What came of a request: its fields, or `failed` with the kind of failure and its reason."""
        name, value = request
        process = os.getpid()
        try:
            return self._answer(name, value)
        except Garbage as error:
            return {"failed": [GARBAGE, f"{name}: {error}"]}
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the environment is the user's
            return {"failed": [RAISED, f"{name}: {last_lines(error)}"]}
        finally:
            if os.getpid() != process:  # the environment has forked, and a copy of it would answer a second time
                os._exit(0)

    def _answer(self, name: str, value: Any) -> dict[str, Any]:
        if name == "reset":
            return self._reset(value)
        return self._step(value) if name == "step" else self._finish()

    def _reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        environment = self._environment = self._make() if self._make else None
        methods = [getattr(environment, name) for name in methods_of(type(environment))] if environment else []
        self._tools = {tool.__name__: tool for tool in (*self._functions, *methods)}
        if environment is None:
            return {"opening": None}
        if isinstance(environment, Conversation):
            environment.seed = self._seed
            return {"opening": self._result(environment.reset(row))}
        return {"opening": self._result(environment.reset(**row))}

    def _step(self, message: Message) -> dict[str, Any]:
        if isinstance(self._environment, Conversation):
            said = self._result(self._environment.step(message))
            if not isinstance(said, tuple) or not 1 <= len(said) <= len(Step._fields):
                raise Garbage(f"it returned {shown(said)}. Return Step(observation, reward, done).")
            return {**Step(*said)._asdict(), "done": bool(Step(*said).done), "calls": 0, "refused": 0}
        calls = message.get("tool_calls") or []
        results = [self._called(call) for call in calls]
        observation = [result for result, _ in results]
        refused = sum(not well for _, well in results)
        return {
            "observation": observation,
            "reward": None,
            "done": not calls,
            "calls": len(calls),
            "refused": refused,
        }

    def _called(self, call: Mapping[str, Any]) -> tuple[Message, bool]:
        """The tool's message and whether all went well; as in TRL the model is told of what did not."""
        function = call.get("function", call)
        name, arguments = str(function.get("name")), function.get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if name not in self._tools:
                raise ValueError(f"there is no tool {name!r}, only {', '.join(self._tools)}")
            result, well = self._result(self._tools[name](**arguments)), True
        except Exception as error:
            result, well = {"error": _ADDRESS.sub("", str(error))}, False
        return {"role": "tool", "name": name, "content": _text(result, f"tool {name!r}")}, well

    def _finish(self) -> dict[str, Any]:
        score = getattr(self._environment, REWARD, None)
        return {} if score is None else {"reward": self._result(score())}

    def _result(self, value: Any) -> Any:
        """Of a coroutine, what it comes to; in one event loop, where its clients stay open."""
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.new_event_loop()

        async def wait() -> Any:
            return await value

        return self._loop.run_until_complete(wait())

    def close(self) -> None:
        """End its event loop."""
        if self._loop is not None:
            self._loop.close()


def serve(channel: socket.socket, seat: Seat) -> None:
    """Answer requests until the other side closes."""
    with closing(seat), channel, channel.makefile("rb") as requests, suppress(OSError):
        while len(header := requests.read(LENGTH.size)) == LENGTH.size:
            body = written(seat.answer(pickle.loads(requests.read(LENGTH.unpack(header)[0]))))
            channel.sendall(LENGTH.pack(len(body)) + body)


def _text(result: Any, who: str) -> str:
    """What a tool returned as the text that the model reads.

    Raises:
        Garbage: an image, or an object that has no text of its own.
    """
    if (kind := medium(result)) is not None:
        raise Garbage(f"{who} returned content of type {kind!r}, and environments carry text only. {CURE}")
    text = text_of(result) if is_parts(result) else str(result)
    if _shows_address(result):
        cure = "Return text, or give the object's class a method __str__."
        raise Garbage(f"{who} returned {text:.200}, which shows an address in memory, another one in each run. {cure}")
    return text


def _shows_address(value: Any) -> bool:
    """Whether a value holds an object that Python shows by its address; a text in it may spell one."""
    if isinstance(value, dict):
        return any(map(_shows_address, (*value, *value.values())))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_shows_address, value))
    own = any(inspect.isfunction(getattr(type(value), name)) for name in ("__repr__", "__str__"))
    return not own and not isinstance(value, str) and _ADDRESS.search(str(value)) is not None


def written(answer: dict[str, Any]) -> bytes:
    """An answer as it is sent."""
    try:
        return json.dumps(answer, default=_number, skipkeys=True).encode()
    except Exception as error:  # a value's own methods may raise anything
        return json.dumps({"failed": [GARBAGE, f"what it returned cannot be sent: {error}"]}).encode()


def _number(value: Any) -> float:
    """A number of numpy or torch; anything else that JSON does not know is no answer."""
    if hasattr(value, "__float__"):
        return float(value)
    cure = "Return text, or [{'role': ..., 'content': ...}], and a number as reward."
    raise TypeError(f"{shown(value)} is neither text nor a number. {cure}")
