"""TRL's environments, whose methods are tools: one instance for each row of a generation."""

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_ext.errors import DataError, Problem

_NO_TOOLS = ("reset", "get_reward")


def begin(trainer: Any, rows: Sequence[Mapping[str, Any]], prompts: Sequence[Any]) -> list[Any]:
    """Give each row the tools that TRL's loop calls, and return the prompts with the environments' observations.

    Raises:
        DataError: a row names an environment that there is not.
    """
    factories = trainer.environment_factories
    if factories is not None:
        names = [row.get("environment") if trainer._multi_environment else None for row in rows]
        if unknown := [name for name in names if name not in factories]:
            reason, cure = "not among the environments of environment_factory", f"Name one of {', '.join(factories)}."
            raise DataError([Problem("column 'environment'", unknown[0], reason, cure)])
        trainer._batch_environments, trainer.environments = names, _instances(trainer, names)
    if trainer.tools:
        each = trainer.environments or [None] * len(rows)
        tools = [[*trainer._standalone_tools, *_methods(environment)] for environment in each]
        trainer._sync_tool_dicts, trainer._async_tool_dicts = (
            [{tool.__name__: tool for tool in row if inspect.iscoroutinefunction(tool) is waits} for row in tools]
            for waits in (False, True)
        )
    if factories is None:
        return list(prompts)
    left_out = ("environment",) if trainer._multi_environment else ()
    asked = zip(trainer.environments, rows, prompts, strict=True)
    return [
        _observed(environment.reset(**{k: v for k, v in row.items() if k not in left_out}), prompt)
        for environment, row, prompt in asked
    ]


def _instances(trainer: Any, names: Sequence[str | None]) -> list[Any]:
    """Return an instance for each name from TRL's pool, which grows where it has too few."""
    taken, found = Counter[str | None](), []
    for name in names:
        pool = trainer._environment_pool[name]
        if taken[name] == len(pool):
            pool.append(trainer.environment_factories[name]())
        found.append(pool[taken[name]])
        taken[name] += 1
    return found


def _methods(environment: Any) -> list[Any]:
    members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    public = (name for name, _ in members if name not in _NO_TOOLS and not name.startswith("_"))
    return [getattr(environment, name) for name in public]


def _observed(observation: Any, prompt: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the prompt, an empty one if the row has none, with an observation behind its last message."""
    prompt = prompt or [{"role": "user", "content": ""}]
    if observation is None:
        return prompt
    content = prompt[-1]["content"]
    if isinstance(content, str) and not isinstance(observation, str):
        content = [{"type": "text", "text": content}]
    elif isinstance(observation, str) and not isinstance(content, str):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]
