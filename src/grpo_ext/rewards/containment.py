"""Rewards of a user's own, kept from ending a run."""

from typing import Any

import torch
from trl.trainer.utils import get_callable_name, is_async_callable

from grpo_ext.rewards.runtime import Component
from grpo_ext.rewards.workers.worker import last_lines


def contained(function: Any, errors: list[str], no_numbers: dict[str, list[int]]) -> Any:
    """A reward of the user's own that, should it raise, scores nothing and leaves its message in `errors`.

    Rows of a batch for which it returned NaN or inf stand in `no_numbers` under its name; None is neither.
    """
    if isinstance(function, Component | torch.nn.Module):
        return function

    def report(error: Exception, columns: dict[str, Any]) -> list[None]:
        errors.append(f"reward {name!r} raised: {last_lines(error)}")
        no_numbers[name] = []
        return [None] * len(columns["completions"])

    def checked(values: Any, columns: dict[str, Any]) -> list:
        values, expected = list(values), len(columns["completions"])
        numbers = torch.tensor([0.0 if v is None else v for v in values], dtype=torch.float32)  # as TRL, unguarded
        if len(values) != expected:
            raise ValueError(f"it returned {len(values)} values for {expected} completions")
        no_numbers[name] = (~numbers.isfinite()).nonzero().flatten().tolist()
        return values

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
