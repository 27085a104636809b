"""The part of a generation that needs no other process: complete this process's rows, and score them.

`Leaves` runs in a background thread. Collectives, metrics and TRL's own code stay on the main thread, whose hooks
return what was finished here. A request holds all that is read here: the main thread may change the rest.
"""

import copy
import time
from asyncio import AbstractEventLoop
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerState
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational

from grpo_ext.data.chat_template import splits_reasoning
from grpo_ext.environments.attempt import AttemptLimits
from grpo_ext.environments.rendering import Renderer
from grpo_ext.objective.trajectory import COLUMN, batch
from grpo_ext.rewards.containment import scored_by
from grpo_ext.rollout.background import Background
from grpo_ext.rollout.collected import Finished
from grpo_ext.rollout.samplers import Sampler
from grpo_ext.rollout.seeds import AttemptId
from grpo_ext.rollout.trajectories import completions_seen, fill_empty
from grpo_ext.rollout.turn_engines import WaveEngine
from grpo_ext.trainer.acting import Acting, Played, limits_of

Row = dict[str, Any]
T = TypeVar("T")
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns of a row that TRL does not pass to rewards under their own name."""


@dataclass(frozen=True)
class WindowRequest:
    """Rows to complete and score.

    Attributes:
        rows: of the dataset.
        prompt_ids: tokens of the prompts; empty where environments are played.
        attempts: identity of each row's attempt.
        version: number of the weights that sample, as published to the sampler.
        step: optimizer steps that made these weights.
        state: trainer state that reward functions see.
    """

    rows: Sequence[Row]
    prompt_ids: list[list[int]]
    attempts: Sequence[AttemptId]
    version: int
    step: int
    state: TrainerState


@dataclass(frozen=True)
class Play:
    """Plays environments.

    Attributes:
        acting: the environments.
        limits: limits of each attempt.
        waits: whether a wave waits until all environments have answered.
        options: `chat_template_kwargs`.
    """

    acting: Acting
    limits: AttemptLimits
    waits: bool
    options: Mapping[str, Any]

    def __call__(self, request: WindowRequest, sampler: Sampler) -> Played:
        """Play one attempt for each row."""
        attempts, renderer = request.attempts, Renderer(self.acting.tokenizer, self.options)
        engine = WaveEngine(partial(sampler.sample, request.version), request.step, attempts, waits=self.waits)
        return self.acting.play(request.rows, attempts, engine, self.limits, renderer)


class Submitted(NamedTuple):
    """The background's results for a request; each future gets its result, or the exception that ended it."""

    completed: Future[Finished]
    """Completions without scores."""
    finished: Future[Finished]

    def made(self) -> Finished | None:
        """Return what is there by now: completions with scores, or without; None if there are no completions."""
        ended = (future for future in (self.finished, self.completed) if future.done() and not future.exception())
        return next((future.result() for future in ended), None)


class Leaves:
    """Completes and scores the rows of requests, each in one thread at a time.

    Args:
        sampler: samples by published weights.
        scorers: the rewards, as `rewards.containment.scorer_of` returns them.
        processing_class: of the trainer; copied, since two threads must not use one tokenizer.
        limit: most tokens of a completion.
        ends: tokens that end a completion, with padding.
        eos_token_id: fills an empty completion.
        play: plays environments, if there are any.
        loop: TRL's event loop, where a reward is async.
    """

    def __init__(
        self,
        sampler: Sampler,
        scorers: Sequence[Any],
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        *,
        limit: int,
        ends: Collection[int],
        eos_token_id: int,
        play: Play | None = None,
        loop: AbstractEventLoop | None = None,
    ) -> None:
        self.sampler, self.scorers, self.limit, self.ends, self.play = sampler, list(scorers), limit, ends, play
        self.eos_token_id, self.loop = eos_token_id, loop
        self._processing: Any = copy.deepcopy(processing_class)
        self._tokenizer: Any = getattr(self._processing, "tokenizer", self._processing)

    def completed(self, request: WindowRequest) -> Finished:
        """Sample the completions of a request, or play its environments."""
        began = time.monotonic()
        made = self._sampled(request) if self.play is None else self._played(request, self.play)
        return replace(made, seconds=time.monotonic() - began)

    def scored(self, request: WindowRequest, made: Finished) -> Finished:
        """Score completions by all functions; models score on the main thread."""
        began = time.monotonic()
        rows = [dict(row) for row in request.rows]
        for row, (trajectory, _) in zip(rows, made.played, strict=False):
            row[COLUMN] = trajectory
        columns = _columns(rows, made.completions, made.completion_ids, request.state)
        scored = scored_by(self.scorers, columns, self.loop)
        return replace(made, scored=scored, seconds=made.seconds + time.monotonic() - began)

    def _sampled(self, request: WindowRequest) -> Finished:
        streams = [attempt.stream() for attempt in request.attempts]
        sampled = self.sampler.sample(request.version, request.prompt_ids, [self.limit] * len(streams), streams)
        ids = [list(one.ids) for one in sampled]
        logprobs: list[list[float | None]] = [list(one.logps or ()) for one in sampled]
        fill_empty(ids, logprobs, self.eos_token_id)
        kept = [one.kept for one in sampled if one.kept is not None]
        return Finished(ids, logprobs, self._texts(request.rows, request.prompt_ids, ids), kept=kept)

    def _played(self, request: WindowRequest, play: Play) -> Finished:
        played = play(request, self.sampler)
        trajectories = [trajectory for trajectory, _ in played]
        made = batch(trajectories, self.ends)
        fill_empty(made.completion_ids, None, self.eos_token_id)
        texts = self._texts(request.rows, made.prompt_ids, made.completion_ids)
        return Finished(made.completion_ids, None, completions_seen(trajectories, texts), played=played)

    def _texts(self, rows: Sequence[Row], prompt_ids: list[list[int]], ids: list[list[int]]) -> list[Any]:
        """Decode completions as TRL does."""
        if not is_conversational({"prompt": rows[0]["prompt"]}):
            return list(self._processing.batch_decode(ids, skip_special_tokens=True))
        if splits_reasoning(self._tokenizer):
            pairs = zip(ids, prompt_ids, strict=True)
            return [[parse_response(self._tokenizer, one, prefix=prompt, tools=[])] for one, prompt in pairs]
        texts = self._processing.batch_decode(ids, skip_special_tokens=True)
        return [[{"role": "assistant", "content": text}] for text in texts]


