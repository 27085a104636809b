"""The policy as a client of verifiers, and a harness that is a chat without tools."""

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI
from verifiers.v1.clients import Client, ModelContext, TrainClientConfig
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.dialects.chat import ChatDialect, message_to_wire
from verifiers.v1.harness import Harness, HarnessConfig
from verifiers.v1.interception import InterceptionServerConfig
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.types import AssistantMessage, Response
from verifiers.v1.utils.loaders import (
    default_harness_id,
    env_config_type,
    load_environment,
    resolve_env_config,
)

from grpo_ext.environments.protocol import Message

CHAT = "grpo_ext_chat"
"""Name by which verifiers finds `Chat`: a plugin's id is the name of a top-level module."""
MODEL = "policy"
__all__ = ["Chat", "Policy", "config_of", "play"]


class Policy(Client):
    """A client that puts requests into a queue, each with a future for the answer."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[tuple[list[Message], asyncio.Future[str]]] = asyncio.Queue()

    async def get_response(self, dialect: Any, body: dict, sampling: object, *_: object, **__: object) -> Response:
        """Wait for the answer to a request of the chat dialect without tools."""
        request = dialect.parse_request(body)
        if not isinstance(dialect, ChatDialect) or request.tools:
            raise NotImplementedError("grpo-ext answers requests of the chat dialect that offer no tools")
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.requests.put_nowait(([message_to_wire(message) for message in request.messages], answer))
        message = AssistantMessage(content=await answer)
        response = Response(id=MODEL, created=0, model=MODEL, message=message, finish_reason="stop")
        response.raw = serialize_completion(response, MODEL)
        return response


class Chat(Harness[HarnessConfig]):
    """Verifiers' harness `null` without a process and without tools: one request per turn."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: object,
        runtime: object,
        endpoint: str,
        secret: str,
        mcp_urls: object,
        data: Any,
    ) -> ProgramResult:
        """Send one request."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return ProgramResult(0, "", "")


sys.modules.setdefault(CHAT, sys.modules[__name__])


def config_of(name: str, block: Mapping[str, Any]) -> Any:
    """Return verifiers' configuration of a taskset that one model plays.

    Raises:
        ValueError: several models play it.
    """
    roles = [
        (role, field.default)
        for role, field in env_config_type(name, block.get("id", "")).model_fields.items()
        if isinstance(field.default, AgentConfig)
    ]
    if len(roles) != 1:
        raise ValueError(f"{len(roles)} models play it ({', '.join(role for role, _ in roles)}), and one is trained")
    [(role, default)] = roles
    ours = default.harness is None and default_harness_id(name) != name
    agent = {**({"harness": {"id": CHAT}} if ours else {}), "runtime": {"type": "subprocess"}}
    return resolve_env_config(
        {
            **block,
            "interception": InterceptionServerConfig().model_dump(),  # one server, whose client `play` sets
            "taskset": {**(block.get("taskset") or {}), "id": name},
            role: {**agent, **(block.get(role) or {})},
        }
    )


async def play(config: Any, task: Any, policy: Policy) -> float:
    """Run an episode and return its reward.

    Raises:
        RuntimeError: verifiers counts it as failed.
    """
    env = load_environment(config)
    client = TrainClientConfig()
    async with env.serving():
        env._interception.clients[client.model_dump_json()] = policy
        episode = await env.run_episode(task, ModelContext(model=MODEL, client=client))
    if not episode.ok or len(episode.traces) != 1:
        errors = [error for part in (episode, *episode.traces) for error in part.errors]
        raise RuntimeError(errors[-1].message if errors else f"it has {len(episode.traces)} runs, and one is trained")
    return float(episode.traces[0].reward)
