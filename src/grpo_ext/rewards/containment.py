"""Rewards of a user's own, kept from ending a run."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from trl.trainer.utils import get_callable_name, is_async_callable

from grpo_ext.rewards.failures import from_outside, nan_warning
from grpo_ext.rewards.outcomes import to_number
from grpo_ext.rewards.runtime import Component
from grpo_ext.rewards.turns import split, turn_counts
from grpo_ext.rewards.workers.worker import safe_repr, traceback_tail

logger = logging.getLogger(__name__)


def contained(function: Any, errors: list[str], no_numbers: dict[str, list[int]]) -> Any:
    """A reward of the user's own that, should it raise, scores nothing and leaves its message in `errors`.

    NaN counts as None, as in TRL; it is logged. Rows of a batch for which it returned inf are as_list in `no_numbers`
    under its name. What it returned for the turns of trajectories is kept in its own `turns`.
    """
    if isinstance(function, Component | torch.nn.Module):
        return function

    def report(error: BaseException, columns: dict[str, Any]) -> list[None]:
        if from_outside(error):
            raise error
        what = f": {error}" if isinstance(error, _Wrong) else f" raised: {traceback_tail(error)}"
        errors.append(f"reward {name!r}{what}")
        no_numbers[name], chosen.turns = [], []
        return [None] * len(columns["completions"])

    def checked(values: Any, columns: dict[str, Any]) -> list:
        values = _listed(values, len(columns["completions"]))
        values, turns = _by_turn(values, columns)
        numbers = _numbers(values)
        no_numbers[name] = numbers.isinf().nonzero().flatten().tolist()
        nan = numbers.isnan().tolist()
        chosen.turns = [None if lost else earned for lost, earned in zip(nan, turns, strict=True)]
        count(sum(nan), columns)
        return [None if lost else value for lost, value in zip(nan, values, strict=True)]

    def count(nans: int, columns: dict[str, Any]) -> None:
        """From the first NaN on: TRL's own functions log nothing else."""
        if nans and not chosen.has_returned_nan:
            chosen.has_returned_nan = True
            logger.warning(nan_warning(name, nans, len(columns["completions"])))
        if chosen.has_returned_nan and (log_metric := columns.get("log_metric")) is not None:
            log_metric(f"rewards/{name}/nan_frac", nans / len(columns["completions"]))

    name = get_callable_name(function)

    async def reward_async(**columns: Any) -> Any:
        try:
            return checked(await function(**columns), columns)
        except BaseException as error:
            return report(error, columns)

    def reward(**columns: Any) -> Any:
        try:
            return checked(function(**columns), columns)
        except BaseException as error:
            return report(error, columns)

    chosen: Any = reward_async if is_async_callable(function) else reward
    chosen.__name__, chosen.turns, chosen.has_returned_nan = name, [], False
    return chosen


class _Wrong(TypeError):
    """What was returned are no rewards."""


def _listed(values: Any, expected: int) -> list[Any]:
    single = getattr(values, "ndim", 1) == 0  # a tensor that holds one number
    if not isinstance(values, Iterable) or isinstance(values, str | Mapping) or single:
        told = f"it returned {safe_repr(values)}, a {type(values).__name__}"
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
        told = (problem for number, problem in map(to_number, values) if number is None and "not a number" in problem)
        raise _Wrong(f"{next(told, 'its values are no numbers')}. Return floats, or None.") from None
