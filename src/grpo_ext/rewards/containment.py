"""Rewards of a user's own, kept from ending a run."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from trl.trainer.utils import get_callable_name, is_async_callable

from grpo_ext.rewards.outcomes import to_number
from grpo_ext.rewards.runtime import Component
from grpo_ext.rewards.turns import split, turn_counts
from grpo_ext.rewards.workers.worker import last_lines, shown


def contained(function: Any, errors: list[str], no_numbers: dict[str, list[int]]) -> Any:
    """A reward of the user's own that, should it raise, scores nothing and leaves its message in `errors`.

    Rows of a batch for which it returned NaN or inf stand in `no_numbers` under its name; None is neither. What it
    said of the turns of trajectories stands in its own `turns`.
    """
    if isinstance(function, Component | torch.nn.Module):
        return function

    def report(error: Exception, columns: dict[str, Any]) -> list[None]:
        what = f": {error}" if isinstance(error, _Wrong) else f" raised: {last_lines(error)}"
        errors.append(f"reward {name!r}{what}")
        no_numbers[name], chosen.turns = [], []
        return [None] * len(columns["completions"])

    def checked(values: Any, columns: dict[str, Any]) -> list:
        values = _listed(values, len(columns["completions"]))
        values, chosen.turns = _by_turn(values, columns)
        numbers = _numbers(values)
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
    chosen.__name__, chosen.turns = name, []
    return chosen


class _Wrong(TypeError):
    """What was returned are no rewards."""


def _listed(values: Any, expected: int) -> list[Any]:
    single = getattr(values, "ndim", 1) == 0  # a tensor that holds one number
    if not isinstance(values, Iterable) or isinstance(values, str | Mapping) or single:
        told = f"it returned {shown(values)}, a {type(values).__name__}"
        raise _Wrong(f"{told}. Return one number for each completion, in a list.")
    values = list(values)
    if len(values) != expected:
        raise _Wrong(f"it returned {len(values)} values for {expected} completions. Return one number for each.")
    return values


def _by_turn(values: list[Any], columns: dict[str, Any]) -> tuple[list[Any], list[list[float] | None]]:
    try:
        parts = [split(value, turns) for value, turns in zip(values, turn_counts(columns), strict=True)]
    except ValueError as error:
        raise _Wrong(str(error)) from None
    return [total for total, _ in parts], [earned for _, earned in parts]


def _numbers(values: list[Any]) -> torch.Tensor:
    try:
        return torch.tensor([0.0 if v is None else v for v in values], dtype=torch.float32)  # as TRL, unguarded
    except (TypeError, ValueError, RuntimeError):
        told = (problem for number, problem in map(to_number, values) if number is None and "no number" in problem)
        raise _Wrong(f"{next(told, 'its values are no numbers')}. Return floats, or None.") from None
