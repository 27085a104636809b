"""TRL's environments, whose methods are tools: one instance for each row of a generation."""

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_ext.errors import DataError, Problem

_NO_TOOLS = ("reset", "get_reward")


def named(rows: Sequence[Mapping[str, Any]], factories: Any, *, several: bool) -> list[str | None]:
    """Return the environment that each row names where there are `several`.

    Raises:
        DataError: a row names an environment that there is not.
    """
    names = [row.get("environment") if several else None for row in rows]
    if unknown := [name for name in names if name not in factories]:
        reason, cure = "not among the environments of environment_factory", f"Name one of {', '.join(factories)}."
        raise DataError([Problem("column 'environment'", unknown[0], reason, cure)])
    return names


def instances(names: Sequence[str | None], factories: Any, pool: Mapping[Any, list[Any]]) -> list[Any]:
    """Return an instance for each name from TRL's pool, which grows where it has too few."""
    taken, environments = Counter[str | None](), []
    for name in names:
        if taken[name] == len(pool[name]):
            pool[name].append(factories[name]())
        environments.append(pool[name][taken[name]])
        taken[name] += 1
    return environments


def tools_by_row(standalone: Sequence[Any], environments: Sequence[Any]) -> tuple[list[dict], list[dict]]:
    """Return the tools of each row by name, first those that are not async: `standalone`, and its environment's."""
    tools = [[*standalone, *_methods(environment)] for environment in environments]
    sync, waits = (
        [{tool.__name__: tool for tool in row if inspect.iscoroutinefunction(tool) is waits} for row in tools]
        for waits in (False, True)
    )
    return sync, waits


def observed(
    rows: Sequence[Mapping[str, Any]], prompts: Sequence[Any], environments: Sequence[Any], *, several: bool
) -> list[Any]:
    """Reset the environment of each row, and return the prompts with what they observe."""
    left_out = ("environment",) if several else ()
    return [
        _observed(environment.reset(**{k: v for k, v in row.items() if k not in left_out}), prompt)
        for environment, row, prompt in zip(environments, rows, prompts, strict=True)
    ]


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
