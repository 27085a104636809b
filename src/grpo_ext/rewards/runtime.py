"""Scoring a batch: all isolated rewards at once in the worker pool, failures contained, named and kept for replay."""

import asyncio
import logging
import os
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from grpo_ext.config.launch import local_world_size
from grpo_ext.config.weight_schedule import weight_at
from grpo_ext.errors import RewardError
from grpo_ext.rewards.calls import RunBatches, in_process, job, lost, recovered
from grpo_ext.rewards.columns import CALLBACKS, Columns, as_begun, check_clash, scorable_rows, with_plain_state
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.failures import nan_warning, report
from grpo_ext.rewards.outcomes import ScoredCall, Scores, merged, turn_counts
from grpo_ext.rewards.signatures import asks, is_async
from grpo_ext.rewards.workers.pool import Outcome, Pool

T = TypeVar("T")
logger = logging.getLogger(__name__)

INDEPENDENT = (
    "The call failed as a whole, since a function may compare the completions of a batch. If this one scores each "
    "independently, set independent: true, and only the completions that fail are lost."
)


def default_workers() -> int:
    """Return the workers per training process: its share of the machine's cores, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // local_world_size()))


class Runtime:
    """The rewards of a recipe, ready to score; `functions` holds them as functions that TRL can call.

    Args:
        specs: the rewards.
        workers: processes that score; 0 scores everything in this process.
        memory_gib: memory that a worker may use.
        failures: folder in which failed rows are saved.
        seed: the run's; the generators of a worker are seeded from it before each call.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        *,
        workers: int | None = None,
        memory_gib: float = 8.0,
        failures: str | Path | None = None,
        seed: int = 0,
    ) -> None:
        self.specs = list(specs)
        self.size = default_workers() if workers is None else workers
        self.pool = Pool(self.size, memory_gib=memory_gib)
        self.failures = None if failures is None else Path(failures)
        self.seed = seed
        self.functions: list[Any] = [s.function if s.is_model else self._component(s) for s in self.specs]
        self.opened = ""
        """Tag that the chat template leaves open before a completion, which our rewards read as its beginning."""
        self._batch: Any = None
        self._scores: dict[str, Scores] = {}
        users = [spec.name for spec in self.specs if not (spec.is_registered and spec.is_independent)]
        self._places = {name: place for place, name in enumerate(users)}
        """A user's function stays in one worker, with what its module keeps."""
        self._warned_of_nan: set[str] = set()

    def _component(self, spec: RewardSpec) -> "Component":
        in_process_async = not self._isolated(spec) and is_async(spec.callable)
        return (AsyncComponent if in_process_async else Component)(self, spec)

    def _isolated(self, spec: RewardSpec) -> bool:
        return self.size > 0 and spec.isolated

    def interrupt(self) -> None:
        """End what another thread scores in workers, until `close`: `scores` raises `Interrupted` there."""
        self.pool.interrupt()

    def close(self) -> None:
        """End the workers."""
        self.pool.close()

    # Scoring.

    def scores(self, spec: RewardSpec, columns: Columns) -> Scores:
        """Return this reward's scores; the first call for a batch scores all isolated rewards in parallel."""
        if not self._isolated(spec):
            return _at_once(self.scores_here(spec, columns))
        check_clash(spec, columns)
        if self._batch is not columns["completions"]:
            specs = [s for s in self.specs if self._isolated(s)]
            calls = self._contained(specs, columns)
            self._scores = {s.name: self._finish(s, calls[s.name], columns) for s in specs}
            self._batch = columns["completions"]
        return self._scores[spec.name]

    async def scores_here(self, spec: RewardSpec, columns: Columns) -> Scores:
        """Score in this process; never waits unless the function is async."""
        check_clash(spec, columns)
        try:
            calls = await in_process(spec, as_begun(spec, columns, self.opened))
        except Exception as error:
            calls = [lost(columns, error)]
        return self._finish(spec, calls, columns)

    def _contained(self, specs: Sequence[RewardSpec], columns: Columns) -> dict[str, list[ScoredCall]]:
        try:
            return self._in_workers(specs, columns)
        except Exception as error:  # such as a machine that starts no more processes
            return {spec.name: [lost(columns, error)] for spec in specs}

    def _in_workers(self, specs: Sequence[RewardSpec], columns: Columns) -> dict[str, list[ScoredCall]]:
        """Score with all rewards at once, then again with those that failed (`recovered`)."""
        if any(asks(s.callable, "trainer_state") for s in specs):
            columns = with_plain_state(columns)
        chunks = [(s, rows) for s in specs for rows in self._chunks(s, scorable_rows(s, columns))]
        begun = {s.name: as_begun(s, columns, self.opened) for s in specs}
        outcomes = self.pool.run(
            [job(s, begun[s.name], rows, self.seed, self._places.get(s.name)) for s, rows in chunks]
        )
        calls: dict[str, list[ScoredCall]] = {s.name: [] for s in specs}
        for (spec, rows), outcome in zip(chunks, outcomes, strict=True):
            calls[spec.name] += _at_once(recovered(spec, rows, outcome, self._pooled(spec, begun[spec.name])))
        return calls

    def _pooled(self, spec: RewardSpec, columns: Columns) -> RunBatches:
        async def run(batches: Sequence[list[int]], deadline: float | None = None) -> list[Outcome]:
            place = self._places.get(spec.name) if len(batches) == 1 else None
            jobs = [job(spec, columns, rows, self.seed, place) for rows in batches]
            return self.pool.run(jobs, deadline=deadline)

        return run

    def _chunks(self, spec: RewardSpec, rows: list[int]) -> Iterator[list[int]]:
        """Spread the rows over the workers for our independent rewards; a user's function gets the whole batch."""
        spread = spec.is_registered and spec.is_independent
        pieces = min(self.size if spread else 1, len(rows))
        for i in range(pieces):
            yield rows[len(rows) * i // pieces : len(rows) * (i + 1) // pieces]

    def _finish(self, spec: RewardSpec, calls: Sequence[ScoredCall], columns: Columns) -> Scores:
        """Report what failed, and log under the reward's name."""
        scores = merged(spec, turn_counts(columns), calls)
        scores.error = self._report(spec, columns, scores)
        log_extra, log_metric = (columns.get(name) for name in CALLBACKS)
        if log_extra is not None:
            for column, values in scores.extras.items():
                log_extra(column, values)
        if log_metric is not None:
            n = max(1, len(scores.values))
            for name, value in (
                ("none_frac", sum(v is None for v in scores.values) / n),
                ("nan_frac", scores.nans / n),
                ("clipped_frac", scores.clipped / n),
                ("errors", len(scores.failed)),
                ("timeouts", scores.timeouts),
                ("rescored", scores.rescored),
                ("seconds", scores.seconds),
            ):
                log_metric(f"rewards/{spec.name}/{name}", float(value))
            for name, value in scores.metrics:
                log_metric(name, value)
        return scores

    def _report(self, spec: RewardSpec, columns: Columns, scores: Scores) -> str:
        """Log one line on failures; return the message where they end the run.

        Failures end the run under `on_error: raise`, and where a call returned a list of the wrong length.
        """
        if scores.nans and spec.name not in self._warned_of_nan:
            self._warned_of_nan.add(spec.name)
            logger.warning(nan_warning(spec.name, scores.nans, len(scores.values)))
        rescored = f"{scores.rescored} completions were scored one by one, since their call failed: {scores.cause}"
        if not scores.failed:
            if scores.rescored:
                logger.warning(f"reward {spec.name!r} ({spec.function}): {rescored}")
            return ""
        message = report(spec, columns, scores.failed, self.failures)
        if spec.on_error == "raise" or scores.misshapen:
            return message
        message += f" | counted as {spec.on_error}"
        message += f" | {rescored}" if scores.rescored else ""
        message += f" | {INDEPENDENT}" if scores.as_a_whole and not spec.is_registered else ""
        logger.warning(message)
        return ""


class Component:
    """One reward under its log name, as TRL calls it."""

    def __init__(self, runtime: Runtime, spec: RewardSpec) -> None:
        self.runtime, self.spec = runtime, spec
        self.__name__ = spec.name

    def weight(self, step: int, steps: int) -> float:
        """Return the weight at an optimizer step."""
        return weight_at(self.spec.weight, self.spec.weight_schedule, step, steps)

    def scores(self, columns: Columns) -> Scores:
        """Score one batch; `error` of the result is set where the run must stop."""
        return self.runtime.scores(self.spec, columns)

    def __call__(self, **columns: Any) -> list[float | None]:
        """Return the rewards of one batch.

        Raises:
            RewardError: the reward failed, and its failure ends the run.
        """
        return values_of(self.scores(columns))


class AsyncComponent(Component):
    """The same for an async function that runs in this process; TRL awaits all of them together."""

    async def scores_async(self, columns: Columns) -> Scores:
        """Score one batch, as `scores`."""
        return await self.runtime.scores_here(self.spec, columns)

    def scores(self, columns: Columns) -> Scores:
        """Score one batch outside of a trainer, which would await all async functions together."""
        return asyncio.run(self.scores_async(columns))

    async def __call__(self, **columns: Any) -> list[float | None]:  # type: ignore[override]
        """Return the rewards of one batch, as `Component` does."""
        return values_of(await self.scores_async(columns))


def values_of(scores: Scores) -> list[float | None]:
    """Return the values of a batch.

    Raises:
        RewardError: the reward failed, and its failure ends the run.
    """
    if scores.error:
        raise RewardError(scores.error)
    return scores.values


def _at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")