def _columns(
    rows: Sequence[Row], completions: list[Any], completion_ids: list[list[int]], state: TrainerState
) -> dict[str, Any]:
    """Return what TRL passes to a reward function, without callbacks."""
    given = {name: [row[name] for row in rows] for name in rows[0] if name not in _NOT_COLUMNS}
    prompts = [row["prompt"] for row in rows]
    batch_of = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    return {**given, **batch_of, "trainer_state": state}


def leaves_of(trainer: Any, sampler: Sampler) -> Leaves:
    """Return what completes and scores rows for a trainer."""
    args, play = trainer.args, None
    if trainer.acting is not None:
        waits = args.environment_waves == "turn"
        play = Play(trainer.acting, limits_of(trainer), waits, trainer.chat_template_kwargs)
    return Leaves(
        sampler,
        trainer.collector.rewards.scorers,
        trainer.processing_class,
        limit=args.max_completion_length,
        ends={*trainer.eos_token_ids, trainer._tokenizer.pad_token_id},
        eos_token_id=trainer._tokenizer.eos_token_id,
        play=play,
        loop=getattr(trainer, "async_loop", None),
    )


def request_of(
    trainer: Any, rows: Sequence[Row], attempts: Sequence[AttemptId], version: int, step: int | None = None
) -> WindowRequest:
    """Return the request for a trainer's rows; main thread.

    Args:
        trainer: the trainer.
        rows: of the dataset.
        attempts: identity of each row's attempt.
        version: number of the weights that sample, as published to the sampler.
        step: optimizer steps that made these weights; by default all that have been made.
    """
    step = trainer.state.global_step if step is None else step
    prompts = [] if trainer.acting is not None else copy.deepcopy([row["prompt"] for row in rows])
    ids = trainer._tokenize_prompts(prompts)[0] if prompts else []
    known = [row for row in trainer.state.log_history if row.get("step", 0) <= step]
    return WindowRequest(
        rows, ids, attempts, version, step, replace(trainer.state, global_step=step, log_history=known)
    )


def done(result: T) -> Future[T]:
    """Return a future that has its result."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


class LeavesInBackground:
    """Two threads: one completes requests, the other scores what is complete, both in the order of the requests.

    The second waits for the first, which waits for the sampler and for environments. Neither waits for the main
    thread.
    """

    def __init__(self, leaves: Leaves) -> None:
        self._completing = Background(leaves.completed)
        self._scoring: Background[tuple[WindowRequest, Future[Finished]], Finished] = Background(
            lambda asked: leaves.scored(asked[0], asked[1].result())
        )

    def submit(self, request: WindowRequest, made: Finished | None = None) -> Submitted:
        """Queue a request, or only the scoring of what was `made` of it."""
        completed = self._completing.submit(request) if made is None else done(made)
        return Submitted(completed, self._scoring.submit((request, completed)))

    def stop(self) -> None:
        """Begin no further request; see `close`."""
        self._completing.stop()
        self._scoring.stop()

    def wait(self) -> None:
        """Wait until all requests have ended."""
        self._scoring.wait()

    def wait_for_samples(self) -> None:
        """Wait until no request needs the sampler; some may still be scored."""
        self._completing.wait()

    def close(self) -> None:
        """End both threads; requests that have not begun fail."""
        self._completing.close()
        self._scoring.close()
