"""ChunkTrainer: the hooks of `overlap: step`, which score a generation chunk by chunk and train on what has arrived.

TRL's code runs for each chunk as for a generation, but its figures go nowhere: minima, deviations and tables are those
of a whole batch. When the last chunk is scored TRL's code runs once more over all rows, with the completions, rewards
and log-probabilities that are known by then, for the sake of the figures.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from grpo_ext.config.chunks import BY_DEEPSPEED, chunk_rows, waits_for_all
from grpo_ext.config.temporary import temporarily
from grpo_ext.packing.micro_batches import MicroBatch, as_wide, regroup
from grpo_ext.rollout.collected import Collected, Finished
from grpo_ext.rollout.random_streams import random_streams
from grpo_ext.rollout.seeds import AttemptId
from grpo_ext.trainer.ahead import AheadTrainer
from grpo_ext.trainer.arriving import Arriving, Plan, correction, provisional, scale
from grpo_ext.trainer.batches import Generation, counted
from grpo_ext.trainer.credit import AdvantageMonitor
from grpo_ext.trainer.diagnosis.recording import ROWS, log_rows
from grpo_ext.trainer.requests import ChunksInBackground, leaves_of, request_of, taken

Rows = list[dict[str, Any]]


class ChunkTrainer(AheadTrainer):
    """`trl.GRPOTrainer` whose groups may train before the last of their generation is scored."""

    _arriving: Arriving | None = None
    _chunk: int | None = None
    """Rows of a chunk; None where a generation is scored as one."""
    _background: ChunksInBackground | None = None
    _restore_streams: Callable[[], None] | None = None
    """Restores the random states of before the generation whose first optimizer step is under way."""
    _advantage_monitor: AdvantageMonitor
    _drift: Any

    @property
    def _regroups(self) -> bool:
        """Whether rows may be moved between the micro-batches of a step."""
        raise NotImplementedError

    @property
    def _skips(self) -> bool:
        """Whether completions without an advantage leave the forward."""
        raise NotImplementedError

    def _set_up_chunks(self) -> None:
        """Decide whether generations are cut into chunks, and print why not."""
        if self.args.overlap is None:
            return
        reason = next(self._waiting_for_all(), None)
        self._chunk = chunk_rows(self.args) if reason is None else None
        count = f"generations are cut into chunks of {self._chunk} completions for each process"
        self.accelerator.print(f"overlap step: {count if reason is None else f'none, because {reason}'}")

    def _waiting_for_all(self) -> Iterator[str]:
        """Yield why no row may train before the last one is scored."""
        yield from waits_for_all(self.args)
        if self.aux_loss_enabled:
            yield "the router's auxiliary loss depends on the rows of a micro-batch"
        if self.is_deepspeed_enabled:
            yield BY_DEEPSPEED

    # Micro-batches.

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        steps = int(self.args.steps_per_generation or 1)
        if not self.model.training or self._chunk is None:
            return super()._prepare_inputs(generation_batch)
        if self._step % (steps * self.num_iterations) == 0:
            self._begin(generation_batch, self._chunk)
        if (arriving := self._now_arriving) is None:
            return super()._prepare_inputs(generation_batch)
        place = self._step % steps
        arriving.await_micro_batch(place)
        return self._buffered_inputs[place]

    @property
    def _now_arriving(self) -> Arriving | None:
        """The generation whose first optimizer step is under way."""
        arriving = self._arriving
        return arriving if arriving is not None and arriving.generation is self._generation else None

    def _begin(self, rows: Rows, chunk: int) -> None:
        """Order a generation, and plan its micro-batches."""
        args, accelerator = self.args, self.accelerator
        self._restore_streams = random_streams()
        attempts, window = self.attempt_ids(len(rows)), args.gradient_accumulation_steps
        order = torch.randperm(len(rows)).tolist()  # the numbers that TRL would draw to shuffle
        plan = Plan.of(order, args.per_device_train_batch_size, window, chunk).agreed(accelerator)
        step = args.per_device_train_batch_size * window * accelerator.num_processes
        totals = provisional(step, args.max_completion_length or 1, window, accelerator.device)
        micro_batches = [MicroBatch() for batches in plan.steps for _ in batches]
        self._generation = Generation(micro_batches, [totals] * len(plan.steps))
        self._buffered_inputs = micro_batches
        parts = [(rows[i.start : i.stop], attempts[i.start : i.stop]) for i in plan.chunks]
        futures, scored, waited = self._submitted(parts), list[Collected](), list[float]()

        def score(i: int) -> MicroBatch:
            collected = Collected(*parts[i], ready=self._taken(futures[i], waited), part=True)
            scored.append(collected)
            first = accelerator.process_index * len(rows)
            return self._scored(collected, first, plan.chunks[i].start)

        finish = partial(self._log_generation, rows, attempts, scored, waited)
        self._arriving = Arriving(plan, self._generation, score, self._evened, finish)

    def _submitted(self, parts: Sequence[tuple[Rows, list[AttemptId]]]) -> list[Future[Finished]]:
        """Publish the weights, and submit requests for some rows each."""
        assert self._beside is not None
        version = self._publish(self._beside)
        if self._background is None:
            self._background = ChunksInBackground(leaves_of(self, self._beside))
        return self._background.submit([request_of(self, *part, version) for part in parts])

    def _taken(self, future: Future[Finished], waited: list[float]) -> Finished:
        began = time.monotonic()
        with self._times.during("rollout"):
            finished = taken(future)
        waited.append(time.monotonic() - began)
        return finished

    def _save_and_explain(self, error: Exception) -> None:
        """Save as a run in turn does; a generation of which some chunks are lost begins again when the run resumes."""
        if self._restore_streams is not None:
            self._restore_streams()
            self._step -= self._step % int(self.args.steps_per_generation or 1)
        super()._save_and_explain(error)

    def close_rewards(self) -> None:
        """End what samples, scores and plays beside the training."""
        self._restore_streams = None
        if self._background is not None:
            self._end_background(self._background)
            self._background = None
        super().close_rewards()

    def _evened(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        return regroup(batches, len(batches), self._skips) if self._regroups else batches

    def _scored(self, collected: Collected, first: int, start: int) -> MicroBatch:
        """Score a chunk.

        Args:
            collected: the chunk.
            first: the number of this process's first row, over all processes.
            start: the chunk's first row on this process.
        """
        drift = self._drift if start == 0 and not self._sampler_corrected else None
        with self._unlogged(drift), self._filling(collected):
            output = self._generate_and_score_completions(collected.rows)
        count = len(output["completion_ids"])
        numbers = torch.arange(first + start, first + start + count, device=output["completion_ids"].device)
        numbered = output[ROWS].clone()
        numbered[:, :2] += start  # text and group
        return MicroBatch(**{**output, ROWS: numbered, "generation_row": numbers})  # type: ignore[typeddict-item]

    @contextmanager
    def _unlogged(self, drift: object) -> Iterator[None]:
        """Log nothing, and count nothing."""
        seen = self.state.num_input_tokens_seen
        metrics = {mode: defaultdict[str, list[float]](list) for mode in self._metrics}
        logs = {
            name: _nowhere() if isinstance(to, deque) else defaultdict(_nowhere) for name, to in self._logs.items()
        }
        monitor = AdvantageMonitor(self.reward_func_names, warns=False)
        with temporarily(self, _metrics=metrics, _logs=logs, _advantage_monitor=monitor, _drift=drift):
            yield
        self.state.num_input_tokens_seen = seen

    def _log_generation(
        self, rows: Rows, attempts: list[AttemptId], scored: Sequence[Collected], waited: Sequence[float]
    ) -> None:
        """Log the figures and the table of a generation whose chunks are scored; `waited` are seconds for each."""
        drift = self._drift if self._sampler_corrected else None
        collected = whole(rows, attempts, scored, self.accelerator.num_processes)
        with temporarily(self, _drift=drift), self._filling(collected):
            self._complete(collected, "train")
        names, by_turn, metrics = self.reward_func_names, self.objective.sees_turns, self._metrics["train"]
        log_rows(self._buffered_inputs, names, metrics, self.accelerator, by_turn=by_turn)
        metrics["overlap/waited"].append(sum(waited))
        metrics["overlap/rollout_seconds"].append(max(part.ready.seconds for part in scored if part.ready is not None))

    # The optimizer step.

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Train on a micro-batch as TRL does; the last of a step brings the gradient to its true denominators."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if (arriving := self._now_arriving) is None:
            return loss
        arriving.losses.append(loss)
        if not self.accelerator.sync_gradients:
            return torch.zeros_like(loss)
        generation, window = arriving.generation, self.args.gradient_accumulation_steps
        totals = counted(generation.micro_batches, window, self.accelerator)
        factor = correction(self.objective.aggregation, generation.totals[0], totals[0])
        scale(model, factor)
        self._guard.scale_losses(factor)
        self._restore_streams = None
        self._generation = Generation(generation.micro_batches, totals)
        return torch.stack(arriving.losses).sum() * factor


def _nowhere() -> deque[Any]:
    return deque(maxlen=0)


def whole(rows: Rows, attempts: list[AttemptId], chunks: Sequence[Collected], processes: int) -> Collected:
    """Return a generation whose completions, rewards and log-probabilities are those of its scored chunks."""
    rewards = [chunk.rewards.unflatten(0, (processes, -1)) for chunk in chunks if chunk.rewards is not None]
    logged = [chunk.logged for chunk in chunks]
    return Collected(
        rows,
        attempts,
        ready=finished(chunks),
        rewards=torch.cat(rewards, dim=1).flatten(0, 1),
        turn_rewards=[row for chunk in chunks for row in chunk.turn_rewards],
        logged=_columns(logged, [len(chunk.rows) for chunk in chunks]),
        metrics=_columns([chunk.metrics for chunk in chunks], [0] * len(chunks)),
        passes=[torch.cat(as_wide(parts)) for parts in zip(*(chunk.passes for chunk in chunks), strict=True)],
        replayed=True,
    )


def finished(chunks: Sequence[Collected]) -> Finished:
    """Return the completions of chunks that TRL has decoded, without their scores."""
    made = [chunk.generated for chunk in chunks if chunk.generated is not None]
    known = all(part.logprobs is not None for part in made)
    return Finished(
        completion_ids=[ids for part in made for ids in part.completion_ids],
        logprobs=[logps for part in made for logps in part.logprobs or ()] if known else None,
        completions=[text for part in made for text in part.completions],
        scored={},
        kept=[sets for chunk in chunks for sets in chunk.kept],
        played=[played for chunk in chunks if chunk.ready is not None for played in chunk.ready.played],
    )


def _columns(parts: Sequence[Mapping[str, list[Any]]], sizes: Sequence[int]) -> dict[str, list[Any]]:
    """Join columns by name; a part without one has None in its rows."""
    names = dict.fromkeys(name for part in parts for name in part)
    filled = list(zip(parts, sizes, strict=True))
    return {name: [x for part, size in filled for x in part.get(name, [None] * size)] for name in names}
