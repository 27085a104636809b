"""Tasksets of the package verifiers (its v1) for one model, whose requests the policy answers."""

import asyncio
import functools
import importlib.util
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_ext.environments.protocol import Conversation, Message, Step
from grpo_ext.errors import Problem
from grpo_ext.objective.options import Count

INDEX = "idx"
"""Column of the data with the number of a row's task, as in verifiers' own rows."""


class Verifiers(Conversation):
    """One episode, which verifiers runs and scores. Each of its requests for a completion is a turn.

    A request that extends the last one is read as its continuation, any other replaces the conversation. The task is
    number `idx` of the row, else one that the prompt's seed draws.

    Args:
        name: name of an installed taskset, as `taskset.id` has it.
        tasks: number of its tasks that are played, from the first on.
        config: verifiers' block `[env]`: `taskset`, `agent`, `timeout`, ... The model has no tools unless a harness
            is named; a named harness runs in a subprocess unless `runtime` is set.
    """

    def __init__(self, name: str, tasks: Count = 1000, **config: object) -> None:
        self._options = json.dumps({"name": name, "tasks": tasks, **config})
        self._messages: list[Message] = []

    @staticmethod
    def preload(**options: Any) -> None:
        """Load the tasks and the imports of an episode once for all attempts."""

        async def begin() -> None:
            first = Verifiers(**options)
            await first.reset({INDEX: 0})
            await first.get_reward()

        asyncio.run(begin())

    @staticmethod
    def option_problems(name: str, tasks: int = 1000, **config: object) -> Iterator[Problem]:
        """Yield the problem of a taskset that is missing, or that one model cannot play."""
        if importlib.util.find_spec("verifiers") is None:
            yield Problem("name", name, "verifiers is not installed", "Install grpo-ext[verifiers].")
            return
        try:
            _plan(json.dumps({"name": name, "tasks": tasks, **config}))
        except Exception as error:  # of verifiers or the taskset
            reason = f"it cannot be played here ({type(error).__name__}: {error})"
            cure = "Install the package of its taskset (verifiers 0.4 or newer), and name its settings under kwargs."
            yield Problem("name", name, reason, cure)

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Begin the episode and wait for its first request."""
        from grpo_ext.environments.verifiers_client import Policy, play

        config, tasks = _plan(self._options)
        task = tasks[int(row.get(INDEX, self.seed)) % len(tasks)]
        self._policy = Policy()
        self._episode = asyncio.ensure_future(play(config, task, self._policy))
        if not await self._next_request():
            raise RuntimeError("the episode was over before the model was asked")
        return self._messages

    async def step(self, message: Message) -> Step:
        """Answer the request and wait for the next one, or for the reward."""
        before = [*self._messages, {"role": "assistant", "content": message["content"]}]
        if not self._reply.done():  # else verifiers' time limit has ended it
            self._reply.set_result(message["content"])
        if not await self._next_request():
            return Step(None, self._episode.result(), True)
        if self._messages[: len(before)] == before:
            return Step(self._messages[len(before) :])
        return Step(self._messages, afresh=True)

    async def get_reward(self) -> None:
        """End an unfinished episode."""
        self._episode.cancel()
        await asyncio.gather(self._episode, return_exceptions=True)

    async def _next_request(self) -> bool:
        """Return whether there is another request; if not the episode is over."""
        request = asyncio.ensure_future(self._policy.requests.get())
        await asyncio.wait({request, self._episode}, return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            self._episode.result()
            return False
        self._messages, self._reply = request.result()
        return True


@functools.cache
def _plan(options: str) -> tuple[Any, list[Any]]:
    """Return the checked configuration and the tasks."""
    from verifiers.v1.utils.loaders import load_taskset

    from grpo_ext.environments.verifiers_client import config_of

    given = json.loads(options)
    name, count = given.pop("name"), given.pop("tasks", 1000)
    config = config_of(name, given)
    taskset = load_taskset(config.taskset)
    if type(taskset).task_type().toolsets(config.taskset.task) or taskset.toolsets(config.taskset):
        raise ValueError("it offers tools, which the policy would not get")
    tasks = list(itertools.islice(taskset, count))
    if not tasks:
        raise ValueError("it has no tasks")
    return config, tasks
