"""Scoring a batch: all isolated rewards at once in the worker pool, failures contained, named and kept for replay."""

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .columns import CALLBACKS, portable, scorable_rows, singular, take
from .composite import RewardSpec, check_clash, is_async
from .pool import Job, Outcome, Pool
from .schedule import weight_at
from .text import completion_text
from .worker import last_lines

logger = logging.getLogger(__name__)

ISOLATION_BUDGET = 2.0
"""Timeouts that may pass while the completions of a failed batch are scored one by one."""


class RewardError(RuntimeError):
    """A reward with `on_error: raise` failed; the message names it and says why."""


@dataclass
class Scores:
    """One reward's values for a batch, before its weight, and what happened on the way."""

    values: list[float | None]
    errors: int = 0
    timeouts: int = 0
    clipped: int = 0
    seconds: float = 0.0
    extras: list[tuple[str, list]] = field(default_factory=list)
    metrics: list[tuple[str, float]] = field(default_factory=list)


def default_workers() -> int:
    """Workers for each training process: the cores it may use, shared with the processes beside it, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


class Runtime:
    """The rewards of a recipe, ready to score; `functions` is what TRL gets.

    With `deferred` a failure under `on_error: raise` is kept in `errors` for the trainer, which ends all processes
    together; otherwise it raises where it happens.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        *,
        workers: int | None = None,
        memory_gib: float = 8.0,
        failures: str | Path | None = None,
    ) -> None:
        """`workers=0` scores everything in this process; `failures` is the folder for replays."""
        self.specs = list(specs)
        self.size = default_workers() if workers is None else workers
        self.pool = Pool(self.size, memory_gib=memory_gib)
        self.failures = None if failures is None else Path(failures)
        self.deferred = False
        self.errors: list[str] = []
        self.functions: list[Any] = [spec.function if spec.is_model else self._component(spec) for spec in self.specs]
        self._batch: Any = None
        self._scores: dict[str, Scores] = {}

    def _component(self, spec: RewardSpec) -> "Component":
        in_process_async = not self._isolated(spec) and is_async(spec.callable)
        return (AsyncComponent if in_process_async else Component)(self, spec)

    def _isolated(self, spec: RewardSpec) -> bool:
        return self.size > 0 and spec.isolated

    def close(self) -> None:
        """End the workers."""
        self.pool.close()

    # Scoring.

    def scores(self, spec: RewardSpec, columns: Mapping[str, Any]) -> Scores:
        """This reward's scores; the first that is asked for in a batch scores all isolated ones in parallel."""
        check_clash(spec, columns)
        if not self._isolated(spec):
            return self._finish(spec, self._in_process(spec, columns), columns)
        if self._batch is not columns["completions"]:
            specs = [s for s in self.specs if self._isolated(s)]
            raw = self._in_workers(specs, columns)
            self._scores = {s.name: self._finish(s, scores, columns) for s, scores in zip(specs, raw, strict=True)}
            self._batch = columns["completions"]
        return self._scores[spec.name]

    def _in_process(self, spec: RewardSpec, columns: Mapping[str, Any]) -> Scores:
        rows, start = scorable_rows(spec, columns), time.monotonic()
        try:
            values = spec.callable(**{**take(columns, rows), **spec.kwargs}) if rows else []
            outcome = Outcome("scored", list(values))
        except Exception as error:  # the reward is the user's: whatever it raises is contained here
            outcome = Outcome("failed", reason=last_lines(error))
        outcome.seconds = time.monotonic() - start
        return self._merge(spec, columns, [(rows, outcome)])

    def _in_workers(self, specs: Sequence[RewardSpec], columns: Mapping[str, Any]) -> list[Scores]:
        """First all rewards at once; then, for those that failed, the completions one by one."""
        chunks = [(s, rows) for s in specs for rows in self._chunks(s, scorable_rows(s, columns))]
        outcomes = self.pool.run([self._job(s, columns, rows) for s, rows in chunks])
        parts: dict[str, list[tuple[list[int], Outcome]]] = {s.name: [] for s in specs}
        for (spec, rows), outcome in zip(chunks, outcomes, strict=True):
            parts[spec.name] += self._recover(spec, columns, rows, outcome)
        return [self._merge(spec, columns, parts[spec.name]) for spec in specs]

    def _chunks(self, spec: RewardSpec, rows: list[int]) -> Iterator[list[int]]:
        """Our own rewards look at one completion at a time and are spread over the workers; a user's get the batch."""
        pieces = min(self.size, len(rows)) if spec.is_registered else min(1, len(rows))
        for i in range(pieces):
            yield rows[len(rows) * i // pieces : len(rows) * (i + 1) // pieces]

    def _job(self, spec: RewardSpec, columns: Mapping[str, Any], rows: list[int]) -> Job:
        return Job(spec.function, dict(spec.kwargs), portable(take(columns, rows)), spec.timeout)

    def _recover(
        self, spec: RewardSpec, columns: Mapping[str, Any], rows: list[int], outcome: Outcome
    ) -> list[tuple[list[int], Outcome]]:
        """Retry a failed call; then score its completions alone, so that one bad one does not cost the others."""
        spent = outcome.seconds
        for _ in range(spec.retries):
            if not _failed(outcome, len(rows)):
                break
            [outcome] = self.pool.run([self._job(spec, columns, rows)])
            spent += outcome.seconds
        if not _failed(outcome, len(rows)) or len(rows) == 1 or spec.on_error == "raise":
            return [(rows, outcome)]
        deadline = time.monotonic() + ISOLATION_BUDGET * spec.timeout
        singles = self.pool.run([self._job(spec, columns, [row]) for row in rows], deadline=deadline)
        return [([row], single) for row, single in zip(rows, singles, strict=True)]

    def _merge(
        self, spec: RewardSpec, columns: Mapping[str, Any], parts: Sequence[tuple[list[int], Outcome]]
    ) -> Scores:
        """Values in the batch's order; what failed becomes the reward's `on_error` value."""
        total = len(columns["completions"])
        scores = Scores([None] * total)
        extras: dict[str, list] = {}
        failed: list[tuple[int, str]] = []
        for rows, outcome in parts:
            scores.seconds += outcome.seconds
            scores.timeouts += len(rows) * (outcome.status == "timeout")
            scores.metrics += outcome.metrics
            reason = _failed(outcome, len(rows))
            if reason:
                failed += [(row, reason) for row in rows]
                continue
            for row, value in zip(rows, outcome.values, strict=True):
                number, problem = to_number(value)
                scores.values[row] = number
                failed += [(row, problem)] if problem else []
            for column, values in outcome.extras:
                for row, value in zip(rows, values, strict=False):
                    extras.setdefault(column, [None] * total)[row] = value
        scores.errors = len(failed)
        scores.extras = list(extras.items())
        if failed:
            self._report(spec, columns, sorted(failed))
            if spec.on_error == "zero":
                for row, _ in failed:
                    scores.values[row] = 0.0
        return scores

    def _finish(self, spec: RewardSpec, scores: Scores, columns: Mapping[str, Any]) -> Scores:
        """Scale, clip, and log under the reward's name."""
        for i, value in enumerate(scores.values):
            if value is None:
                continue
            value *= spec.scale
            if spec.clip is not None:
                low, high = spec.clip
                scores.clipped += not low <= value <= high
                value = min(max(value, low), high)
            scores.values[i] = value
        log_extra, log_metric = (columns.get(name) for name in CALLBACKS)
        if log_extra is not None:
            for column, values in scores.extras:
                log_extra(column, values)
        if log_metric is not None:
            n = max(1, len(scores.values))
            for name, value in (
                ("none_frac", sum(v is None for v in scores.values) / n),
                ("clipped_frac", scores.clipped / n),
                ("errors", scores.errors),
                ("timeouts", scores.timeouts),
                ("seconds", scores.seconds),
            ):
                log_metric(f"rewards/{spec.name}/{name}", float(value))
            for name, value in scores.metrics:
                log_metric(name, value)
        return scores

    # Failures.

    def _report(self, spec: RewardSpec, columns: Mapping[str, Any], failed: list[tuple[int, str]]) -> None:
        """One log line, the completions saved, and under `on_error: raise` the end."""
        rank, step = int(os.environ.get("RANK", "0")), getattr(columns.get("trainer_state"), "global_step", 0)
        row, reason = failed[0]
        saved = self._save(spec, columns, failed, f"step{step:06d}-rank{rank}-{_file_name(spec.name)}.jsonl")
        first = completion_text(columns["completions"][row])[:200]
        message = (
            f"reward {spec.name!r} ({spec.function}) failed on {len(failed)} of {len(columns['completions'])} "
            f"completions (rank {rank}, step {step}): {reason.strip()} | first: {first!r}"
            f"{f' | saved to {saved}' if saved else ''}"
        )
        if spec.on_error != "raise":
            logger.warning(f"{message} | counted as {spec.on_error}")
            return
        self.errors.append(message)
        if not self.deferred:
            raise RewardError(message)

    def _save(
        self, spec: RewardSpec, columns: Mapping[str, Any], failed: list[tuple[int, str]], name: str
    ) -> Path | None:
        """Write the failed rows so that `grpo-ext score` reads them."""
        if self.failures is None:
            return None
        self.failures.mkdir(parents=True, exist_ok=True)
        path = self.failures / name
        with path.open("a", encoding="utf-8") as file:
            for row, reason in failed:
                record = {singular(k): v[0] for k, v in take(columns, [row]).items() if isinstance(v, list) and v}
                file.write(json.dumps({**record, "failed_reward": spec.name, "reason": reason}, default=str) + "\n")
        return path


class Component:
    """One reward under its log name, as TRL calls it."""

    def __init__(self, runtime: Runtime, spec: RewardSpec) -> None:
        """TRL logs it under `__name__`."""
        self.runtime, self.spec = runtime, spec
        self.__name__ = spec.name

    def weight(self, step: int, steps: int) -> float:
        """The weight at an optimizer step."""
        return weight_at(self.spec.weight, self.spec.weight_schedule, step, steps)

    def __call__(self, **columns: Any) -> list[float | None]:
        """Rewards of one batch."""
        return self.runtime.scores(self.spec, columns).values


class AsyncComponent(Component):
    """The same for an async function that runs in this process; TRL awaits all of them together."""

    async def __call__(self, **columns: Any) -> list[float | None]:  # type: ignore[override]
        """Rewards of one batch."""
        spec, start, rows = self.spec, time.monotonic(), scorable_rows(self.spec, columns)
        try:
            values = await spec.callable(**{**take(columns, rows), **spec.kwargs}) if rows else []
            outcome = Outcome("scored", list(values))
        except Exception as error:
            outcome = Outcome("failed", reason=last_lines(error))
        outcome.seconds = time.monotonic() - start
        runtime = self.runtime
        return runtime._finish(spec, runtime._merge(spec, columns, [(rows, outcome)]), columns).values


# Values.


def to_number(value: Any) -> tuple[float | None, str]:
    """A reward as a finite float (None stays None), or None and what is wrong with it."""
    if value is None:
        return None, ""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return None, f"it returned {value!r}, which is no number"
    number = float(value)
    return (number, "") if math.isfinite(number) else (None, f"it returned {number}")


def _failed(outcome: Outcome, rows: int) -> str:
    """Why a call gives no values, or nothing if it does."""
    if outcome.status != "scored":
        return outcome.reason
    if len(outcome.values) != rows:
        return f"it returned {len(outcome.values)} values for {rows} completions"
    return ""


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)


def build(specs: Sequence[RewardSpec]) -> list[Any]:
    """TRL's `reward_funcs`, scored in this process: callables under their log names, model ids as strings."""
    return Runtime(specs, workers=0).functions
