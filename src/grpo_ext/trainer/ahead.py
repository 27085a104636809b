"""Generations are sampled and scored while earlier ones train (`rollout_ahead`).

`rollout.schedule` decides which weights sample which generation, and when; it calls a generation a window. Here its
orders are carried out: the rows of later windows are drawn as the dataloader will draw them, weights are published,
requests go to the background, and a window that begins to train is taken from there.
"""

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

from accelerate.utils import gather_object

from grpo_ext.config.process_engine import samples_by_server
from grpo_ext.errors import ConfigError, Problem, SamplerLost
from grpo_ext.rollout.rollout_batch import RolloutBatch
from grpo_ext.rollout.samplers import Sampler, failing_together
from grpo_ext.rollout.schedule import Orders, Schedule
from grpo_ext.rollout.seeds import AttemptId
from grpo_ext.trainer import in_flight
from grpo_ext.trainer.in_flight import InFlight
from grpo_ext.trainer.rollout_worker import (
    Asked,
    BackgroundWorker,
    PublishedWeights,
    RolloutWorker,
    Submitted,
    done,
    worker_of,
)
from grpo_ext.waiting import POLL_SECONDS, SIGNALLED, shutdown

Rows = list[dict[str, Any]]


@dataclass
class Running:
    """Windows of a run that samples ahead.

    Attributes:
        schedule: who samples what, and when.
        drawn: numbers of the rows of each later window, of all processes.
        background: completes and scores.
        asked: windows that were submitted and not yet taken, each with its request, unless a checkpoint had it, and
            with what is made of it.
        window: the window that begins to train, until all its completions are known.
    """

    schedule: Schedule
    drawn: Iterator[list[int]]
    background: BackgroundWorker
    asked: dict[int, tuple[Asked | None, Submitted]] = field(default_factory=dict)
    window: int | None = None


