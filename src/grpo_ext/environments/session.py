"""One episode's environment in the process where it runs: answers requests by name with what JSON can hold.

`serve` does so in a process or in a thread: frames hold pickles on the way in and JSON on the way out, so that nothing
an environment writes is executed by its reader.
"""

import asyncio
import base64
import inspect
import io
import json
import os
import pickle
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from enum import StrEnum
from typing import Any, SupportsFloat, cast

import numpy as np
from PIL import Image

from grpo_ext.child_processes import traceback_tail
from grpo_ext.environments.protocol import (
    IMAGE,
    PARTS_CURE,
    REWARD,
    Agent,
    AgentTask,
    Conversation,
    Message,
    Step,
    is_parts,
    is_text,
    medium,
    parts_text,
)
from grpo_ext.environments.tools import methods_of
from grpo_ext.frames import frame, read_frame
from grpo_ext.rewards.workers.worker import safe_repr

PNG = "png"
"""Key of an image on its way."""
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""Modes that PNG keeps as they are."""
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]{4,}")
"""How Python shows an object that has no text of its own; the number differs from run to run."""

SessionRequest = tuple[str, Any]
"""reset with a row, step with a message, finish with None; for an agent only run with its task."""


class FailureKind(StrEnum):
    """Why an episode failed."""

    RAISED = "raised"
    """The environment raised."""
    GARBAGE = "garbage"
    """It returned something that it may not return."""
    TIMEOUT = "timeout"
    DIED = "died"
    """Its process ended, or could not be started."""


class EnvironmentFailed(RuntimeError):
    """A failure of an environment: its kind and reason, "died: it was killed by SIGKILL"."""


class InvalidResult(TypeError):
    """An environment returned something that it may not return; the message is complete."""


class Session:
    """An environment (or None) and its tools. The environment is made by the first request."""

    def __init__(self, make: Callable[[], object] | None, functions: Sequence[Callable[..., Any]], seed: int) -> None:
        self._make, self._functions, self._seed = make, functions, seed
        self._environment: Any = None
        self._tools: dict[str, Callable[..., Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def answer(self, request: SessionRequest) -> dict[str, Any]:
        """Return the fields of the answer, or `failed` with the kind of failure and its reason."""
        name, value = request
        process = os.getpid()
        try:
            if name == "reset":
                return {"opening": self._reset(value)}
            if name == "run":
                return self._run(value)
            return self._step(value) if name == "step" else self._finish()
        except InvalidResult as error:
            return {"failed": [FailureKind.GARBAGE, f"{name}: {error}"]}
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the environment is the user's
            return {"failed": [FailureKind.RAISED, f"{name}: {traceback_tail(error)}"]}
        finally:
            if os.getpid() != process:  # the environment has forked; its copy must not answer a second time
                os._exit(0)

    def _reset(self, row: Mapping[str, object]) -> object:
        environment = self._environment = self._make() if self._make else None
        methods = [getattr(environment, name) for name in methods_of(type(environment))] if environment else []
        self._tools = {tool.__name__: tool for tool in (*self._functions, *methods)}
        if environment is None:
            return None
        if isinstance(environment, Conversation):
            environment.seed = self._seed
            return self._awaited(environment.reset(row))
        return self._awaited(cast(Any, environment).reset(**row))

    def _run(self, task: AgentTask) -> dict[str, Any]:
        assert self._make is not None
        agent = cast(Agent, self._make())
        return {"reward": self._awaited(agent.run(task)), "status": agent.status}

    def _step(self, message: Message) -> dict[str, Any]:
        if isinstance(self._environment, Conversation):
            step = self._awaited(self._environment.step(message))
            if not isinstance(step, tuple) or not 1 <= len(step) <= len(Step._fields):
                raise InvalidResult(f"it returned {safe_repr(step)}. Return Step(observation, reward, done).")
            step = Step(*step)
            return {**step._asdict(), "done": bool(step.done), "calls": 0, "refused": 0}
        results = [self._call(call) for call in message.get("tool_calls") or []]
        return {
            "observation": [result for result, _ in results],
            "reward": None,
            "done": not results,
            "calls": len(results),
            "refused": sum(not succeeded for _, succeeded in results),
        }

    def _call(self, call: Mapping[str, Any]) -> tuple[Message, bool]:
        """Return the tool's message and whether the call succeeded; as in TRL the model sees the error."""
        function = call.get("function", call)
        name, arguments = str(function.get("name")), function.get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if name not in self._tools:
                raise ValueError(f"there is no tool {name!r}, only {', '.join(self._tools)}")
            result, succeeded = self._awaited(self._tools[name](**arguments)), True
        except Exception as error:
            result, succeeded = {"error": _ADDRESS.sub("", str(error))}, False
        return {"role": "tool", "name": name, "content": _content(result, f"tool {name!r}")}, succeeded

    def _finish(self) -> dict[str, Any]:
        score = getattr(self._environment, REWARD, None)
        return {} if score is None else {"reward": self._awaited(score())}

    def _awaited(self, value: Any) -> Any:
        """Await a coroutine, always in the same event loop, where its clients stay open."""
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.new_event_loop()

        async def wait() -> object:
            return await value

        return self._loop.run_until_complete(wait())

    def close(self) -> None:
        """Close its event loop."""
        if self._loop is not None:
            self._loop.close()


