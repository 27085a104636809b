"""`Collector`: from the dataset's rows to a batch of rollouts: now or ahead of training, and scored."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import InitVar, dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from grpo_ext.config.temporary import temporarily
from grpo_ext.config.truncation import scores_over_support
from grpo_ext.environments.engine import TurnEngine
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.objective.trajectory import COLUMN, Turn, batch
from grpo_ext.rewards.outcomes import Scores
from grpo_ext.rollout.dynamic_sampling import DynamicSampler
from grpo_ext.rollout.images import Alone, Tokenized, each_alone, fields_of, with_images_of
from grpo_ext.rollout.rollout_batch import Generated, RolloutBatch
from grpo_ext.rollout.samplers import PolicySampler, Sampled, Sampler, failing_together
from grpo_ext.rollout.seeds import AttemptId
from grpo_ext.rollout.trajectories import completions_seen, fill_empty, known_everywhere, supports_of, turns_of_row
from grpo_ext.rollout.turn_engines import Images, ServerEngine, WaveEngine
from grpo_ext.trainer.ahead import RolloutsAhead
from grpo_ext.trainer.callbacks import StepTimes
from grpo_ext.trainer.in_flight import InFlight
from grpo_ext.trainer.input_checks import check_fields
from grpo_ext.trainer.log import Log
from grpo_ext.trainer.reward_collector import RewardCollector
from grpo_ext.trainer.rollout_worker import Hooks, RolloutRequest, RolloutWorker, Source, columns_of

Row = dict[str, Any]


@dataclass
class Collector:
    """Makes the generations of a trainer.

    Attributes:
        log: its log, which knows whether it trains or evaluates.
        policy: the policy as its own sampler, or vLLM with its present weights.
        inference_engine: the sampler that runs beside training: a process, or a vLLM server.
        dynamic: replaces groups without a signal, for `dynamic_sampling`.
        zero_advantages: returns the groups without a signal.
        ahead: samples by older weights, for `rollout_ahead`.
        worker: of this thread, which samples by the collector.
    """

    hooks: Hooks
    log: Log
    times: StepTimes
    policy: PolicySampler
    inference_engine: Sampler | None
    rewards: RewardCollector
    dynamic: DynamicSampler | None
    zero_advantages: Callable[[RolloutBatch], Tensor]
    made: InitVar[Callable[[Source], RolloutWorker]]
    ahead: RolloutsAhead | None = None
    _current: RolloutBatch | None = None

    def __post_init__(self, made: Callable[[Source], RolloutWorker]) -> None:
        self.worker = made(self)
        self.episode_runner = self.worker.episode_runner
        self.wants_supports = scores_over_support(self.hooks.args)
        if self.hooks.args.rollout_ahead and self.inference_engine is not None:
            runtime = self.rewards.runtime
            self.ahead = RolloutsAhead(self.hooks, self.inference_engine, self.worker, runtime, self.times)

    @property
    def age(self) -> int:
        """Return by how many generations the weights that sampled the generation are older than the policy's."""
        return 0 if self.ahead is None else self.ahead.age

    def generation(self, rows: list[Row]) -> RolloutBatch:
        """Return the next generation of the trainer, in training or evaluation; collective."""
        training, attempts = self.log.is_training(), self.hooks.attempt_ids(len(rows))
        with self.ahead.taking(rows) if self.ahead is not None and training else nullcontext():
            if self.dynamic is None or not training:
                return self.collect(rows, attempts)
            return self.dynamic.settle(rows, attempts, self.collect, self.zero_advantages, self.log.figures["train"])

    def collect(self, rows: list[Row], attempts: Sequence[AttemptId]) -> RolloutBatch:
        """Generate and score a completion for each row; each process needs as many rows."""
        rollouts = self.rollouts(rows, attempts)
        generated = rollouts.generated
        assert generated is not None
        with temporarily(self, _current=rollouts):
            columns = rollouts.rows, rollouts.prompts, generated.completions, generated.completion_ids
            rollouts.rewards = self.hooks._calculate_rewards(*columns).cpu()
        return rollouts

    def rollouts(self, rows: list[Row], attempts: Sequence[AttemptId]) -> RolloutBatch:
        """Generate a completion for each row, each process for its own; `attempts` give the seeds."""
        prompts = self.hooks.prompts_of(rows)
        ready = None if self.ahead is None else self.ahead.finished(attempts)
        rollouts = replace(ready or RolloutBatch([]), rows=rows, attempts=attempts, prompts=prompts)
        with temporarily(self, _current=rollouts):
            generated = Generated(*self.hooks._generate(prompts))
        ahead = rollouts.generated
        if ahead is not None and not ahead.has(generated.completions, generated.completion_ids):
            rollouts.scored = {}  # a subclass has changed what was scored ahead
        rollouts.generated = generated
        added = [{k: v[i] if isinstance(v, list) else v for k, v in generated.extra.items()} for i in range(len(rows))]
        rollouts.rows = [{**row, **columns} for row, columns in zip(rows, added, strict=True)]
        return rollouts

    # What the trainer's hooks do.

    def tokenized(self, stock: Alone, prompts: list, fields: Sequence[str]) -> Tokenized:
        """Tokenize prompts with images as TRL does, but each by itself, so that the tensors of a row are known."""
        tokenized, rows = each_alone(stock, prompts)
        check_fields(rows, fields)
        if self._current is not None:
            self._current.images = rows
        return tokenized

    def completed(self, prompts: list, group: int) -> Generated:
        """Complete prompts, `group` of them in a row the same, unless that was done ahead; log figures of episodes."""
        rollouts = completed = self._current or RolloutBatch([{} for _ in prompts])
        if rollouts.generated is None:
            prompts, ids = copy.deepcopy(prompts), list[list[int]]()
            images, fields = None, dict[str, Any]()
            if self.episode_runner is None:
                ids, images, fields = self.hooks._tokenize_prompts(prompts)
            completed = self.worker.complete(self._request(rollouts, prompts, ids, fields, images, group))
        assert completed.generated is not None
        generated = completed.generated
        rollouts.supports, rollouts.routes = completed.supports, completed.routes
        rollouts.played = completed.played
        if self.episode_runner is None:
            return generated
        records = self.episode_runner.records(rollouts.played)
        self.log.add_all(self.episode_runner.figures(records, warns=self.hooks.accelerator.is_main_process))
        if self.log.is_training():
            self.episode_runner.note_losses(records)
        generated = with_images_of(completed.trajectories, generated)
        if not known_everywhere(completed.trajectories):
            return generated
        lists = batch(completed.trajectories, self.worker.ends, logprobs=True)
        fill_empty(lists.completion_ids, lists.logprobs, self.worker.tokenizer.eos_token_id)
        return generated._replace(logprobs=lists.logprobs)

    def _request(
        self,
        rollouts: RolloutBatch,
        prompts: list,
        contexts: list[list[int]],
        fields: Mapping[str, Any],
        images: list[Any] | None,
        group: int,
    ) -> RolloutRequest:
        """Return the request for rows that are completed now, beside the training or by the policy itself."""
        training, version, step = self.log.is_training(), None, int(self.hooks.state.global_step)
        if self.inference_engine is not None and training and rollouts.attempts:
            version = self._published(self.inference_engine)
        rows = rollouts.rows, prompts, contexts, rollouts.attempts
        supports, records = training and self.wants_supports, training or self.hooks.args.use_vllm
        return RolloutRequest(
            *rows, self.policy.limit, version, step, fields, images, group=group, supports=supports, records=records
        )

    def turn(
        self, contexts: list[list[int]], images: list[Any] | None, fields: Mapping[str, Any], group: int
    ) -> tuple[list[list[int]], Any]:
        """Sample a completion after each context for TRL's loop, which a tool's answer calls once more.

        Arguments and result are those of TRL's `_generate_single_turn`; `fields` may be left out for images.
        """
        fields = fields or self._fields(contexts, images)
        rollouts = self._current or RolloutBatch([])
        if (generated := rollouts.generated) is not None:  # ahead of training
            return [list(ids) for ids in generated.completion_ids], generated.logprobs
        request = self._request(rollouts, [], contexts, fields, images, group)
        completion_ids, logprobs, supports, _ = self.worker.sampled(request)
        seen = images or [None] * len(contexts)
        for context, ids, support, of_row in zip(contexts, completion_ids, supports, seen, strict=False):
            rollouts.turns.append(Turn(context, ids, support=support, images=of_row or []))
        return completion_ids, logprobs

    def _fields(self, contexts: list[list[int]], images: Sequence[Any] | None) -> dict[str, Any]:
        """Return the inputs that transformers reads beside the tokens of rows with images."""
        if not any(images or ()) or self.hooks.args.use_vllm:
            return {}
        rows = zip(contexts, images or (), strict=True)
        return fields_of(contexts, [self.hooks.row_images(*row) for row in rows])

    def add_supports(self, generated: Generated) -> None:
        """Note the sampling supports of the completions that TRL's loop has made of the turns."""
        rollouts = self._current
        if rollouts is not None and rollouts.turns:
            images = generated.images or [None] * len(generated.prompt_ids)
            rows = zip(generated.prompt_ids, generated.completion_ids, images, strict=True)
            rollouts.supports = supports_of([turns_of_row(*row, rollouts.turns) for row in rows])

    def add_images(self, generated: Generated) -> None:
        """Note the images of rows to which tools or environments have added some.

        Raises:
            ConfigError: cut completions are left out of the attention, so that their images have no place.
        """
        added = generated.images if self.episode_runner else generated.tool_images
        if self._current is None or not any(added or ()):
            return
        if self.hooks.args.mask_truncated_completions and any(generated.tool_images):
            reason = "a tool or an environment returned an image, and completions that are cut short are hidden"
            reason += " from the model with theirs"
            raise ConfigError([Problem("mask_truncated_completions", True, reason, "Unset it, or return text.")])
        rows = zip(generated.prompt_ids, generated.completion_ids, generated.images or (), strict=True)
        self._current.images = [self.hooks.row_images(prompt + ids, images) for prompt, ids, images in rows]

    # The source of the worker that runs in this thread.

    def sample(self, request: RolloutRequest) -> list[Sampled]:
        """Sample beside the training, each attempt with its own random numbers, or by the policy itself."""
        limits = [request.limit] * len(request.prompt_ids)
        if request.version is None:
            self.hooks.push_weights()
            fields, images, group = request.fields, request.images, request.group
            return self.policy.sample(request.prompt_ids, limits, fields=fields, images=images, group=group)
        assert self.inference_engine is not None
        streams = [attempt.stream() for attempt in request.attempts]
        with failing_together():
            rows = request.prompt_ids, limits, streams, request.images
            return self.inference_engine.sample(request.version, *rows)

    @contextmanager
    def turns(self, request: RolloutRequest) -> Iterator[TurnEngine]:
        """Return what samples the turns of conversations."""
        with failing_together():
            yield self._engine(request)

    def _engine(self, request: RolloutRequest) -> TurnEngine:
        args, policy, attempts = self.hooks.args, self.policy, request.attempts
        in_turn = args.environment_waves == "turn"
        if request.version is not None:
            assert self.inference_engine is not None
            sample = partial(self.inference_engine.sample, request.version)
            return WaveEngine(sample, request.step, attempts, waits=in_turn)
        self.hooks.push_weights()
        if not in_turn and args.use_vllm and args.vllm_mode == "server" and not policy.collective:
            return ServerEngine(cast(Any, policy), request.step, attempts)
        waits = in_turn or policy.collective or not policy.takes_streams
        return WaveEngine(self._wave, request.step, attempts, waits=waits, collective=policy.collective)

    def _wave(
        self, contexts: list[list[int]], limits: list[int], streams: Sequence[np.random.Generator], images: Images
    ) -> list[Sampled]:
        fields = self._fields(contexts, images)
        return self.policy.sample(contexts, limits, streams, fields=fields, images=images)

    def _published(self, sampler: Sampler) -> int:
        """Return the version that samples now: the generation's, or the present weights, published if they are new."""
        if self.ahead is not None and (version := self.ahead.version()) is not None:
            return version
        step = int(self.hooks.state.global_step)
        if step not in sampler.versions:
            with self.times.during("weight_push"):
                for version in sampler.versions:
                    sampler.forget(version)
                sampler.publish(step)
        return step

    # Rewards.

    def rewarded(
        self, rows: list[Row], prompts: list[Any], completions: list[Any], completion_ids: list[list[int]]
    ) -> Tensor:
        """Return the rewards of all processes, [completions, functions]: by all functions, unless they are ready.

        Raises:
            RewardError: a reward failed, on any process.
            NonFiniteError: a reward returned NaN or inf, and the run is to stop.
        """
        state, rollouts = self.hooks.state, self._current or RolloutBatch(rows)
        generated, rollouts.scored_ids = rollouts.generated, completion_ids
        self.rewards.schedule_weights(state)
        unchanged = generated is not None and generated.has(completions, completion_ids)
        columns = columns_of(rows, prompts, completions, completion_ids, state, self.hooks.environments)
        with self.times.during("rewards"):
            scored = self.worker.score(columns, rollouts.scored if unchanged else {})
            rewards = self.hooks.accelerator.gather(self.rewards.values(scored, prompts, completions))
        errors = [scores.error for scores in scored.values() if scores.error]
        rewards = self.rewards.checked(rewards, errors, prompts, completions)
        rollouts.logged = self._logged(scored)
        if self.episode_runner is not None:
            played = [row[COLUMN] for row in rows]
            unscored = self.episode_runner.unscored(played, rewards.shape[1]).to(rewards.device)
            rewards = rewards.masked_fill(self.hooks.accelerator.gather(unscored), torch.nan)
            rollouts.logged |= self.episode_runner.columns(played)
        rollouts.rewards, rollouts.turn_rewards = rewards, self.rewards.turn_rewards(scored, len(rows))
        return rewards

    def _logged(self, scored: Mapping[str, Scores]) -> dict[str, list[Any]]:
        """Return the columns that rewards have logged, and log their figures."""
        columns = defaultdict[str, list[Any]](list)
        for scores in scored.values():
            for name, values in scores.extras:
                columns[name].extend(values)
            for name, value in scores.metrics:
                self.log.of_rewards[name].append(value)
        return dict(columns)

    # Before training, beside an evaluation, and at the end.

    def reset(self) -> None:
        """Begin with the first generation and the first fresh prompt."""
        if self.dynamic is not None:
            self.dynamic.prompts.drawn = 0
        if self.ahead is not None:
            self.ahead.kept = InFlight()

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which what samples beside the training is free for an evaluation."""
        if self.ahead is not None:
            self.ahead.wait()
        return nullcontext() if self.inference_engine is None else self.inference_engine.paused()

    def close(self) -> None:
        """End the processes beside this one, which would wait for the next batch; let other runs have the server."""
        if self.ahead is not None:
            self.ahead.close()
        for processes in (self.episode_runner, self.rewards.runtime, self.inference_engine):
            if processes is not None:
                processes.close()
        args = self.hooks.args
        if args.use_vllm and args.vllm_mode == "server" and self.hooks.accelerator.is_main_process:
            cast(Any, self.policy).vllm_client.release()


def usable(generated: Generated, *, needs_logprobs: bool) -> Generated:
    """Return what TRL's loop or a user's rollout function has generated, with the completions of its trajectories.

    Raises:
        ConfigError: it left out the log-probabilities that the loss needs.
    """
    if needs_logprobs and generated.logprobs is None:
        reason = "it returned no logprobs, to which the loss with use_vllm: true takes its ratio"
        cure = "Return vLLM's log-probability of each token, or set vllm_importance_sampling_correction: false"
        cure += " and leave old_logps unset."
        raise ConfigError([Problem("rollout_func", ABSENT, reason, cure)])
    if (trajectories := generated.extra.get(COLUMN)) is not None:
        generated = generated._replace(completions=completions_seen(trajectories, generated.completions))
    return generated
