"""Environments that a server of the package openenv runs; each episode has its own session."""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_ext.environments.protocol import Conversation, Message, Step
from grpo_ext.errors import Problem
from grpo_ext.rewards.text import completion_text


class OpenEnv(Conversation):
    """A session on a running server; it pays rewards by turn.

    The server's `reset` gets the prompt's seed. If the server calls an action invalid, the model reads why; any other
    error, and a server that is gone, ends the episode.

    Args:
        base_url: address of the server, http://127.0.0.1:8000.
        action: field of the action that the model's message fills; None: the message is the action, in JSON.
        observation: field that the model reads; None: all fields, in JSON.
        reset: further arguments of `reset`.
    """

    def __init__(
        self,
        base_url: str,
        action: str | None = "message",
        observation: str | None = None,
        reset: Mapping[str, Any] | None = None,
    ) -> None:
        from openenv import GenericEnvClient

        self._client = GenericEnvClient(base_url=base_url)
        self._action, self._observation, self._options = action, observation, dict(reset or {})

    @staticmethod
    def preload(**_: object) -> None:
        """Import the client once for all episodes."""
        from openenv import GenericEnvClient  # noqa: F401

    @staticmethod
    def option_problems(base_url: str, action: str | None = "message", **_: object) -> Iterator[Problem]:
        """Yield the problem of a server that does not answer, or has no such action."""
        if importlib.util.find_spec("openenv") is None:
            yield Problem("base_url", base_url, "openenv is not installed", "Install grpo-ext[openenv].")
            return
        import httpx

        try:
            schema = httpx.get(f"{base_url.rstrip('/')}/schema", timeout=10.0).raise_for_status().json()
            fields = list(schema["action"]["properties"])
        except Exception as error:  # no server, or another one
            reason = f"no server of openenv answers there ({type(error).__name__}: {error})"
            yield Problem("base_url", base_url, reason, "Start it, or correct openenv/http://127.0.0.1:8000.")
            return
        if action is not None and action not in fields:
            reason = f"the server's action has the fields {', '.join(fields)}"
            yield Problem("action", action, reason, "Name one, or null.")

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Open the session."""
        result = await self._client.reset(**{"seed": self.seed, **self._options})
        return [{"role": "user", "content": self._text(result.observation)}]

    async def step(self, message: Message) -> Step:
        """Act."""
        text = completion_text([message]).strip()
        try:
            action = dict(json.loads(text)) if self._action is None else {self._action: text}
            result = await self._client.step(action)
        except (ValueError, TypeError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "VALIDATION_ERROR" not in str(error):
                raise
            return Step(f"This is no action: {error}")
        reward = None if result.reward is None else float(result.reward)
        return Step(self._text(result.observation), reward, bool(result.done))

    async def get_reward(self) -> None:
        """Close the session."""
        await self._client.close()

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._observation is not None:
            value = observation[self._observation]
        else:
            value = {name: value for name, value in observation.items() if name != "metadata"}
        return value if isinstance(value, str) else json.dumps(value)
