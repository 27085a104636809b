"""Tasksets of the package verifiers (its v1), for one model: the policy is what an episode's harness speaks to."""

import asyncio
import functools
import importlib.util
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_ext.environments.protocol import Conversation, Message, Step

INDEX = "idx"
"""Column of the data that says which task a row is, as in verifiers' own rows."""


class Verifiers(Conversation):
    """One episode: verifiers runs it and scores it, and each of its requests for a completion is a turn of ours.

    A request that goes on from the last is read on; one that rewrites the conversation stands in its place. Task
    number `idx` of the row is played, else one that the prompt's seed draws.

    Args:
        name: of an installed taskset, as `taskset.id` has it.
        tasks: how many of its tasks are played, from the first on.
        config: verifiers' block `[env]`: `taskset`, `agent`, `timeout`, ... The model speaks without tools unless
            a harness is named, and a named one runs in a subprocess unless `runtime` says otherwise.
    """

    def __init__(self, name: str, tasks: int = 1000, **config: Any) -> None:
        """Nothing is loaded yet."""
        self._options = json.dumps({"name": name, "tasks": tasks, **config})
        self._said: list[Message] = []

    @staticmethod
    def preload(**options: Any) -> None:
        """Load the tasks, and what an episode imports as it begins, once for all attempts."""

        async def begin() -> None:
            first = Verifiers(**options)
            await first.reset({INDEX: 0})
            await first.get_reward()

        asyncio.run(begin())

    @staticmethod
    def option_problems(name: str, tasks: int = 1000, **config: Any) -> Iterator[str]:
        """Whether there is such a taskset, and whether one model can play it."""
        if importlib.util.find_spec("verifiers") is None:
            yield f"verifiers/{name} needs verifiers, which is not installed. Install grpo-ext[verifiers]."
            return
        if tasks < 1:
            yield f"tasks={tasks!r}: there would be none to play. Set 1 or more."
            return
        try:
            _plan(json.dumps({"name": name, "tasks": tasks, **config}))
        except Exception as error:  # of verifiers or the taskset
            yield (
                f"verifiers/{name} cannot be played here ({type(error).__name__}: {error}). Install the package of "
                "its taskset (verifiers 0.4 or newer), and name its settings under kwargs."
            )

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Begin the episode, as far as its first request."""
        from grpo_ext.environments.verifiers_seat import Policy, play

        config, tasks = _plan(self._options)
        task = tasks[int(row.get(INDEX, self.seed)) % len(tasks)]
        self._policy = Policy()
        self._episode = asyncio.ensure_future(play(config, task, self._policy))
        if not await self._asked():
            raise RuntimeError("the episode was over before the model was asked")
        return self._said

    async def step(self, message: Message) -> Step:
        """Answer the request, and wait for the next, or for the reward."""
        before = [*self._said, {"role": "assistant", "content": message["content"]}]
        if not self._reply.done():  # by a time limit of verifiers'
            self._reply.set_result(message["content"])
        if not await self._asked():
            return Step(None, self._episode.result(), True)
        if self._said[: len(before)] == before:
            return Step(self._said[len(before) :])
        return Step(self._said, afresh=True)

    async def get_reward(self) -> None:
        """End an episode that was cut."""
        self._episode.cancel()
        await asyncio.gather(self._episode, return_exceptions=True)

    async def _asked(self) -> bool:
        """Whether there is another request; else the episode is over."""
        request = asyncio.ensure_future(self._policy.requests.get())
        await asyncio.wait({request, self._episode}, return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            self._episode.result()
            return False
        self._said, self._reply = request.result()
        return True


@functools.cache
def _plan(options: str) -> tuple[Any, list[Any]]:
    """The checked configuration, and the tasks."""
    from verifiers.v1.utils.loaders import load_taskset

    from grpo_ext.environments.verifiers_seat import configured

    given = json.loads(options)
    name, count = given.pop("name"), given.pop("tasks", 1000)
    config = configured(name, given)
    taskset = load_taskset(config.taskset)
    if type(taskset).task_type().toolsets(config.taskset.task) or taskset.toolsets(config.taskset):
        raise ValueError("it offers tools, which are not handed on to the policy")
    tasks = list(itertools.islice(taskset, count))
    if not tasks:
        raise ValueError("it has no tasks")
    return config, tasks
