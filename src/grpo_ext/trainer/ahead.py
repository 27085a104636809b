"""Generations are sampled and scored while earlier ones train (`rollout_ahead`).

`rollout.schedule` decides which weights sample which generation, and when. Here its orders are carried out: the rows
of later generations are drawn as the dataloader will draw them, weights are published, requests go to the background,
and a generation that begins to train is taken from there.
"""

import copy
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import Any

from accelerate.utils import gather_object

from grpo_ext.config.process_engine import samples_by_server
from grpo_ext.config.truncation import scores_over_support
from grpo_ext.errors import ConfigError, Problem, SamplerLost
from grpo_ext.packing.images import RowImages
from grpo_ext.rewards.runtime import Runtime
from grpo_ext.rollout.rollout_batch import RolloutBatch
from grpo_ext.rollout.samplers import Sampler, failing_together
from grpo_ext.rollout.schedule import Orders, Schedule
from grpo_ext.rollout.seeds import AttemptId
from grpo_ext.trainer import in_flight
from grpo_ext.trainer.callbacks import StepTimes
from grpo_ext.trainer.in_flight import InFlight
from grpo_ext.trainer.rollout_worker import (
    Asked,
    BackgroundWorker,
    Hooks,
    PublishedWeights,
    RolloutRequest,
    RolloutWorker,
    Submitted,
    done,
)
from grpo_ext.waiting import POLL_SECONDS, SIGNALLED, shutdown

Rows = list[dict[str, Any]]


@dataclass
class Running:
    """Windows of a run that samples ahead.

    Attributes:
        schedule: who samples what, and when.
        numbers: numbers of the rows of each later generation, of all processes.
        background: completes and scores.
        submitted: generations that were submitted and not yet taken, each with its request, unless a checkpoint had
            it, and with what is made of it.
        generation: the generation that begins to train, until all its completions are known.
    """

    schedule: Schedule
    numbers: Iterator[list[int]]
    background: BackgroundWorker
    submitted: dict[int, tuple[Asked | None, Submitted]] = field(default_factory=dict)
    generation: int | None = None


