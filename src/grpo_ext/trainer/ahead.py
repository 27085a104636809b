"""AheadTrainer: generations are sampled and scored while earlier ones train (`rollout_ahead`).

`rollout.schedule` decides which weights sample which generation, and when; it calls a generation a window. Here its
orders are carried out: the rows of later windows are drawn as the dataloader will draw them, weights are published,
requests go to the background, and a window that begins to train is taken from there. TRL's hooks then return what the
background has made of it.
"""

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from grpo_ext.config.process_engine import samples_by_server
from grpo_ext.config.temporary import temporarily
from grpo_ext.errors import ConfigError, Problem, SamplerLost
from grpo_ext.rollout.collected import Collected, Finished
from grpo_ext.rollout.samplers import Sampler, failing_together
from grpo_ext.rollout.schedule import Orders, Schedule
from grpo_ext.rollout.seeds import AttemptId
from grpo_ext.trainer import in_flight
from grpo_ext.trainer.generating import GeneratingTrainer
from grpo_ext.trainer.in_flight import InFlight
from grpo_ext.trainer.leaves import LeavesInBackground, Request, Submitted, done, leaves_of, request_of
from grpo_ext.waiting import POLL_SECONDS, SIGNALLED, leaving

Rows = list[dict[str, Any]]


@dataclass
class Ahead:
    """Generations that a run samples ahead.

    Attributes:
        schedule: who samples what, and when.
        drawn: numbers of the rows of each later window, of all processes.
        background: completes and scores.
        asked: windows that were submitted and not yet taken, each with its request, unless a checkpoint had it, and
            with what is made of it.
    """

    schedule: Schedule
    drawn: Iterator[list[int]]
    background: LeavesInBackground
    asked: dict[int, tuple[Request | None, Submitted]] = field(default_factory=dict)
    window: int | None = None
    """The window that begins to train, until all its completions are known."""


