"""`Scorer`: what scores a batch by one reward, an entry of a recipe or a user's own function; and a batch by all."""

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from grpo_ext.config.weight_schedule import weight_at
from grpo_ext.rewards.calls import LATE, Calls, call, call_async
from grpo_ext.rewards.columns import Columns, row_count, take
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.outcomes import Scores, read_value, turn_counts
from grpo_ext.rewards.signatures import callable_name, is_async
from grpo_ext.rewards.workers.pool import Outcome, Status
from grpo_ext.waiting import SIGNALLED, Interrupted

logger = logging.getLogger(__name__)


class Scorer(ABC):
    """Scores batches by one reward; no failure of the reward raises.

    Attributes:
        spec: the reward, as an entry of `reward_funcs`.
        is_async: whether it is an async function that is awaited in this process.
        cure: ends the line about a call in this process that takes long.
    """

    cure: str
    runtime: Any = None
    """The `rewards.runtime.Runtime` of a recipe's reward."""

    def __init__(self, spec: RewardSpec) -> None:
        self.spec, self.__name__, self.is_async = spec, spec.name, is_async(spec.callable)
        self._has_returned_nan = False

    def weight(self, step: int, steps: int) -> float:
        """Return the weight at an optimizer step."""
        return weight_at(self.spec.weight, self.spec.weight_schedule, step, steps)

    def scores(self, columns: Columns) -> Scores:
        """Score one batch, an async function in a loop of its own.

        `error` of the result is set where the run must stop: all processes raise when their rewards are checked. It is
        `SIGNALLED` where a signal ends the run and the reward does not end.
        """
        try:
            return asyncio.run(self._awaited(columns)) if self.is_async else self._scored(columns)
        except Interrupted:
            return _left(columns)

    async def scores_async(self, columns: Columns) -> Scores:
        """Score one batch by an async function."""
        try:
            return await self._awaited(columns)
        except Interrupted:
            return _left(columns)

    def _scored(self, columns: Columns) -> Scores:
        begun, calls = self._begin(columns)
        while calls.due:
            due = (take(begun, rows) for rows in calls.due)
            calls.add([LATE if calls.is_late else call(self.spec, self.cure, one) for one in due])
        return self._merged(calls.outcomes, columns)

    async def _awaited(self, columns: Columns) -> Scores:
        begun, calls = self._begin(columns)
        while calls.due:
            due = (take(begun, rows) for rows in calls.due)
            calls.add([LATE if calls.is_late else await call_async(self.spec, self.cure, one) for one in due])
        return self._merged(calls.outcomes, columns)

    @abstractmethod
    def _begin(self, columns: Columns) -> tuple[Columns, Calls]:
        """Return the columns that the function gets, and its calls."""

    @abstractmethod
    def _merged(self, outcomes: Sequence[Outcome], columns: Columns) -> Scores:
        """Return the result of a batch."""

    def _warn_of_nan(self, scores: Scores) -> None:
        if scores.nans and not self._has_returned_nan:
            self._has_returned_nan = True
            name, total = self.__name__, len(scores.values)
            logger.warning(
                f"reward {name!r} returned NaN for {scores.nans} of {total} completions. NaN counts as None: it does "
                f"not score them. This is reported once; rewards/{name}/nan_frac counts it."
            )


class OwnFunction(Scorer):
    """A user's own function: should it fail on any completion, none is scored and `error` is set.

    NaN counts as None, as in TRL; it is logged. inf stays, for the trainer to find.
    """

    cure = "A time limit is the function's own matter: give it one."

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(RewardSpec(callable_name(function), function))

    def _begin(self, columns: Columns) -> tuple[Columns, Calls]:
        return columns, Calls(self.spec, [[*range(row_count(columns))]])

    def _merged(self, outcomes: Sequence[Outcome], columns: Columns) -> Scores:
        [outcome], counts = outcomes, turn_counts(columns)
        read = [] if outcome.failure else [*map(read_value, outcome.values, counts)]
        if problem := outcome.failure or next((problem for _, _, problem in read if problem), ""):
            verb = " raised" if outcome.status == Status.FAILED else ""
            none = [None] * len(counts)
            return Scores([*none], [*none], error=f"reward {self.__name__!r}{verb}: {problem}")
        nan = [number is not None and math.isnan(number) for number, _, _ in read]
        scores = Scores(
            [None if lost else number for lost, (number, _, _) in zip(nan, read, strict=True)],
            [None if lost else turns for lost, (_, turns, _) in zip(nan, read, strict=True)],
            extras=outcome.extras,
            metrics=outcome.metrics,
            nans=sum(nan),
        )
        self._warn_of_nan(scores)
        if self._has_returned_nan:
            scores.metrics.append((f"rewards/{self.__name__}/nan_frac", scores.nans / len(counts)))
        return scores


def _left(columns: Columns) -> Scores:
    rows = row_count(columns)
    return Scores([0.0] * rows, [None] * rows, error=SIGNALLED)


def scored_by(
    scorers: Mapping[str, Scorer],
    columns: Columns,
    loop: asyncio.AbstractEventLoop | None,
    timed: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> dict[str, Scores]:
    """Score a batch by all functions as TRL does: one after the other, then the async ones together in `loop`.

    Args:
        scorers: of the functions, by name.
        columns: as TRL passes them, without its callbacks.
        loop: the event loop of TRL, where a function is async.
        timed: entered around the call of each function, with its name.
    """
    scored: dict[str, Scores] = {}
    for name in (name for name, scorer in scorers.items() if not scorer.is_async):
        with timed(name):
            scored[name] = scorers[name].scores(columns)

    async def by(name: str) -> Scores:
        with timed(name):
            return await scorers[name].scores_async(columns)

    async def by_all(names: Sequence[str]) -> list[Scores]:
        return await asyncio.gather(*map(by, names))

    if later := [name for name, scorer in scorers.items() if scorer.is_async]:
        assert loop is not None
        results = asyncio.run_coroutine_threadsafe(by_all(later), loop).result()
        scored |= zip(later, results, strict=True)
    return scored
