"""Calls of one reward: which are made, and how each is made, by a worker or in this process."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_ext.child_processes import traceback_tail
from grpo_ext.rewards.columns import Columns, readable_columns, row_count, take
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.failures import from_outside
from grpo_ext.rewards.text import completion_text
from grpo_ext.rewards.workers.pool import NO_TIME_LEFT, Job, Outcome, Status
from grpo_ext.rewards.workers.worker import NotRewards, listed_rewards, logging_callbacks
from grpo_ext.waiting import awaited, named

ISOLATION_BUDGET = 2.0
"""Time, in timeouts, for scoring the completions of a failed batch one by one."""
LATE = Outcome(Status.TIMEOUT, reason=NO_TIME_LEFT)


@dataclass
class Calls:
    """The calls that score some rows of a batch: which are due depends on the outcomes of those before.

    A failed call is retried; then its completions are scored one by one, where the reward scores them independently.
    A reward that compares the completions of a batch cannot score them one by one: its call fails as a whole. So does
    a call that returned a list of the wrong length, which is a mistake in the function.
    """

    spec: RewardSpec
    due: list[list[int]]
    """Rows of each call to make now; empty when all have been made."""
    outcomes: list[Outcome] = field(default_factory=list)
    """Those of the last calls, which count; the time of failed ones before them is added to the first."""
    deadline: float | None = None
    """Time by `time.monotonic` after which no call is begun."""
    retries: int = 0

    @property
    def is_late(self) -> bool:
        """Whether no further call is begun."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Add the outcomes of the calls that were due."""
        after = self.outcomes[0].failure if len(self.due) > 1 else ""
        spent = sum(outcome.seconds for outcome in self.outcomes)
        calls = zip(self.due, outcomes, strict=True)
        first, *others = (replace(outcome, rows=rows, after=after) for rows, outcome in calls)
        self.outcomes = [replace(first, seconds=first.seconds + spent), *others]
        self.due = self._next(first) if first.failure and not others else []

    def _next(self, failed: Outcome) -> list[list[int]]:
        if self.retries < self.spec.retries:
            self.retries += 1
            return [failed.rows]
        hopeless = failed.misshapen or len(failed.rows) == 1 or self.spec.on_error == "raise"
        if hopeless or not self.spec.is_independent:
            return []
        self.deadline = time.monotonic() + ISOLATION_BUDGET * self.spec.timeout
        return [[row] for row in failed.rows]


def job(spec: RewardSpec, columns: Columns, rows: list[int], seed: int, place: int | None = None) -> Job:
    """Return the call of a reward on some rows, for a worker."""
    arguments = {**readable_columns(spec, take(columns, rows)), **spec.kwargs}
    return Job(str(spec.function), arguments, spec.timeout, call_seed(seed, spec.name, columns, rows), place)


def call_seed(seed: int, name: str, columns: Columns, rows: Sequence[int]) -> int:
    """Return the seed of a call, from the run's seed, the reward's name, the step, and the rows and texts.

    A resumed run, or one with another number of workers, draws the same random numbers. Equal completions that are
    scored one by one draw different ones.
    """
    step = getattr(columns.get("trainer_state"), "global_step", 0)
    texts = [completion_text(columns["completions"][row]) for row in rows]
    key = repr((seed, name, step, list(rows), texts)).encode("utf-8", "backslashreplace")
    return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())


@dataclass
class Call:
    """A call of a function in this process: its arguments, what it returned, and how it ended."""

    arguments: dict[str, Any]
    values: Any = None
    outcome: Outcome = LATE


@contextmanager
def contained(spec: RewardSpec, cure: str, columns: Columns) -> Iterator[Call]:
    """Yield a call to make and complete; an exception becomes its outcome. `cure` is for a call that takes long."""
    callbacks, extras, metrics = logging_callbacks()
    call, began = Call({**columns, **callbacks, **spec.kwargs}), time.monotonic()
    try:
        with named(f"reward {spec.name!r}", cure):
            yield call
        outcome = Outcome(Status.SCORED, listed_rewards(call.values), extras, metrics)
    except NotRewards as error:
        outcome = Outcome(Status.MISSHAPEN, reason=str(error))
    except BaseException as error:  # the reward is the user's: it may raise anything
        if from_outside(error):
            raise
        outcome = Outcome(Status.FAILED, reason=traceback_tail(error))
    call.outcome = replace(outcome, seconds=time.monotonic() - began)


def call(spec: RewardSpec, cure: str, columns: Columns) -> Outcome:
    """Call a function in this process."""
    with contained(spec, cure, columns) as pending:
        pending.values = spec.callable(**pending.arguments)
    return pending.outcome


async def call_async(spec: RewardSpec, cure: str, columns: Columns) -> Outcome:
    """Call an async function in this process."""
    with contained(spec, cure, columns) as pending:
        pending.values = await awaited(spec.callable(**pending.arguments))
    return pending.outcome


def lost(columns: Columns, error: Exception) -> Outcome:
    """Mark the batch failed because of an infrastructure error, not the reward function."""
    return Outcome(Status.FAILED, reason=traceback_tail(error), rows=[*range(row_count(columns))])
