"""One request of an agent and its answer, whatever the dialect; the refusals; and its way to the loop."""

import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from grpo_ext.environments.protocol import Message, is_text, parts_text
from grpo_ext.safe_reading import parse_json


class Refused(ValueError):
    """A request that is not answered.

    Attributes:
        status: of HTTP.
        code: one word for programs.
    """

    def __init__(self, message: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.status, self.code = status, code


VALUES = 2**17
"""Most values in a request, and in the arguments of a call: each becomes an object, and is rendered."""
_TEXTS = ("input_text", "output_text")
"""Types of parts that are text, by which the dialects differ."""


@dataclass(frozen=True)
class ChatRequest:
    """A request of an agent to the model."""

    messages: list[Message]
    """Messages in the form of a chat template: contents are text, arguments of calls are mappings."""
    tools: list[dict[str, Any]] | None = None
    left_out: tuple[str, ...] = ()
    """Types of tools that only the dialect's own service can run."""
    choices: int = 1
    """Number of answers."""
    limit: int | None = None
    """Most tokens of an answer."""
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    usage: bool = False
    """Whether a stream ends with the numbers of tokens."""
    model: str = "policy"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Settings of sampling that it names."""


@dataclass(frozen=True)
class Reply:
    """One answer of the model."""

    text: str
    thinking: str
    calls: list[tuple[str, Any]]
    """Names and arguments of tools."""
    finish: str
    """stop, length or tool_calls."""
    read: int
    """Number of tokens of the context."""
    written: int
    """Number of sampled tokens."""
    logprobs: list[tuple[str, float | None]] | None = None
    """Text and log-probability of each sampled token, where asked for."""
    stopped_by: str | None = None
    """The stop text that ended it."""


@dataclass(eq=False)
class PendingRequest:
    """A request that waits for its answers; the thread of the loop answers or refuses it."""

    line: int
    """Number of the episode's line."""
    chat: ChatRequest
    done: Callable[[list[Reply] | Refused], None]
    replies: list[Reply] = field(default_factory=list)
    left: bool = False
    """Whether the agent waits no longer."""

    def add(self, reply: Reply) -> bool:
        """Add an answer, and send all if it is the last. Return whether it is."""
        self.replies.append(reply)
        if len(self.replies) < self.chat.choices:
            return False
        self.done(self.replies)
        return True


def text_of(content: object, where: str) -> str:
    """Return a message's content as text.

    Raises:
        Refused: a part is not text.
    """
    if isinstance(content, str):
        return content
    if content in (None, []):
        return ""
    content = [_as_text(part) for part in content] if isinstance(content, list) else content
    if is_text(content):
        return parts_text(content)  # type: ignore[arg-type]
    raise Refused(f"{where} has content that is not text. Send text only.", "unsupported_content")


def _as_text(part: object) -> object:
    return {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in _TEXTS else part


def call_of(name: object, arguments: object) -> dict[str, Any]:
    """Return a call of a tool as a chat template takes it: arguments that are JSON text become a mapping."""
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments, VALUES)
        except ValueError:
            arguments = {"": arguments}  # what a model wrote may be anything
    return {"type": "function", "function": {"name": str(name), "arguments": arguments}}


def calls_of(message: Message) -> list[tuple[str, Any]]:
    """Return names and arguments of the calls in a message."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    return [
        (str(call.get("name")), call_of("", call.get("arguments") or {})["function"]["arguments"]) for call in calls
    ]


REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message under which parsers keep a model's thinking."""


def thinking_of(message: Message) -> str:
    """Return the thinking of a message."""
    return next((str(message[key]) for key in REASONING if message.get(key)), "")


# The way of a request to the loop that plays its episode.


class Inbox:
    """Requests for one loop, and the descriptor that is readable while there are some."""

    def __init__(self) -> None:
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)
        self._requests: deque[PendingRequest] = deque()

    @property
    def descriptor(self) -> int:
        """Descriptor that wakes the loop."""
        return self._reading.fileno()

    def put(self, request: PendingRequest) -> None:
        """Add a request; for the server's thread."""
        self._requests.append(request)
        with suppress(OSError):  # full, so that it wakes the loop already; or closed
            self._writing.send(b".")

    def put_back(self, requests: Sequence[PendingRequest]) -> None:
        """Return requests to their place, for the loop to take them soon."""
        self._requests.extendleft(reversed(requests))
        with suppress(OSError):
            self._writing.send(b".")

    def take(self) -> list[PendingRequest]:
        """Return the requests that have come."""
        with suppress(BlockingIOError):
            while self._reading.recv(4096):
                pass
        return [self._requests.popleft() for _ in range(len(self._requests))]

    def close(self) -> None:
        """Close the sockets."""
        self._reading.close()
        self._writing.close()


@dataclass(eq=False)
class Line:
    """The way of one episode to the model."""

    number: int
    url: str
    """Address without a dialect's path."""
    key: str = field(repr=False)
    inbox: Inbox
    pause: Callable[[], None]
    """Stops the episode's clock."""
    waiting: set[PendingRequest] = field(default_factory=set)