@dataclass
class RolloutsAhead:
    """The generations of a trainer that are sampled ahead, each by weights of exactly the same age.

    Attributes:
        sampler: samples beside training.
        worker: of the main thread; the background gets a copy.
        runtime: the rewards' processes.
        times: the clock of a step, whose metrics get those of overlap too.
        age: generations by which the weights that sampled the current generation are older than the policy's.
        kept: generations of the checkpoint that the run continues from, until its first generation.
    """

    hooks: Hooks
    sampler: Sampler
    worker: RolloutWorker
    runtime: Runtime | None
    times: StepTimes
    age: int = 0
    kept: InFlight = field(default_factory=InFlight)
    _running: Running | None = None
    _generation: tuple[Sequence[AttemptId], RolloutBatch] | None = None

    @property
    def submitted(self) -> Sequence[int]:
        """Windows that were submitted and not yet taken."""
        return sorted(self._running.submitted) if self._running is not None else ()

    @contextmanager
    def taking(self, rows: Rows) -> Iterator[None]:
        """Take the generation that begins to train for a `with` block, and submit the next one behind it.

        Raises:
            ConfigError: the dataloader has other rows.
            SamplerLost: or ServerLost, the sampler is lost on this or another process, or a signal ends the run.
        """
        count, generation = len(rows), self.hooks.generation_number
        running = self._running = self._running or self._started(generation, count)
        running.generation = generation
        self._obey(running, running.schedule.before(generation), count)
        self.age = generation - running.schedule.version(generation)
        self._generation = self.hooks.attempts_of(generation, count), self._take(running, generation, rows)
        yield
        self._generation, running.generation = None, None
        del running.submitted[generation]  # till here a lost sampler may end the run before the generation trains
        self._obey(running, running.schedule.after(generation), count)

    def finished(self, attempts: Sequence[AttemptId]) -> RolloutBatch | None:
        """Return what the background has made of attempts; None where they are made now."""
        return self._generation[1] if self._generation is not None and self._generation[0] == attempts else None

    def version(self) -> int | None:
        """Return the version that samples what is still missing of the generation: groups that replace others.

        They are sampled, played and scored by this thread, when the background has ended all its work: rewards and
        environments serve one thread. None outside of a generation.
        """
        running = self._running
        if running is None or running.generation is None:
            return None
        running.background.wait()
        version = running.schedule.version(running.generation)
        if version not in self.sampler.versions:  # a server's, after a resume
            version = running.generation
            self.sampler.publish(version)
        return version

    def wait(self) -> None:
        """Wait for all generations in flight: rewards and environments serve one thread, that of an evaluation now."""
        if self._running is not None:
            self._running.background.wait()

    def close(self) -> None:
        """End what samples, scores and plays ahead, and first what that waits for."""
        if self._running is None:
            return
        self._running.background.stop()
        if self.runtime is not None:
            self.runtime.interrupt()
        for processes in (self.worker.episode_runner, self.sampler):
            if processes is not None:
                processes.close()
        self._running.background.close()
        self._running = None

    def in_flight(self, *, waits: bool, replaces: bool) -> InFlight:
        """Return what is in flight, when each generation has been finished, or has failed.

        With it the weights of generations that are still to be sampled, or whose groups may be replaced.

        Args:
            waits: False where a run ends early, as by a signal: what is not there by now is sampled by these weights
                when it resumes. A server has no older weights, so there it waits.
            replaces: whether this process keeps the weights by which groups are replaced.
        """
        running = self._running
        if running is None:
            return self.kept
        generations, needed = list[tuple[int, RolloutBatch | None]](), set[int]()
        if waits or samples_by_server(self.hooks.args):
            running.background.wait()
        for generation, (_, submitted) in sorted(running.submitted.items()):
            version, rollouts = running.schedule.version(generation), submitted.made()
            kept = None if rollouts is None else in_flight.to_be_kept(rollouts)
            generations.append((version, kept))
            needed |= {version} if replaces or kept is None else set()
        copies = {version: self.sampler.copy_of(version) for version in sorted(needed)}
        weights = {version: copy for version, copy in copies.items() if copy is not None}
        return InFlight(generations, weights, min(running.submitted, default=0))

    def _started(self, first: int, count: int) -> Running:
        """Return the state of a run that begins or resumes with the generation `first`, of `count` rows a process."""
        hooks, args, processes = self.hooks, self.hooks.args, self.hooks.accelerator.num_processes
        kept, self.kept = self.kept, InFlight()
        kept = kept if kept.first == first else InFlight()  # the run ended between two generations
        for version, weights in kept.weights.items():
            self.sampler.publish(version, weights)
        # a server has no older weights: what it had not finished, on any process, is sampled by those of now
        usable = list(takewhile(lambda its: its[1] is not None or its[0] in kept.weights, kept.generations))
        if processes > 1:  # pushes are collective, so all processes need the same orders
            usable = usable[: min(gather_object([len(usable)]))]
        versions = {first + i: version for i, (version, _) in enumerate(usable)}
        accumulation = args.gradient_accumulation_steps
        uses = int(args.steps_per_generation or 1) * args.num_iterations
        generations = math.ceil(hooks.state.max_steps * accumulation / uses)
        schedule = Schedule(args.rollout_ahead, generations, first, versions, list(kept.weights))
        numbers = upcoming(hooks._get_train_sampler(), count * processes)
        source = PublishedWeights(self.sampler, waits=args.environment_waves == "turn")
        background = BackgroundWorker(self.worker.in_background(source))
        running = Running(schedule, islice(numbers, first, None), background)
        for generation, (version, finished) in zip(versions, usable, strict=True):
            if finished is None or not finished.scored:
                # v_s was published, and this generation asked for, when generation s had been taken
                published = version * uses // accumulation
                self._submit(running, generation, version, count, finished, min(published, hooks.state.global_step))
            else:
                next(running.numbers)
                running.submitted[generation] = None, done(finished)
        return running

    def _obey(self, running: Running, orders: Orders, count: int) -> None:
        for version in orders.forget:
            self.sampler.forget(version)
        if orders.publish is None:
            return
        with self.times.during("weight_push"):
            if samples_by_server(self.hooks.args) and not self.hooks.vllm_generation.adapts:
                # it replaces the weights of generations that are not yet sampled
                running.background.wait_for_samples()
            self.sampler.publish(orders.publish)
        for generation in orders.submit:
            self._submit(running, generation, orders.publish, count)

    def _submit(
        self,
        running: Running,
        generation: int,
        version: int,
        count: int,
        finished: RolloutBatch | None = None,
        step: int | None = None,
    ) -> None:
        """Ask for a generation; only for its scores where its completions are there.

        Its reward functions see the state of the run at `step`, by default the present one.
        """
        hooks, state = self.hooks, self.hooks.state
        first, step = self.hooks.accelerator.process_index * count, state.global_step if step is None else step
        rows = [hooks.train_dataset[i] for i in next(running.numbers)[first : first + count]]
        prompts = copy.deepcopy(hooks.prompts_of(rows))
        ids, images, seen = list[list[int]](), None, list[RowImages]()
        if self.worker.episode_runner is None:
            ids, images, _ = hooks._tokenize_prompts(prompts)
            seen = [hooks.row_images(*row) for row in zip(ids, images, strict=True)] if images else []
        attempts, limit = hooks.attempts_of(generation, count), int(self.hooks.args.max_completion_length or 0)
        history = [row for row in state.log_history if row.get("step", 0) <= step]
        supports = scores_over_support(hooks.args)
        submitted = rows, prompts, ids, attempts, limit, version, step
        request = RolloutRequest(*submitted, images=images, seen=seen, supports=supports)
        queued = Asked(request, replace(state, global_step=step, log_history=history))
        running.submitted[generation] = queued, running.background.submit(queued, finished)

    def _take(self, running: Running, generation: int, rows: Rows) -> RolloutBatch:
        """Wait for the completions of the generation that begins to train."""
        queued, submitted = running.submitted[generation]
        if queued is not None and [row["prompt"] for row in queued.request.rows] != [row["prompt"] for row in rows]:
            reason = "the dataloader's rows are not those of the training set in the sampler's order"
            cure = "Remove it, or what changes rows or their order on the way."
            raise ConfigError([Problem("rollout_ahead", self.hooks.args.rollout_ahead, reason, cure)])
        began, metrics = time.monotonic(), self.times.metrics
        with self.times.during("rollout"), failing_together():
            while not wait([submitted.finished], POLL_SECONDS).done:
                if shutdown().is_set():
                    raise SamplerLost(f"generation {generation}, sampled ahead: {SIGNALLED}")
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
