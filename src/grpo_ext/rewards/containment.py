"""Adapters between TRL, which wants a list of rewards, and rewards that return `Scores` or may raise."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from trl.trainer.utils import get_callable_name, is_async_callable

from grpo_ext.rewards.failures import from_outside, nan_warning
from grpo_ext.rewards.outcomes import Scores, split, to_float, turn_counts
from grpo_ext.rewards.runtime import AsyncComponent, Component
from grpo_ext.rewards.workers.worker import safe_repr, traceback_tail

logger = logging.getLogger(__name__)

Take = Callable[[str, Scores], None]
"""Receives the name of a reward and its scores of a batch."""


def for_trl(reward: Any, take: Take) -> Any:
    """Return `reward` as a function that returns TRL's list and hands the whole `Scores` to `take`.

    A failure never raises here, on one process only: it is in `Scores.error`. Models are returned as they are.
    """
    if isinstance(reward, torch.nn.Module):
        return reward
    scorer: Any = reward if isinstance(reward, Component) else Contained(reward)
    name = scorer.__name__

    def taken(scores: Scores) -> list[float | None]:
        take(name, scores)
        return scores.values

    async def call_async(**columns: Any) -> list[float | None]:
        return taken(await scorer.scores_async(columns))

    def call(**columns: Any) -> list[float | None]:
        return taken(scorer.scores(columns))

    chosen = call_async if isinstance(scorer, AsyncComponent) or getattr(scorer, "is_async", False) else call
    chosen.__name__ = name
    return chosen


class Contained:
    """A user's function that returns `Scores`: should it raise, no completion is scored and `error` is set.

    NaN counts as None, as in TRL; it is logged. inf stays, for the trainer to find.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.__name__ = function, get_callable_name(function)
        self.is_async = is_async_callable(function)
        self._has_returned_nan = False

    def scores(self, columns: Mapping[str, Any]) -> Scores:
        """Score one batch."""
        try:
            return self._checked(self.function(**columns), columns)
        except BaseException as error:
            return self._failed(error, columns)

    async def scores_async(self, columns: Mapping[str, Any]) -> Scores:
        """Score one batch by an async function."""
        try:
            return self._checked(await self.function(**columns), columns)
        except BaseException as error:
            return self._failed(error, columns)

    def _failed(self, error: BaseException, columns: Mapping[str, Any]) -> Scores:
        if from_outside(error):
            raise error
        reason = f": {error}" if isinstance(error, _WrongValue) else f" raised: {traceback_tail(error)}"
        none = [None] * len(columns["completions"])
        return Scores([*none], [*none], error=f"reward {self.__name__!r}{reason}")

    def _checked(self, values: Any, columns: Mapping[str, Any]) -> Scores:
        values = _listed(values, len(columns["completions"]))
        values, turns = _by_turn(values, columns)
        nan = _numbers(values).isnan().tolist()
        self._count(sum(nan), columns)
        return Scores(
            [None if lost else value for lost, value in zip(nan, values, strict=True)],
            [None if lost else rewards for lost, rewards in zip(nan, turns, strict=True)],
        )

    def _count(self, nans: int, columns: Mapping[str, Any]) -> None:
        """Log the share of NaN, from the first one on."""
        if nans and not self._has_returned_nan:
            self._has_returned_nan = True
            logger.warning(nan_warning(self.__name__, nans, len(columns["completions"])))
        if self._has_returned_nan and (log_metric := columns.get("log_metric")) is not None:
            log_metric(f"rewards/{self.__name__}/nan_frac", nans / len(columns["completions"]))


class _WrongValue(TypeError):
    """A function returned something else than rewards."""


def _listed(values: Any, expected: int) -> list[Any]:
    single = getattr(values, "ndim", 1) == 0  # a tensor that holds one number
    if not isinstance(values, Iterable) or isinstance(values, str | Mapping) or single:
        found = f"it returned {safe_repr(values)}, a {type(values).__name__}"
        raise _WrongValue(f"{found}. Return one number for each completion, in a list.")
    values = list(values)
    if len(values) != expected:
        raise _WrongValue(f"it returned {len(values)} values for {expected} completions. Return one number for each.")
    return values


def _by_turn(values: list[Any], columns: Mapping[str, Any]) -> tuple[list[Any], list[list[float] | None]]:
    try:
        parts = [split(value, turns) for value, turns in zip(values, turn_counts(columns), strict=True)]
    except ValueError as error:
        raise _WrongValue(str(error)) from None
    return [total for total, _ in parts], [rewards for _, rewards in parts]


def _numbers(values: list[Any]) -> torch.Tensor:
    try:
        return torch.tensor([0.0 if v is None else v for v in values], dtype=torch.float32)  # as TRL, unguarded
    except (TypeError, ValueError, RuntimeError):
        problems = (problem for number, problem in map(to_float, values) if number is None and problem)
        raise _WrongValue(
            f"{next(problems, 'it returned values that are not numbers')}. Return floats, or None."
        ) from None
