"""An agent that is a function: `async def agent(row, client)`, with a client of OpenAI's package."""

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from grpo_ext.environments.protocol import Agent, AgentTask
from grpo_ext.errors import Problem
from grpo_ext.registry import import_path


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
        """Import the function and the client once for all attempts."""
        import openai  # noqa: F401

        import_path(function)

    @staticmethod
    def option_problems(function: object, **_: object) -> Iterator[Problem]:
        """Yield the problem of a client that is not installed."""
        if find_spec("openai") is None:
            yield Problem("function", function, "openai is not installed, whose client it gets", "pip install openai.")
        if not inspect.iscoroutinefunction(import_path(function) if isinstance(function, str) else function):
            yield Problem("function", function, "not an async function", "Write async def agent(row, client).")

    async def run(self, task: AgentTask) -> float | None:
        """Call the function."""
        import openai

        http = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)  # no proxy, no certificates on loopback
        url = f"{task.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=task.key, http_client=http, timeout=None) as client:
            return await self._function(dict(task.row), client, **self._options)