class RolloutsAhead:
    """The windows of a trainer that are sampled ahead, each by weights of exactly the same age.

    Attributes:
        age: windows by which the weights that sampled the current window are older than the policy's.
        kept: windows of the checkpoint that the run continues from, until its first window.
    """

    def __init__(self, trainer: Any, sampler: Sampler) -> None:
        self.trainer, self.sampler = trainer, sampler
        self.age, self.kept = 0, InFlight()
        self._running: Running | None = None
        self._window: tuple[Sequence[AttemptId], RolloutBatch] | None = None

    @property
    def asked(self) -> Sequence[int]:
        """Windows that were submitted and not yet taken."""
        return sorted(self._running.asked) if self._running is not None else ()

    @contextmanager
    def taking(self, rows: Rows) -> Iterator[None]:
        """Take the window that begins to train for a `with` block, and submit the next one behind it.

        Raises:
            ConfigError: the dataloader has other rows.
            SamplerLost: or ServerLost, the sampler is lost on this or another process, or a signal ends the run.
        """
        trainer, count = self.trainer, len(rows)
        window = trainer._step // trainer._uses
        running = self._running = self._running or self._started(window, count)
        running.window = window
        self._obey(running, running.schedule.before(window), count)
        self.age = window - running.schedule.version(window)
        self._window = trainer.attempts_of(window, count), self._take(running, window, rows)
        yield
        self._window, running.window = None, None
        del running.asked[window]  # till here a lost sampler may end the run before the window trains
        self._obey(running, running.schedule.after(window), count)

    def finished(self, attempts: Sequence[AttemptId]) -> RolloutBatch | None:
        """Return what the background has made of attempts; None where they are made now."""
        return self._window[1] if self._window is not None and self._window[0] == attempts else None

    def version(self) -> int | None:
        """Return the version that samples what is still missing of the window: groups that replace silent ones.

        They are sampled, played and scored by this thread, when the background has ended all its work: rewards and
        environments serve one thread. None outside of a window.
        """
        running = self._running
        if running is None or running.window is None:
            return None
        running.background.wait()
        version = running.schedule.version(running.window)
        if version not in self.sampler.versions:  # a server's, after a resume
            version = running.window
            self.sampler.publish(version)
        return version

    def wait(self) -> None:
        """Wait for all windows in flight: rewards and environments serve one thread, that of an evaluation now."""
        if self._running is not None:
            self._running.background.wait()

    def close(self) -> None:
        """End what samples, scores and plays ahead, and first what that waits for."""
        if self._running is None:
            return
        self._running.background.stop()
        if self.trainer.reward_runtime is not None:
            self.trainer.reward_runtime.interrupt()
        for processes in (self.trainer.episode_runner, self.sampler):
            if processes is not None:
                processes.close()
        self._running.background.close()
        self._running = None

    def in_flight(self, *, waits: bool, replaces: bool) -> InFlight:
        """Return what is in flight, when each window has been finished, or has failed.

        With it the weights of windows that are still to be sampled, or whose silent groups may be replaced.

        Args:
            waits: False where a run ends early, as by a signal: what is not there by now is sampled by these weights
                when it resumes. A server has no older weights, so there it waits.
            replaces: whether this process keeps the weights by which silent groups are replaced.
        """
        running = self._running
        if running is None:
            return self.kept
        found, needed = list[tuple[int, RolloutBatch | None]](), set[int]()
        if waits or samples_by_server(self.trainer.args):
            running.background.wait()
        for window, (_, submitted) in sorted(running.asked.items()):
            version, made = running.schedule.version(window), submitted.made()
            kept = None if made is None else in_flight.to_be_kept(made)
            found.append((version, kept))
            needed |= {version} if replaces or kept is None else set()
        copies = {version: self.sampler.copy_of(version) for version in sorted(needed)}
        weights = {version: copy for version, copy in copies.items() if copy is not None}
        return InFlight(found, weights, min(running.asked, default=0))

    def _started(self, first: int, count: int) -> Running:
        """Return the state of a run that begins or resumes with the window `first`, of `count` rows a process."""
        trainer = self.trainer
        kept, self.kept = self.kept, InFlight()
        kept = kept if kept.first == first else InFlight()  # the run ended between two windows
        for version, weights in kept.weights.items():
            self.sampler.publish(version, weights)
        # a server has no older weights: what it had not finished, on any process, is sampled by those of now
        known = list(takewhile(lambda its: its[1] is not None or its[0] in kept.weights, kept.windows))
        if trainer.accelerator.num_processes > 1:  # pushes are collective, so all processes need the same orders
            known = known[: min(gather_object([len(known)]))]
        versions = {first + i: version for i, (version, _) in enumerate(known)}
        windows = math.ceil(trainer.state.max_steps * trainer.args.gradient_accumulation_steps / trainer._uses)
        schedule = Schedule(trainer.args.rollout_ahead, windows, first, versions, list(kept.weights))
        drawn = upcoming(trainer._get_train_sampler(), count * trainer.accelerator.num_processes)
        background = BackgroundWorker(self._worker())
        running = Running(schedule, islice(drawn, first, None), background)
        for window, (version, finished) in zip(versions, known, strict=True):
            if finished is None or not finished.scored:
                # v_s was published, and this window asked for, when window s had been taken
                asked = version * trainer._uses // trainer.args.gradient_accumulation_steps
                self._submit(running, window, version, count, finished, min(asked, trainer.state.global_step))
            else:
                next(running.drawn)
                running.asked[window] = None, done(finished)
        return running

    def _obey(self, running: Running, orders: Orders, count: int) -> None:
        for version in orders.forget:
            self.sampler.forget(version)
        if orders.publish is None:
            return
        with self.trainer._times.during("weight_push"):
            by_server = samples_by_server(self.trainer.args)
            if (
                by_server and not self.trainer.vllm_generation.adapts
            ):  # windows that are not yet sampled need the version before
                running.background.wait_for_samples()
            self.sampler.publish(orders.publish)
        for window in orders.submit:
            self._submit(running, window, orders.publish, count)

    def _submit(
        self,
        running: Running,
        window: int,
        version: int,
        count: int,
        finished: RolloutBatch | None = None,
        step: int | None = None,
    ) -> None:
        """Ask for a window; only for its scores where its completions are there."""
        trainer = self.trainer
        first = trainer.accelerator.process_index * count
        rows = [trainer.train_dataset[i] for i in next(running.drawn)[first : first + count]]
        asked = trainer.collector.asked(rows, trainer.attempts_of(window, count), version, step)
        running.asked[window] = asked, running.background.submit(asked, finished)

    def _worker(self) -> RolloutWorker:
        trainer = self.trainer
        source = PublishedWeights(self.sampler, waits=trainer.args.environment_waves == "turn")
        return worker_of(trainer, source, trainer.collector.rewards.scorers, copies=True)

    def _take(self, running: Running, window: int, rows: Rows) -> RolloutBatch:
        """Wait for the completions of the window that begins to train."""
        asked, submitted = running.asked[window]
        if asked is not None and [row["prompt"] for row in asked.request.rows] != [row["prompt"] for row in rows]:
            reason = "the dataloader's rows are not those of the training set in the sampler's order"
            cure = "Remove it, or what changes rows or their order on the way."
            raise ConfigError([Problem("rollout_ahead", self.trainer.args.rollout_ahead, reason, cure)])
        began, metrics = time.monotonic(), self.trainer._metrics["train"]
        with self.trainer._times.during("rollout"), failing_together():
            while not wait([submitted.finished], POLL_SECONDS).done:
                if shutdown().is_set():
                    raise SamplerLost(f"generation {window}, sampled ahead: {SIGNALLED}")
            finished = submitted.finished.result()
        metrics["overlap/waited"].append(time.monotonic() - began)
        metrics["overlap/rollout_seconds"].append(finished.seconds)
        metrics["overlap/age"].append(float(self.age))
        return finished


def upcoming(sampler: Any, rows: int) -> Iterator[list[int]]:
    """Yield the numbers of the `rows` rows of each generation of all processes, epoch after epoch."""
    sampler.repeat_count = 1
    while True:
        drawn = iter(sampler)
        while len(numbers := list(islice(drawn, rows))) == rows:
            yield numbers
