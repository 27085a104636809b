"""`RolloutWorker`: completes and scores this process's rows, in the main thread or in the background.

Collectives, metrics and TRL's own code stay on the main thread. A request holds all that is read here: while a worker
runs in the background, the main thread may change the rest.
"""

import copy
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerState
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.data.chat_template import splits_reasoning
from grpo_ext.environments.engine import TurnEngine
from grpo_ext.environments.episode import EpisodeLimits
from grpo_ext.environments.rendering import Renderer
from grpo_ext.objective.trajectory import COLUMN, batch
from grpo_ext.packing.images import RowImages
from grpo_ext.rewards.outcomes import Scores
from grpo_ext.rewards.scorers import Scorer, scored_by
from grpo_ext.rollout.background import Background
from grpo_ext.rollout.images import Tokenized
from grpo_ext.rollout.rollout_batch import Generated, RolloutBatch
from grpo_ext.rollout.samplers import Sampled, Sampler
from grpo_ext.rollout.seeds import AttemptId
from grpo_ext.rollout.trajectories import completions_seen, fill_empty, supports_of
from grpo_ext.rollout.turn_engines import WaveEngine
from grpo_ext.trainer.episodes import EpisodeRunner

Row = dict[str, Any]
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns of a row that TRL does not pass to rewards under their own name."""


@dataclass(frozen=True)
class RolloutRequest:
    """Rows to complete and score.

    Attributes:
        rows: of the dataset.
        prompts: of the rows, as the model gets them.
        prompt_ids: tokens of the prompts; empty where environments are played.
        attempts: identity of each row's attempt.
        limit: most tokens of a completion.
        version: number of the weights that sample, as published to the sampler; None: the policy's own.
        step: optimizer steps that made these weights.
        fields: further inputs of a model that takes images, by row.
        images: of each prompt, or None where it has none.
        seen: what the processor made of them, where they are sampled ahead.
        group: number of consecutive rows that have one prompt.
        supports: whether the loss needs the sampling supports.
        records: whether the log-probabilities of the draws are.
    """

    rows: Sequence[Row]
    prompts: list[Any]
    prompt_ids: list[list[int]]
    attempts: Sequence[AttemptId]
    limit: int
    version: int | None
    step: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    images: list[Any] | None = None
    seen: Sequence[RowImages] = ()
    group: int = 1
    supports: bool = False
    records: bool = True


class Hooks(Protocol):
    """A trainer as what makes its rollouts sees it: TRL's hooks, which a subclass may override, and where it is."""

    args: GRPOExtConfig
    accelerator: Accelerator
    state: TrainerState
    train_dataset: Any
    environments: Any  # TRL's, of the rows that are completed now
    vllm_generation: Any

    @property
    def generation_number(self) -> int:
        """Number of the generation that begins to train, from 0."""

    def attempt_ids(self, count: int) -> list[AttemptId]:
        """Return the ids of this process's next attempts."""

    def attempts_of(self, generation: int, count: int) -> list[AttemptId]:
        """Return the ids of this process's attempts of a generation."""

    def prompts_of(self, rows: Sequence[Row]) -> list[Any]:
        """Return the prompts of rows as the model gets them."""

    def push_weights(self) -> None:
        """Give vLLM the policy's weights if it has older ones."""

    def row_images(self, ids: list[int], images: Sequence[Any] | None) -> RowImages:
        """Return the images of a row with these tokens, wherever they are."""

    def _tokenize_prompts(self, prompts: list) -> Tokenized: ...

    def _generate(self, prompts: list) -> Generated: ...

    def _calculate_rewards(
        self, inputs: list[Row], prompts: list, completions: list, completion_ids_list: list[list[int]]
    ) -> Tensor: ...

    def _get_train_sampler(self) -> Any: ...


class Source(Protocol):
    """Samples for a worker."""

    def sample(self, request: RolloutRequest) -> list[Sampled]:
        """Sample a completion for each row."""

    def turns(self, request: RolloutRequest) -> AbstractContextManager[TurnEngine]:
        """Return what samples the turns of conversations with environments."""


def _untimed(_: str) -> AbstractContextManager[None]:
    return nullcontext()


