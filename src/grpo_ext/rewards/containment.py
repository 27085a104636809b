"""Rewards of a user's own, kept from ending a run."""

import math
from typing import Any

import torch
from trl.trainer.utils import get_callable_name, is_async_callable

from grpo_ext.rewards.outcomes import to_float
from grpo_ext.rewards.runtime import Component
from grpo_ext.rewards.workers.worker import NotValues, last_lines, listed


def contained(function: Any, errors: list[str], no_numbers: dict[str, list[int]]) -> Any:
    """A reward of the user's own that, should it raise, scores nothing and leaves its message in `errors`.

    Rows of a batch for which it returned NaN or inf stand in `no_numbers` under its name; None is neither.
    """
    if isinstance(function, Component | torch.nn.Module):
        return function

    def report(error: Exception, columns: dict[str, Any]) -> list[None]:
        said = "" if isinstance(error, NotValues) else " raised"
        errors.append(f"reward {name!r}{said}: {last_lines(error)}")
        no_numbers[name] = []
        return [None] * len(columns["completions"])

    def checked(values: Any, columns: dict[str, Any]) -> list[float | None]:
        values, expected = listed(values), len(columns["completions"])
        if len(values) != expected:
            raise NotValues(
                f"it returned {len(values)} values for {expected} completions. Return one for each, or None"
            )
        numbers = []
        for row, value in enumerate(values):
            number, problem = to_float(value)
            if problem:
                raise NotValues(f"for row {row} {problem}")
            numbers.append(number)
        no_numbers[name] = [row for row, number in enumerate(numbers) if not math.isfinite(number or 0.0)]
        return numbers

    name = get_callable_name(function)

    async def reward_async(**columns: Any) -> Any:
        try:
            return checked(await function(**columns), columns)
        except Exception as error:
            return report(error, columns)

    def reward(**columns: Any) -> Any:
        try:
            return checked(function(**columns), columns)
        except Exception as error:
            return report(error, columns)

    chosen: Any = reward_async if is_async_callable(function) else reward
    chosen.__name__ = name
    return chosen
