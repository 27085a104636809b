"""An agent that is a function: `async def agent(row, client)`, with a client of OpenAI's package."""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from grpo_ext.environments.endpoint import chat
from grpo_ext.environments.endpoint.requests import ChatRequest, Reply
from grpo_ext.environments.protocol import Agent, AgentTask
from grpo_ext.errors import Problem
from grpo_ext.registry import import_path

if TYPE_CHECKING:
    import openai


class AgentFunction(Agent):
    """Calls a function with the row and an `openai.AsyncOpenAI`; what it returns is the reward, None for no reward.

    Args:
        function: the function, or its path.
        options: its further arguments.
    """

    def __init__(self, function: str | Callable[..., Awaitable[float | None]], **options: Any) -> None:
        self._function = import_path(function) if isinstance(function, str) else function
        self._options: Mapping[str, Any] = options

    @staticmethod
    def preload(function: str, **_: object) -> None:
        """Import the function, and what the client needs, once for all episodes."""
        import_path(function)
        asyncio.run(_ask_once())

    @staticmethod
    def option_problems(function: object, **options: object) -> Iterator[Problem]:
        """Yield a client that is not installed, and what cannot be called with a row, a client and the options."""
        if find_spec("openai") is None:
            yield Problem("function", function, "openai is not installed, whose client it gets", "pip install openai.")
        called: Any = import_path(function) if isinstance(function, str) else function
        if not inspect.iscoroutinefunction(called):
            cure = "Write async def agent(row, client), or name an environment's class."
            yield Problem("function", function, "neither a class nor an async function", cure)
            return
        try:
            inspect.signature(called).bind(None, None, **options)
        except TypeError as error:
            cure = f"It is {called.__name__}{inspect.signature(called)}, called with row, client and the kwargs."
            yield Problem("", options, str(error), cure)

    async def run(self, task: AgentTask) -> float | None:
        """Call the function."""
        async with client_of(task.url, task.key) as client:
            return await self._function(dict(task.row), client, **self._options)


def client_of(url: str, key: str) -> "openai.AsyncOpenAI":
    """Return a client of an endpoint on loopback: without proxy, certificates and time limit."""
    import openai

    http = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, http_client=http, timeout=None)


async def _ask_once() -> None:
    """Send a request to a server that is gone after it: a client builds much of its package with its first answer."""
    body = json.dumps(chat.document(ChatRequest([]), [Reply("", "", [], "stop", 0, 0)], 0)).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + body)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, client_of("http://{}:{}".format(*server.sockets[0].getsockname()), "none") as client:
        await client.chat.completions.create(model="policy", messages=[])