class PublishedWeights:
    """A sampler that runs beside training, by the published weights that a request names.

    Args:
        sampler: of this process.
        waits: whether a wave of turns waits until all environments have answered.
    """

    def __init__(self, sampler: Sampler, *, waits: bool) -> None:
        self.sampler, self.waits = sampler, waits

    def sample(self, request: RolloutRequest) -> list[Sampled]:
        """Sample a completion for each row."""
        assert request.version is not None
        streams = [attempt.stream() for attempt in request.attempts]
        rows = request.prompt_ids, [request.limit] * len(streams), streams, request.images
        return self.sampler.sample(request.version, *rows)

    @contextmanager
    def turns(self, request: RolloutRequest) -> Iterator[TurnEngine]:
        """Return what samples the turns of conversations with environments."""
        assert request.version is not None
        sample = partial(self.sampler.sample, request.version)
        yield WaveEngine(sample, request.step, request.attempts, waits=self.waits)


@dataclass
class RolloutWorker:
    """Completes and scores the rows of requests.

    Attributes:
        source: samples.
        scorers: what scores by each reward function, by its name.
        processing_class: tokenizer or processor of the policy.
        limits: of an episode, and the tokens that end a turn.
        episode_runner: environments, if there are any.
        options: `chat_template_kwargs`.
        image_obstacle: why conversations with environments must not hold images; "" if they may.
        loop: TRL's event loop, where a reward is async.
        waiting: entered while environments answer.
        timed: entered around the call of each reward function, with its name.
    """

    source: Source
    scorers: Mapping[str, Scorer]
    processing_class: Any
    limits: EpisodeLimits
    episode_runner: EpisodeRunner | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    image_obstacle: str = ""
    loop: AbstractEventLoop | None = None
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    timed: Callable[[str], AbstractContextManager[None]] = _untimed

    @property
    def ends(self) -> set[int]:
        """Tokens that end a completion, with padding."""
        return {*self.limits.ends, self.tokenizer.pad_token_id}

    def in_background(self, source: Source) -> "RolloutWorker":
        """Return a worker for another thread, with a tokenizer of its own: two threads must not use one."""
        processing_class = copy.deepcopy(self.processing_class)
        return replace(self, source=source, processing_class=processing_class, waiting=nullcontext, timed=_untimed)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, also of a processor."""
        return getattr(self.processing_class, "tokenizer", self.processing_class)

    def complete(self, request: RolloutRequest) -> RolloutBatch:
        """Sample the completions of a request, or play its environments, whose log-probabilities come later.

        They are used where all processes know them.
        """
        began = time.monotonic()
        runner = self.episode_runner
        rollouts = self._sampled(request) if runner is None else self._played(request, runner)
        return replace(rollouts, seconds=time.monotonic() - began)

    def score(self, columns: Mapping[str, Any], ready: Mapping[str, Scores] | None = None) -> dict[str, Scores]:
        """Return the scores by each function, those that are `ready` as they are; models score on the main thread."""
        ready = ready or {}
        missing = {name: scorer for name, scorer in self.scorers.items() if name not in ready}
        return {**ready, **scored_by(missing, columns, self.loop, self.timed)}

    def sampled(
        self, request: RolloutRequest
    ) -> tuple[list[list[int]], list[list[float | None]] | None, list[Tensor], list[Tensor]]:
        """Return the sampled tokens of each row, log-probabilities if all are known, sampling supports and routes."""
        sampled = self.source.sample(request)
        ids = [list(one.ids) for one in sampled]
        known = request.records and all(one.logps is not None for one in sampled)
        logprobs = [list(one.logps or ()) for one in sampled] if known else None
        fill_empty(ids, logprobs, self.tokenizer.eos_token_id)
        supports = [one.support for one in sampled if one.support is not None and request.supports]
        return ids, logprobs, supports, [one.routes for one in sampled if one.routes is not None]

    def _sampled(self, request: RolloutRequest) -> RolloutBatch:
        ids, logprobs, supports, routes = self.sampled(request)
        texts = self._texts(request.prompts, request.prompt_ids, ids)
        generated = Generated(request.prompt_ids, ids, None, texts, logprobs, {}, request.images, [])
        rows, images = list(request.rows), list(request.seen)
        return RolloutBatch(rows, request.attempts, request.prompts, generated, supports, routes, images=images)

    def _played(self, request: RolloutRequest, episode_runner: EpisodeRunner) -> RolloutBatch:
        renderer = Renderer(self.processing_class, self.options, self.image_obstacle)
        with self.source.turns(request) as engine:
            rows = request.rows, request.attempts
            played = episode_runner.play(*rows, engine, self.limits, renderer, self.waiting)
        trajectories = [trajectory for trajectory, _ in played]
        columns = batch(trajectories, self.ends, logprobs=False)
        fill_empty(columns.completion_ids, None, self.tokenizer.eos_token_id)
        texts = self._texts(request.prompts, columns.prompt_ids, columns.completion_ids)
        lists = columns.prompt_ids, columns.completion_ids, columns.tool_mask
        seen, extra = completions_seen(trajectories, texts), {COLUMN: trajectories}
        generated = Generated(*lists, seen, None, extra, None, [])
        supports = supports_of(trajectories) if request.supports else []
        return RolloutBatch(list(request.rows), request.attempts, request.prompts, generated, supports, played=played)

    def _texts(self, prompts: Sequence[Any], prompt_ids: list[list[int]], ids: list[list[int]]) -> list[Any]:
        """Decode completions as TRL does."""
        conversational = is_conversational({"prompt": prompts[0]})
        if conversational and splits_reasoning(self.tokenizer):
            pairs = zip(ids, prompt_ids, strict=True)
            return [[parse_response(self.tokenizer, one, prefix=prompt, tools=[])] for one, prompt in pairs]
        texts = self.processing_class.batch_decode(ids, skip_special_tokens=True)
        return [[{"role": "assistant", "content": text}] for text in texts] if conversational else list(texts)


def columns_of(
    rows: Sequence[Row],
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[list[int]],
    state: TrainerState,
    environments: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """Return what TRL passes to a reward function, without callbacks."""
    of_rows = {name: [row[name] for row in rows] for name in rows[0] if name not in _NOT_COLUMNS}
    batch_of = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    of_trl = {} if environments is None else {"environments": environments}
    return {**of_rows, **batch_of, "trainer_state": state, **of_trl}


class Submitted(NamedTuple):
    """The background's results for a request; each future gets its result, or the exception that ended it."""

    completed: Future[RolloutBatch]
    """Completions without scores."""
    finished: Future[RolloutBatch]

    def made(self) -> RolloutBatch | None:
        """Return what is there by now: completions with scores, or without; None if there are no completions."""
        ended = (future for future in (self.finished, self.completed) if future.done() and not future.exception())
        return next((future.result() for future in ended), None)