def serve_session(channel: socket.socket, session: Session) -> None:
    """Answer requests until the other end is closed."""
    with closing(session), channel, channel.makefile("rb") as requests, suppress(OSError, EOFError):
        while True:
            channel.sendall(frame(encoded(session.answer(pickle.loads(read_frame(requests))))))


def encoded(answer: Mapping[str, object]) -> bytes:
    """Return the answer as JSON, or a failure where JSON cannot hold it."""
    try:
        return json.dumps(answer, default=_plain, skipkeys=True).encode()
    except Exception as error:  # a value's own methods may raise anything
        return json.dumps({"failed": [FailureKind.GARBAGE, f"its result cannot be sent: {error}"]}).encode()


def _plain(value: SupportsFloat | object) -> float | dict[str, str]:
    """Return a number of NumPy or torch as a float, and an image as PNG in base64."""
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim > 1:
        value = Image.fromarray(value)
    if isinstance(value, Image.Image):
        image, file = value if value.mode in _PNG_MODES else value.convert("RGB"), io.BytesIO()
        image.save(file, "PNG")
        return {PNG: base64.b64encode(file.getvalue()).decode()}
    if isinstance(value, SupportsFloat):
        return float(value)
    cure = "Return text, or [{'role': ..., 'content': ...}], and a number as reward."
    raise TypeError(f"{safe_repr(value)} is neither text nor a number. {cure}")


def require_known(content: object, who: str) -> None:
    """Refuse content with a part that is neither text nor an image; `who` begins the message.

    Raises:
        InvalidResult: there is one.
    """
    if (kind := medium(content)) is not None:
        raise InvalidResult(f"{who} content of type {kind!r}, and environments carry text and images. {PARTS_CURE}")


def _content(result: object, who: str) -> str | list[dict[str, Any]]:
    """Return a tool's result as the content of a message, text or parts with an image."""
    require_known(result, f"{who} returned")
    if isinstance(result, Image.Image):
        return [{"type": IMAGE, IMAGE: result}]
    if is_parts(result) and not is_text(result):
        return cast(list[dict[str, Any]], result)
    text = parts_text(cast(list[dict[str, Any]], result)) if is_text(result) else str(result)
    if _shows_address(result):
        raise InvalidResult(
            f"{who} returned {text:.200}, which shows an address in memory that differs from run to run. Return text, "
            "or give the object's class a method __str__."
        )
    return text


def _shows_address(value: object) -> bool:
    """Return whether a value holds an object that Python shows by its address; a text may spell an address."""
    if isinstance(value, dict):
        return any(map(_shows_address, (*value, *value.values())))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_shows_address, value))
    own = any(inspect.isfunction(getattr(type(value), name)) for name in ("__repr__", "__str__"))
    return not own and not isinstance(value, str) and _ADDRESS.search(str(value)) is not None
