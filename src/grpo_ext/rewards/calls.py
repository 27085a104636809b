"""Calls of one reward: retries, scoring one by one after a failure, the call in this process."""

import hashlib
import time
from collections.abc import Sequence
from typing import Protocol

from grpo_ext.child_processes import traceback_tail
from grpo_ext.rewards.columns import Columns, readable_columns, scorable_rows, take
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.failures import from_outside
from grpo_ext.rewards.outcomes import ScoredCall, failure
from grpo_ext.rewards.signatures import is_async
from grpo_ext.rewards.text import completion_text
from grpo_ext.rewards.workers.pool import NO_TIME_LEFT, Job, Outcome, Status
from grpo_ext.rewards.workers.worker import NotRewards, listed_rewards, logging_callbacks
from grpo_ext.waiting import awaited, named

ISOLATION_BUDGET = 2.0
"""Time, in timeouts, for scoring the completions of a failed batch one by one."""


class RunBatches(Protocol):
    """Makes calls of one reward, one for each list of rows; those not begun by the deadline time out."""

    async def __call__(self, batches: Sequence[list[int]], deadline: float | None = None) -> list[Outcome]:
        """Return their outcomes, in order."""


async def recovered(spec: RewardSpec, rows: list[int], outcome: Outcome, run: RunBatches) -> list[ScoredCall]:
    """Retry a failed call; then score its completions one by one, where the reward scores them independently.

    A reward that compares the completions of a batch cannot score them one by one: its call fails as a whole. So does
    a call that returned a list of the wrong length, which is a mistake in the function.
    """
    for _ in range(spec.retries):
        if not failure(outcome, len(rows)):
            break
        spent = outcome.seconds
        [outcome] = await run([rows])
        outcome.seconds += spent
    reason = failure(outcome, len(rows))
    hopeless = outcome.misshapen(len(rows)) or len(rows) == 1 or spec.on_error == "raise" or not spec.is_independent
    if not reason or hopeless:
        return [ScoredCall(rows, outcome)]
    singles = [[row] for row in rows]
    outcomes = await run(singles, deadline=time.monotonic() + ISOLATION_BUDGET * spec.timeout)
    outcomes[0].seconds += outcome.seconds
    return [ScoredCall(single, one, after=reason) for single, one in zip(singles, outcomes, strict=True)]


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


async def in_process(spec: RewardSpec, columns: Columns) -> list[ScoredCall]:
    """Score a batch in this process."""
    rows = scorable_rows(spec, columns)

    async def run(batches: Sequence[list[int]], deadline: float | None = None) -> list[Outcome]:
        return [await _call(spec, take(columns, rows), deadline) for rows in batches]

    return await recovered(spec, rows, (await run([rows]))[0], run) if rows else []


async def _call(spec: RewardSpec, columns: Columns, deadline: float | None) -> Outcome:
    start = time.monotonic()
    if deadline is not None and start > deadline:
        return Outcome(Status.TIMEOUT, reason=NO_TIME_LEFT)
    callbacks, extras, metrics = logging_callbacks()
    try:
        with named(f"reward {spec.name!r}", f"isolate: true limits it, by timeout={spec.timeout:g} s."):
            values = spec.callable(**{**columns, **callbacks, **spec.kwargs})
            if is_async(spec.callable):
                values = await awaited(values)
        outcome = Outcome(Status.SCORED, listed_rewards(values), extras, metrics)
    except NotRewards as error:
        outcome = Outcome(Status.MISSHAPEN, reason=str(error))
    except BaseException as error:  # the reward is the user's: it may raise anything
        if from_outside(error):
            raise
        outcome = Outcome(Status.FAILED, reason=traceback_tail(error))
    outcome.seconds = time.monotonic() - start
    return outcome


def lost(columns: Columns, error: Exception) -> ScoredCall:
    """Mark the batch failed because of an infrastructure error, not the reward function."""
    return ScoredCall(list(range(len(columns["completions"]))), Outcome(Status.FAILED, reason=traceback_tail(error)))
