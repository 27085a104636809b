"""The server of agents' requests: on loopback only, in a daemon thread of the process that plays their episodes.

Each episode has a line: an address and a random key, which are kept in memory only. The server's thread reads requests
and puts them in the inbox of the loop that plays the episode; the loop is woken by a socket, and answers or refuses
each. What an episode does with its line can reach no other episode.
"""

import asyncio
import hmac
import itertools
import json
import logging
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from grpo_ext.environments.endpoint import chat, messages, responses
from grpo_ext.environments.endpoint.requests import ChatRequest, Inbox, Line, PendingRequest, Refused, Reply

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger(__name__)
LARGEST = 2**24
"""Most bytes of a request's body."""
_CLOSING_SECONDS = 5.0
_IDLE_SECONDS = 600
"""For which an agent's connection stays open between two requests."""
_MOST_TOLD = 50
"""Names that the log tells of."""
_MOST_CONNECTIONS = 2**14
"""Connections at once, and at most a quarter of the descriptors."""
_STRANGE_SECONDS = 30.0
"""For which a connection stays open without a request that has a key."""
_BACKLOG = 128
"""Connections that are accepted at once, before any is counted."""
_SILENT_SECONDS = 10.0
"""For which a stream that waits for its answer is silent."""
_EVENTS = "text/event-stream"
DIALECTS = {"chat/completions": chat, "messages": messages, "responses": responses}
"""Modules that convert a dialect's bodies to requests, and replies to its answers and events, by path."""


def missing() -> str | None:
    """Return the package that the server needs and that is not installed."""
    return next((name for name in ("starlette", "uvicorn") if find_spec(name) is None), None)


class Endpoint:
    """The server; it runs until `close`.

    Args:
        sampling: the recipe's settings of sampling. A request that names another value is answered by the recipe's.
    """

    def __init__(self, sampling: Mapping[str, Any]) -> None:
        import uvicorn

        self._sampling, self._told = sampling, set[str]()
        self._lines: dict[int, Line] = {}
        self._secret = secrets.token_bytes(32)
        self._requests, self._episodes = itertools.count(1), itertools.count(1)
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        plain: dict[str, Any] = {"loop": "asyncio", "ws": "none", "lifespan": "off"}
        quiet: dict[str, Any] = {"log_config": None, "log_level": "critical", "access_log": False}
        self._clients = dict[Any, int]()
        """Addresses of connections that have sent a key, with its episode's number."""
        limits: dict[str, Any] = {"timeout_keep_alive": _IDLE_SECONDS, "backlog": _BACKLOG}
        config = uvicorn.Config(self._application(), http=self._protocol(), **limits, **plain, **quiet)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True, name="endpoint")
        self._thread.start()

    def open(self, inbox: Inbox, pause: Callable[[], None]) -> Line:
        """Return a line for a new episode, whose requests come to `inbox` and stop its clock."""
        number = next(self._episodes)
        url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/{number}"
        line = self._lines[number] = Line(number, url, self._key(number), inbox, pause)
        return line

    def shut(self, line: Line) -> None:
        """End a line: its requests that wait, and all later ones, are refused."""
        self._lines.pop(line.number, None)
        for request in list(line.waiting):
            request.done(_ended())

    def close(self) -> None:
        """Shut all lines and end the server."""
        for line in list(self._lines.values()):
            self.shut(line)
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(_CLOSING_SECONDS)
        self._socket.close()

    def _key(self, number: int) -> str:
        """Return the key of an episode, which no other key shows anything of."""
        return hmac.new(self._secret, str(number).encode(), "sha256").hexdigest()

    # In the server's thread.

    async def _serve(self) -> None:
        asyncio.get_running_loop().set_exception_handler(self._note_fault)
        await self._server.serve([self._socket])

    def _note_fault(self, loop: asyncio.AbstractEventLoop | None, context: Mapping[str, Any]) -> None:
        """Log each kind of fault of connections once, in a line: agents can cause any number."""
        reason = str(context.get("message"))[:100]
        if reason not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(reason)
            logger.warning(f"agents' endpoint: {reason} ({str(context.get('exception'))[:200]}).")

    def _protocol(self) -> type:
        """Return the protocol of connections: so many at most, and none that stays without a key."""
        from uvicorn.protocols.http.h11_impl import H11Protocol  # httptools would read headers without end

        clients, most = self._clients, _most_connections()

        class Protocol(H11Protocol):
            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                if len(self.connections) > most:
                    transport.abort()
                else:
                    self.loop.call_later(_STRANGE_SECONDS, self._look, transport)

            def connection_lost(self, exc: Exception | None) -> None:
                clients.pop(self.client, None)
                super().connection_lost(exc)

            def _look(self, transport: Any) -> None:
                if self.client not in clients:
                    transport.abort()

        return Protocol

    def _application(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        paths = [f"{version}/{path}" for version in ("/v1", "") for path in DIALECTS]  # some clients add no /v1
        answers = [Route(f"/{{line}}{path}", self._answer_or_fail, methods=["POST"]) for path in paths]
        return Starlette(routes=[*answers, Route("/{line}/v1/models", self._models)])

    async def _answer_or_fail(self, request: "Request") -> "Response":
        try:
            return await self._answer(request)
        except Exception as error:  # a fault of ours, which agents can repeat
            self._note_fault(None, {"message": "a request failed", "exception": repr(error)})
            return _json({"error": {"message": "a fault of the endpoint", "type": "server_error"}}, 500)

    async def _answer(self, request: "Request") -> "Response":
        dialect = DIALECTS[request.url.path.split("/", 2)[2].removeprefix("v1/")]
        number = next(self._requests)
        try:
            line = self._line(request)
            chat = dialect.parse(await _body(request))
        except Refused as refused:
            return _json(dialect.error(refused), refused.status)
        self._tell(chat)
        answer, left = (
            asyncio.ensure_future(self._replies(line, chat)),
            asyncio.ensure_future(request.receive()),
        )
        silent = _SILENT_SECONDS if chat.stream else None
        await asyncio.wait([answer, left], timeout=silent, return_when=asyncio.FIRST_COMPLETED)
        if left.done() and not answer.done():
            answer.cancel()
            return _json({}, 499)
        left.cancel()
        if not answer.done():
            from starlette.responses import StreamingResponse

            written = partial(_streamed, dialect, chat, number=number)
            return StreamingResponse(_kept_alive(answer, written), media_type=_EVENTS)
        if isinstance(replies := answer.result(), Refused):
            return _json(dialect.error(replies), replies.status)
        if chat.stream:  # all at once: the whole answer has been sampled
            return _sent(_streamed(dialect, chat, replies, number), _EVENTS)
        return _json(dialect.document(chat, replies, number))

    async def _models(self, request: "Request") -> "Response":
        try:
            self._line(request)
        except Refused as refused:
            return _json(chat.error(refused), refused.status)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "grpo-ext"}
        return _json({"object": "list", "data": [model]})

    def _line(self, request: "Request") -> Line:
        """Return the line of a request with its key."""
        headers, number = request.headers, request.path_params["line"]
        keys = (headers.get("authorization", "").partition(" ")[2], headers.get("x-api-key", ""))
        number = int(number) if number.isascii() and number.isdigit() and len(number) < 19 else 0
        if not any(hmac.compare_digest(key.encode(), self._key(number).encode()) for key in keys):
            raise Refused("this is not the key of this episode", "invalid_api_key", 401)
        if (line := self._lines.get(number)) is None:
            raise _ended()
        client, most = request.scope["client"], _most_connections() // 4
        if client not in self._clients and [*self._clients.values()].count(number) >= most:
            raise Refused(f"the episode has {most} connections", "too_many_connections", 429)
        self._clients[client] = number
        return line

    async def _replies(self, line: Line, request: ChatRequest) -> list[Reply] | Refused:
        """Ask the loop; return its answers or its refusal."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Reply] | Refused] = loop.create_future()

        def settle(result: list[Reply] | Refused) -> None:
            if not future.done():
                future.set_result(result)

        def done(result: list[Reply] | Refused) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(settle, result)

        pending = PendingRequest(line.number, request, done)
        line.waiting.add(pending)
        line.pause()
        line.inbox.put(pending)
        if line.number not in self._lines:  # shut meanwhile
            done(_ended())
        try:
            return await future
        except asyncio.CancelledError:
            pending.left = True
            raise
        finally:
            line.waiting.discard(pending)

    def _tell(self, request: ChatRequest) -> None:
        """Log once what a request names in vain: settings of sampling, and tools of the dialect's own service."""
        others = {name: value for name, value in request.sampling.items() if value != self._sampling.get(name)}
        left_out = {name[:50] for name in request.left_out}
        for name in sorted({*others, *left_out} - self._told)[: max(0, _MOST_TOLD - len(self._told))]:
            self._told.add(name)
            if name in others:
                text = f"{name}={others[name]!r:.50}; the recipe's {self._sampling.get(name)!r} holds"
                logger.warning(f"agents ask for {text}, since the policy is trained as it samples.")
            else:
                logger.warning(f"agents offer a tool of type {name!r}, which runs nowhere here; it is left out.")


