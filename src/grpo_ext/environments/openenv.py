"""Environments that a server of the package openenv runs: each attempt is a session of its own."""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_ext.environments.protocol import Conversation, Message, Step
from grpo_ext.rewards.text import completion_text


class OpenEnv(Conversation):
    """A session on a server that is already running; its rewards are those of its turns.

    The prompt's seed is handed to the server's `reset`. An action that the server calls invalid the model is told
    of; any other error, and a server that is gone, ends the attempt.

    Args:
        base_url: of the server, http://127.0.0.1:8000.
        action: the field of the action that the model's message fills; None: the message is the action, in JSON.
        observation: the field that the model reads; None: all fields, in JSON.
        reset: what else `reset` is called with.
    """

    def __init__(
        self,
        base_url: str,
        action: str | None = "message",
        observation: str | None = None,
        reset: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing is connected yet."""
        from openenv import GenericEnvClient

        self._client = GenericEnvClient(base_url=base_url)
        self._action, self._observation, self._options = action, observation, dict(reset or {})

    @staticmethod
    def preload(**_: Any) -> None:
        """Import the client once for all attempts."""
        from openenv import GenericEnvClient  # noqa: F401

    @staticmethod
    def option_problems(base_url: str, action: str | None = "message", **_: Any) -> Iterator[str]:
        """Whether a server answers there, and has such an action."""
        if importlib.util.find_spec("openenv") is None:
            yield f"openenv/{base_url} needs openenv, which is not installed. Install grpo-ext[openenv]."
            return
        import httpx

        try:
            schema = httpx.get(f"{base_url.rstrip('/')}/schema", timeout=10.0).raise_for_status().json()
            known = list(schema["action"]["properties"])
        except Exception as error:  # nobody there, or no such server
            yield (
                f"base_url={base_url!r}: no server of openenv answers there ({type(error).__name__}: {error}). Start "
                "it, and write its address, openenv/http://127.0.0.1:8000."
            )
            return
        if action is not None and action not in known:
            yield f"action={action!r}: the server's action has the fields {', '.join(known)}. Name one, or null."

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Open the session."""
        result = await self._client.reset(**{"seed": self.seed, **self._options})
        return [{"role": "user", "content": self._shown(result.observation)}]

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
        return Step(self._shown(result.observation), reward, bool(result.done))

    async def get_reward(self) -> None:
        """Close the session."""
        await self._client.close()

    def _shown(self, observation: Mapping[str, Any]) -> str:
        if self._observation is not None:
            value = observation[self._observation]
        else:
            value = {name: value for name, value in observation.items() if name != "metadata"}
        return value if isinstance(value, str) else json.dumps(value)
