"""Scoring a batch: all isolated rewards at once in the worker pool, failures contained, named and kept for replay."""

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_ext.config.launch import local_world_size
from grpo_ext.errors import RewardError
from grpo_ext.rewards.calls import Calls, job, lost
from grpo_ext.rewards.columns import CALLBACKS, Columns, as_begun, check_clash, scorable_rows, with_plain_state
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.failures import report
from grpo_ext.rewards.outcomes import Scores, merged, rescored, turn_counts
from grpo_ext.rewards.scorers import Scorer
from grpo_ext.rewards.signatures import asks, is_async
from grpo_ext.rewards.workers.pool import Job, Outcome, Pool

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
        self._isolated = [spec for spec in self.specs if self.isolates(spec)]
        self.functions: list[Any] = [s.function if s.is_model else self._component(s) for s in self.specs]
        self.opened = ""
        """Tag that the chat template leaves open before a completion, which our rewards read as its beginning."""
        self._batch: Any = None
        self._outcomes: dict[str, list[Outcome]] = {}
        users = [spec.name for spec in self.specs if not (spec.is_registered and spec.is_independent)]
        self._places = {name: place for place, name in enumerate(users)}
        """A user's function stays in one worker, with what its module keeps."""

    def _component(self, spec: RewardSpec) -> "Component":
        in_process_async = not self.isolates(spec) and is_async(spec.callable)
        return (AsyncComponent if in_process_async else Component)(self, spec)

    def isolates(self, spec: RewardSpec) -> bool:
        """Return whether workers score a reward."""
        return self.size > 0 and spec.isolated

    def interrupt(self) -> None:
        """End what another thread scores in workers, until `close`: `outcomes` raises `Interrupted` there."""
        self.pool.interrupt()

    def close(self) -> None:
        """End the workers."""
        self.pool.close()

    def outcomes(self, spec: RewardSpec, columns: Columns) -> list[Outcome]:
        """Return an isolated reward's calls; the first call for a batch scores by all isolated rewards in parallel."""
        if self._batch is not columns["completions"]:
            try:
                self._outcomes = self._in_workers(columns)
            except Exception as error:  # such as a machine that starts no more processes
                self._outcomes = {spec.name: [lost(columns, error)] for spec in self._isolated}
            self._batch = columns["completions"]
        return self._outcomes[spec.name]

    def _in_workers(self, columns: Columns) -> dict[str, list[Outcome]]:
        """Score by all isolated rewards at once, then again by those that failed."""
        if any(asks(s.callable, "trainer_state") for s in self._isolated):
            columns = with_plain_state(columns)
        chunks = [(s, rows) for s in self._isolated for rows in self._chunks(s, scorable_rows(s, columns))]
        begun = {s.name: as_begun(s, columns, self.opened) for s in self._isolated}
        first = self.pool.run([self._job(s, begun[s.name], rows, alone=True) for s, rows in chunks])
        outcomes: dict[str, list[Outcome]] = {s.name: [] for s in self._isolated}
        for (spec, rows), outcome in zip(chunks, first, strict=True):
            calls = Calls(spec, [rows])
            calls.add([outcome])
            while due := calls.due:
                jobs = [self._job(spec, begun[spec.name], rows, alone=len(due) == 1) for rows in due]
                calls.add(self.pool.run(jobs, deadline=calls.deadline))
            outcomes[spec.name] += calls.outcomes
        return outcomes

    def _job(self, spec: RewardSpec, columns: Columns, rows: list[int], *, alone: bool) -> Job:
        return job(spec, columns, rows, self.seed, self._places.get(spec.name) if alone else None)

    def _chunks(self, spec: RewardSpec, rows: list[int]) -> Iterator[list[int]]:
        """Spread the rows over the workers for our independent rewards; a user's function gets the whole batch."""
        spread = spec.is_registered and spec.is_independent
        pieces = min(self.size if spread else 1, len(rows))
        for i in range(pieces):
            yield rows[len(rows) * i // pieces : len(rows) * (i + 1) // pieces]


class Component(Scorer):
    """A reward of a recipe under its log name, as TRL calls it; `on_error` decides what a failure does."""

    runtime: Runtime

    def __init__(self, runtime: Runtime, spec: RewardSpec) -> None:
        super().__init__(spec)
        self.runtime, self.cure = runtime, f"isolate: true limits it, by timeout={spec.timeout:g} s."
        self.is_async = self.is_async and not runtime.isolates(spec)

    def _scored(self, columns: Columns) -> Scores:
        if not self.runtime.isolates(self.spec):
            return super()._scored(columns)
        check_clash(self.spec, columns)
        return self._merged(self.runtime.outcomes(self.spec, columns), columns)

    def _begin(self, columns: Columns) -> tuple[Columns, Calls]:
        check_clash(self.spec, columns)
        try:
            begun = as_begun(self.spec, columns, self.runtime.opened)
            rows = scorable_rows(self.spec, begun)
        except Exception as error:
            return columns, Calls(self.spec, [], [lost(columns, error)])
        return begun, Calls(self.spec, [rows] if rows else [])

    def _merged(self, outcomes: Sequence[Outcome], columns: Columns) -> Scores:
        scores = merged(self.spec, turn_counts(columns), outcomes)
        self._warn_of_nan(scores)
        scores.error = self._report(outcomes, columns, scores)
        return scores

    def _report(self, outcomes: Sequence[Outcome], columns: Columns, scores: Scores) -> str:
        """Log one line on failures; return the message where they end the run.

        Failures end the run under `on_error: raise`, and where a call returned a list of the wrong length.
        """
        spec, again = self.spec, ""
        if count := rescored(outcomes):
            cause = next(outcome.after for outcome in reversed(outcomes) if outcome.after)
            again = f"{count} completions were scored one by one, since their call failed: {cause}"
        if not scores.failed:
            if again:
                logger.warning(f"reward {spec.name!r} ({spec.function}): {again}")
            return ""
        failed = [outcome for outcome in outcomes if outcome.failure]
        message = report(spec, columns, scores.failed, self.runtime.failures)
        if spec.on_error == "raise" or any(outcome.misshapen for outcome in failed):
            return message
        as_a_whole = any(len(outcome.rows) > 1 for outcome in failed)
        message += f" | counted as {spec.on_error}"
        message += f" | {again}" if again else ""
        message += f" | {INDEPENDENT}" if as_a_whole and not spec.is_registered else ""
        logger.warning(message)
        return ""

    def __call__(self, **columns: Any) -> list[float | None]:
        """Return the rewards of one batch.

        Raises:
            RewardError: the reward failed, and its failure ends the run.
        """
        return _returned(self.scores(columns), columns)


class AsyncComponent(Component):
    """The same for an async function that runs in this process; TRL awaits all of them together."""

    async def __call__(self, **columns: Any) -> list[float | None]:  # type: ignore[override]
        """Return the rewards of one batch, as `Component` does."""
        return _returned(await self.scores_async(columns), columns)


def _returned(scores: Scores, columns: Columns) -> list[float | None]:
    """Log by TRL's callbacks, and return the values.

    Raises:
        RewardError: the reward failed, and its failure ends the run.
    """
    log_extra, log_metric = (columns.get(name) or (lambda *_: None) for name in CALLBACKS)
    for column, values in scores.extras:
        log_extra(column, values)
    for name, value in scores.metrics:
        log_metric(name, value)
    if scores.error:
        raise RewardError(scores.error)
    return scores.values
