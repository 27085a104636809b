"""Scoring a batch by all functions of a trainer, those of a recipe and a user's own, which may raise."""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from grpo_ext.child_processes import traceback_tail
from grpo_ext.rewards.columns import CALLBACKS, row_count
from grpo_ext.rewards.failures import from_outside, nan_warning
from grpo_ext.rewards.outcomes import Scores, read_value, turn_counts, wrong_length
from grpo_ext.rewards.runtime import AsyncComponent, Component
from grpo_ext.rewards.signatures import callable_name, is_async
from grpo_ext.rewards.workers.worker import NotRewards, listed_rewards
from grpo_ext.waiting import SIGNALLED, Interrupted, awaited, named

logger = logging.getLogger(__name__)


class Scored(NamedTuple):
    """A reward's scores of a batch, and what it logged."""

    scores: Scores
    logged: list[tuple[str, str, Any]]
    """Calls of TRL's callbacks: name of the callback, of the column or metric, and values."""


def scorer_of(reward: Any) -> Any:
    """Return what scores batches by `reward` as `Scores`; a model is returned as it is."""
    return reward if isinstance(reward, Component | Contained | torch.nn.Module) else Contained(reward)


def scores_or_left(scorer: Any, columns: Mapping[str, Any]) -> Scores:
    """Score a batch; where a signal ends the run and the reward does not end, the error is `SIGNALLED`.

    All processes raise when their rewards are checked.
    """
    try:
        return scorer.scores(columns)
    except Interrupted:
        return _left(columns)


def _left(columns: Mapping[str, Any]) -> Scores:
    rows = row_count(columns)
    return Scores([0.0] * rows, [None] * rows, error=SIGNALLED)


def waits(scorer: Any) -> bool:
    """Return whether a scorer is awaited."""
    return isinstance(scorer, AsyncComponent) or getattr(scorer, "is_async", False)


def scored_by(
    scorers: Sequence[Any],
    columns: Mapping[str, Any],
    loop: asyncio.AbstractEventLoop | None,
    timed: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> dict[str, Scored]:
    """Score a batch by all functions as TRL does: one after the other, then the async ones together in `loop`.

    Args:
        scorers: by `scorer_of`; models are left out.
        columns: as TRL passes them, without its callbacks.
        loop: the event loop of TRL, where a function is async.
        timed: entered around the call of each function, with its name.
    """
    functions = [scorer for scorer in scorers if not isinstance(scorer, torch.nn.Module)]
    scored: dict[str, Scored] = {}
    for scorer in (one for one in functions if not waits(one)):
        given, logged = _with_log(columns)
        with timed(scorer.__name__):
            scored[scorer.__name__] = Scored(scores_or_left(scorer, given), logged)

    async def by(scorer: Any) -> tuple[str, Scored]:
        given, logged = _with_log(columns)
        with timed(scorer.__name__):
            try:
                return scorer.__name__, Scored(await scorer.scores_async(given), logged)
            except Interrupted:
                return scorer.__name__, Scored(_left(columns), logged)

    async def by_all(later: Sequence[Any]) -> list[tuple[str, Scored]]:
        return await asyncio.gather(*map(by, later))

    if later := [scorer for scorer in functions if waits(scorer)]:
        assert loop is not None
        scored |= asyncio.run_coroutine_threadsafe(by_all(later), loop).result()
    return scored


def _with_log(columns: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str, Any]]]:
    """Return columns with callbacks that record their calls, and the record."""
    logged: list[tuple[str, str, Any]] = []

    def recorder(callback: str) -> Callable[[str, Any], None]:
        return lambda name, values: logged.append((callback, name, values))

    return {**columns, **{callback: recorder(callback) for callback in CALLBACKS}}, logged


class Contained:
    """A user's function that returns `Scores`: should it raise, no completion is scored and `error` is set.

    NaN counts as None, as in TRL; it is logged. inf stays, for the trainer to find.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.__name__, self.is_async = function, callable_name(function), is_async(function)
        self._has_returned_nan = False

    def scores(self, columns: Mapping[str, Any]) -> Scores:
        """Score one batch."""
        try:
            with self._named():
                values = self.function(**columns)
            return self._checked(values, columns)
        except BaseException as error:
            return self._failed(error, columns)

    async def scores_async(self, columns: Mapping[str, Any]) -> Scores:
        """Score one batch by an async function."""
        try:
            with self._named():
                values = await awaited(self.function(**columns))
            return self._checked(values, columns)
        except BaseException as error:
            return self._failed(error, columns)

    def _named(self) -> AbstractContextManager[None]:
        return named(f"reward {self.__name__!r}", "A time limit is the function's own matter: give it one.")

    def _failed(self, error: BaseException, columns: Mapping[str, Any]) -> Scores:
        if from_outside(error):
            raise error
        reason = f": {error}" if isinstance(error, NotRewards) else f" raised: {traceback_tail(error)}"
        none = [None] * row_count(columns)
        return Scores([*none], [*none], error=f"reward {self.__name__!r}{reason}")

    def _checked(self, values: Any, columns: Mapping[str, Any]) -> Scores:
        listed, counts = listed_rewards(values), turn_counts(columns)
        if len(listed) != len(counts):
            raise NotRewards(wrong_length(len(listed), len(counts)))
        read = [read_value(value, turns) for value, turns in zip(listed, counts, strict=True)]
        for _, _, problem in read:
            if problem:
                raise NotRewards(problem)
        nan = [number is not None and math.isnan(number) for number, _, _ in read]
        self._count(sum(nan), columns)
        return Scores(
            [None if lost else number for lost, (number, _, _) in zip(nan, read, strict=True)],
            [None if lost else turns for lost, (_, turns, _) in zip(nan, read, strict=True)],
        )

    def _count(self, nans: int, columns: Mapping[str, Any]) -> None:
        """Log the share of NaN, from the first one on."""
        if nans and not self._has_returned_nan:
            self._has_returned_nan = True
            logger.warning(nan_warning(self.__name__, nans, row_count(columns)))
        if self._has_returned_nan and (log_metric := columns.get("log_metric")) is not None:
            log_metric(f"rewards/{self.__name__}/nan_frac", nans / row_count(columns))