def done(result: RolloutBatch) -> Submitted:
    """Return the results of a request that was finished before."""
    future: Future[RolloutBatch] = Future()
    future.set_result(result)
    return Submitted(future, future)


class Asked(NamedTuple):
    """A request with the state that its reward functions see."""

    request: RolloutRequest
    state: TrainerState


class BackgroundWorker:
    """Two threads: one completes requests, the other scores what is complete, both in the order of the requests.

    The second waits for the first, which waits for the sampler and for environments. Neither waits for the main
    thread.
    """

    def __init__(self, worker: RolloutWorker) -> None:
        self.worker = worker
        self._completing = Background(worker.complete)
        self._scoring: Background[tuple[Asked, Future[RolloutBatch]], RolloutBatch] = Background(self._scored)

    def _scored(self, queued: tuple[Asked, Future[RolloutBatch]]) -> RolloutBatch:
        (request, state), completed = queued
        rollouts = completed.result()
        began, generated = time.monotonic(), rollouts.generated
        assert generated is not None
        rows = [dict(row) for row in request.rows]
        for row, (trajectory, _) in zip(rows, rollouts.played, strict=False):
            row[COLUMN] = trajectory
        columns = columns_of(rows, request.prompts, generated.completions, generated.completion_ids, state)
        scored = self.worker.score(columns)
        return replace(rollouts, scored=scored, seconds=rollouts.seconds + time.monotonic() - began)

    def submit(self, asked: Asked, made: RolloutBatch | None = None) -> Submitted:
        """Queue a request, or only the scoring of completions that were `made` before."""
        completed = self._completing.submit(asked.request) if made is None else done(made).completed
        return Submitted(completed, self._scoring.submit((asked, completed)))

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