def _most_connections() -> int:
    """Return how many connections leave the trainer descriptors of its own."""
    import resource  # not on Windows, where this module must still import

    return min(_MOST_CONNECTIONS, max(32, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


async def _kept_alive(
    answer: "asyncio.Future[list[Reply] | Refused]", written: Callable[[list[Reply] | Refused], str]
) -> AsyncIterator[str]:
    """Yield comments until there is an answer, then the answer: many clients give up after minutes of silence."""
    try:
        while not answer.done():
            yield ":\n\n"
            await asyncio.wait([answer], timeout=_SILENT_SECONDS)
        yield written(answer.result())
    finally:
        answer.cancel()


def _streamed(dialect: ModuleType, chat: ChatRequest, replies: list[Reply] | Refused, number: int) -> str:
    """Return answers or a refusal as server-sent events."""
    if isinstance(replies, Refused):
        return f"event: error\ndata: {json.dumps(dialect.error(replies))}\n\n"
    return "".join(dialect.events(chat, replies, number))


def _ended() -> Refused:
    return Refused("this episode is over", "episode_ended", 410)


async def _body(request: "Request") -> bytes:
    """Return the body of a request."""
    from starlette.requests import ClientDisconnect

    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk if len(body) <= LARGEST else b""  # read to the end, so that the agent can read the answer
    except ClientDisconnect:
        raise Refused("the agent has left", "disconnected", 499) from None
    if len(body) > LARGEST:
        raise Refused(f"the body has more than {LARGEST} bytes", "request_too_large", 413)
    return bytes(body)


def _json(body: Mapping[str, Any], status: int = 200) -> "Response":
    return _sent(json.dumps(body), "application/json", status)


def _sent(body: str, kind: str, status: int = 200) -> "Response":
    from starlette.responses import Response

    ends = {"connection": "close"} if status in (401, 429) else None  # of one that may not stay
    return Response(body, status, ends, media_type=kind)