class AheadTrainer(GeneratingTrainer):
    """`trl.GRPOTrainer` that trains on generations of older weights, each of exactly the same age."""

    _ahead: Ahead | None = None
    _in_flight = InFlight()
    """Generations of the checkpoint that the run continues from, until its first generation."""
    _made: tuple[Sequence[AttemptId], Finished] | None = None
    """Attempts that the background has completed, of the window that begins to train."""

    def _begun(self, rows: Rows, mode: str) -> Collected:
        if not self._older or mode != "train":
            return super()._begun(rows, mode)
        assert self._beside is not None
        window = self._step // self._uses
        if self._ahead is None:
            self._ahead = self._started(self._beside, window, len(rows))
        ahead, count = self._ahead, len(rows)
        ahead.window = window
        self._obey(ahead, self._beside, ahead.schedule.before(window), count)
        self._age = window - ahead.schedule.version(window)
        self._made = self.attempts_of(window, count), self._take(ahead, window, rows)
        collected = super()._begun(rows, mode)
        self._made, ahead.window = None, None
        del ahead.asked[window]  # till here a lost sampler may end the run before the window trains
        self._obey(ahead, self._beside, ahead.schedule.after(window), count)
        return collected

    def _started(self, sampler: Sampler, first: int, count: int) -> Ahead:
        """Return the state of a run that begins or resumes with the window `first`, of `count` rows a process."""
        kept, self._in_flight = self._in_flight, InFlight()
        kept = kept if kept.first == first else InFlight()  # the run ended between two windows
        for version, weights in kept.weights.items():
            sampler.publish(version, weights)
        # a server has no older weights: what it had not finished, on any process, is sampled by those of now
        known = list(takewhile(lambda its: its[1] is not None or its[0] in kept.weights, kept.windows))
        if self.accelerator.num_processes > 1:  # pushes are collective, so all processes need the same orders
            known = known[: min(gather_object([len(known)]))]
        versions = {first + i: version for i, (version, _) in enumerate(known)}
        windows = math.ceil(self.state.max_steps * self.args.gradient_accumulation_steps / self._uses)
        schedule = Schedule(self.args.rollout_ahead, windows, first, versions, list(kept.weights))
        with temporarily(self, _train_sampler=self._train_sampler):
            drawn = upcoming(self._get_train_sampler(), count * self.accelerator.num_processes)
        ahead = Ahead(schedule, islice(drawn, first, None), LeavesInBackground(leaves_of(self, sampler)))
        for window, (version, finished) in zip(versions, known, strict=True):
            if finished is None or not finished.scored:
                # v_s was published, and this window asked for, when window s had been taken
                step = min(version * self._uses // self.args.gradient_accumulation_steps, self.state.global_step)
                self._submit(ahead, window, version, count, finished, step)
            else:
                next(ahead.drawn)
                ahead.asked[window] = None, Submitted(done(finished), done(finished))
        return ahead

    def _obey(self, ahead: Ahead, sampler: Sampler, orders: Orders, count: int) -> None:
        for version in orders.forget:
            sampler.forget(version)
        if orders.publish is None:
            return
        with self._times.during("weight_push"):
            if samples_by_server(self.args):  # it replaces the weights of windows that are not yet sampled
                ahead.background.wait_for_samples()
            sampler.publish(orders.publish)
        for window in orders.submit:
            self._submit(ahead, window, orders.publish, count)

    def _submit(
        self,
        ahead: Ahead,
        window: int,
        version: int,
        count: int,
        finished: Finished | None = None,
        step: int | None = None,
    ) -> None:
        """Ask for a window; only for its scores where its completions are there.

        Args:
            ahead: the state.
            window: number of the window.
            version: number of the weights that sample it.
            count: rows of this process.
            finished: completions, if they are there.
            step: optimizer step after which it was asked for, if not now.
        """
        first = self.accelerator.process_index * count
        dataset: Any = self.train_dataset
        rows = [dataset[i] for i in next(ahead.drawn)[first : first + count]]
        request = request_of(self, rows, self.attempts_of(window, count), version, step)
        ahead.asked[window] = request, ahead.background.submit(request, finished)

    def _take(self, ahead: Ahead, window: int, rows: Rows) -> Finished:
        """Wait for the completions of the window that begins to train.

        Raises:
            ConfigError: the dataloader has other rows.
            SamplerLost: or ServerLost, the sampler is lost on this or another process, or a signal ends the run.
        """
        request, submitted = ahead.asked[window]
        if request is not None and [row["prompt"] for row in request.rows] != [row["prompt"] for row in rows]:
            reason = "the dataloader's rows are not those of the training set in the sampler's order"
            cure = "Remove it, or what changes rows or their order on the way."
            raise ConfigError([Problem("rollout_ahead", self.args.rollout_ahead, reason, cure)])
        began, metrics = time.monotonic(), self._metrics["train"]
        with self._times.during("rollout"), failing_together():
            while not wait([submitted.finished], POLL_SECONDS).done:
                if leaving.is_set():
                    raise SamplerLost(f"generation {window}, sampled ahead: {SIGNALLED}")
            finished = submitted.finished.result()
        metrics["overlap/waited"].append(time.monotonic() - began)
        metrics["overlap/rollout_seconds"].append(finished.seconds)
        metrics["overlap/age"].append(float(self._age))
        return finished

    def _finished(self, attempts: Sequence[AttemptId]) -> Finished | None:
        return self._made[1] if self._made is not None and self._made[0] == attempts else None

    def _publish(self, sampler: Sampler) -> int:
        """Return the version that samples what is still missing of a window: groups that replace silent ones.

        They are sampled, played and scored by this thread, when the background has ended all its work: rewards and
        environments serve one thread.
        """
        if self._ahead is None or self._ahead.window is None:
            return super()._publish(sampler)
        self._ahead.background.wait()
        version = self._ahead.schedule.version(self._ahead.window)
        if version not in sampler.versions:  # a server's, after a resume
            version = self._ahead.window
            sampler.publish(version)
        return version

    def background_paused(self) -> AbstractContextManager[None]:
        """Wait for all windows in flight: rewards and environments serve one thread, that of an evaluation now."""
        if self._ahead is not None:
            self._ahead.background.wait()
        return super().background_paused()

    def close_rewards(self) -> None:
        """End what samples, scores and plays ahead, and first what that waits for."""
        if self._ahead is not None:
            self._ahead.background.stop()
            if self.reward_runtime is not None:
                self.reward_runtime.interrupt()
            for processes in (self.acting, self._beside):
                if processes is not None:
                    processes.close()
            self._ahead.background.close()
            self._ahead = None
        super().close_rewards()

    # Checkpoints.

    def _save_own(self, folder: Path) -> None:
        super()._save_own(folder)
        if self._older:
            in_flight.write(folder, self.accelerator.process_index, self._waited_for())

    def _waited_for(self) -> InFlight:
        """Return what is in flight, when each window has been finished, or has failed.

        With it the weights of windows that are still to be sampled, or whose silent groups may be replaced. A run that
        ends early, by a signal say, does not wait: what is not there by now is sampled by these weights when it
        resumes. A server has no older weights, so there it waits.
        """
        if self._ahead is None or self._beside is None:
            return self._in_flight
        found, needed = list[tuple[int, Finished | None]](), set[int]()
        replaces = self._sampler is not None and self.args.should_save
        if not self._leaving or samples_by_server(self.args):
            self._ahead.background.wait()
        for window, (_, submitted) in sorted(self._ahead.asked.items()):
            version, made = self._ahead.schedule.version(window), submitted.made()
            kept = None if made is None else in_flight.to_be_kept(made)
            found.append((version, kept))
            needed |= {version} if replaces or kept is None else set()
        copies = {version: self._beside.copy_of(version) for version in sorted(needed)}
        weights = {version: copy for version, copy in copies.items() if copy is not None}
        return InFlight(found, weights, min(self._ahead.asked, default=0))

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        self._in_flight = InFlight()  # an earlier call of `train` may have left it
        return super()._init_training_state(*args, **kwargs)

    def _restore(self, *, epoch_over: bool) -> None:
        super()._restore(epoch_over=epoch_over)
        if self._older and self._resumed is not None and self._resumed.state is not None:
            rank, of_host = self.accelerator.process_index, self.accelerator.local_process_index
            saver = rank - of_host if self.args.save_on_each_node else 0
            self._in_flight = in_flight.read(self._resumed.checkpoint, rank, saver)


def upcoming(sampler: Any, rows: int) -> Iterator[list[int]]:
    """Yield the numbers of the `rows` rows of each generation of all processes, epoch after epoch.

    Args:
        sampler: a new one of TRL's.
        rows: of a generation.
    """
    sampler.repeat_count = 1
    while True:
        drawn = iter(sampler)
        while len(numbers := list(islice(drawn, rows))) == rows:
            yield numbers
