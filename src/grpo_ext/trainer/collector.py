"""`Collector`: from the dataset's rows to a batch of rollouts: now or ahead of training, and scored.

TRL's hooks for a prompt's tokens, a generation and rewards stay the trainer's, so that a subclass may replace them.
Each is called once. Where TRL's own loop completes rows (tools, a `rollout_func`, a subclass's turns), it asks for
each turn by the trainer's `_generate_single_turn`.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import Trainer
from trl.data_utils import apply_chat_template, is_conversational
from trl.extras.profiling import profiling_context

from grpo_ext.config.process_engine import samples_by_server
from grpo_ext.config.temporary import temporarily
from grpo_ext.config.truncation import scores_kept_sets
from grpo_ext.data.images import with_images
from grpo_ext.environments.engine import TurnEngine
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.objective.trajectory import COLUMN, Turn, batch
from grpo_ext.rewards.outcomes import Scores
from grpo_ext.rollout.dynamic_sampling import DynamicSampler
from grpo_ext.rollout.images import Tokenized, each_alone, images_in
from grpo_ext.rollout.process.policy import process_sampler
from grpo_ext.rollout.rollout_batch import Generated, RolloutBatch
from grpo_ext.rollout.samplers import PolicySampler, Sampled, Sampler, failing_together
from grpo_ext.rollout.seeds import AttemptId
from grpo_ext.rollout.trajectories import (
    completions_seen,
    fill_empty,
    known_everywhere,
    supports_of,
    turns_of_row,
)
from grpo_ext.rollout.transformers_engine import transformers_sampler
from grpo_ext.rollout.turn_engines import ServerEngine, WaveEngine
from grpo_ext.trainer import tool_environments
from grpo_ext.trainer.ahead import RolloutsAhead
from grpo_ext.trainer.episodes import EpisodeRunner, limits_of
from grpo_ext.trainer.in_flight import InFlight
from grpo_ext.trainer.input_checks import check_fields, check_seen, images_of_tools
from grpo_ext.trainer.reference import moved
from grpo_ext.trainer.reward_collector import RewardCollector
from grpo_ext.trainer.rollout_worker import Asked, RolloutRequest, columns_of, worker_of

Row = dict[str, Any]


class Collector:
    """Makes the generations of a trainer.

    Args:
        trainer: the trainer, whose hooks it calls.
        policy: the policy as its own sampler, or vLLM with its present weights.
        inference_engine: the sampler that runs beside training: a process, or a vLLM server.
        rewards: the rewards.
        episode_runner: environments.
        ahead: samples by older weights, for `rollout_ahead`.
        dynamic: replaces groups without a signal, for `dynamic_sampling`.
    """

    def __init__(
        self,
        trainer: Any,
        policy: PolicySampler,
        inference_engine: Sampler | None,
        rewards: RewardCollector,
        episode_runner: EpisodeRunner | None = None,
        ahead: RolloutsAhead | None = None,
        dynamic: DynamicSampler | None = None,
    ) -> None:
        self.trainer, self.policy, self.inference_engine, self.rewards = trainer, policy, inference_engine, rewards
        self.episode_runner, self.ahead, self.dynamic = episode_runner, ahead, dynamic
        self._current: RolloutBatch | None = None
        timed = partial(profiling_context, trainer)

        def waiting() -> AbstractContextManager[None]:
            return trainer._times.during("environments")

        self.worker = worker_of(trainer, self, rewards.scorers, copies=False, waiting=waiting, timed=timed)

    @property
    def age(self) -> int:
        """Return by how many windows the weights that sampled the generation are older than the policy's."""
        return 0 if self.ahead is None else self.ahead.age

    @property
    def proximal_share(self) -> float:
        """Return alpha of `sampler_correction.interpolated` for the present step of the window."""
        trainer, size = self.trainer, self.trainer.args.gradient_accumulation_steps
        before, since = self.age * trainer._uses, trainer._step % trainer._uses // size * size
        return before / (before + since) if before else 0.0

    def generation(self, rows: list[Row]) -> RolloutBatch:
        """Return the next generation of the trainer, in training or evaluation; collective."""
        trainer, training = self.trainer, self.trainer.model.training
        attempts = trainer.attempt_ids(len(rows))
        with self.ahead.taking(rows) if self.ahead is not None and training else nullcontext():
            if self.dynamic is None or not training:
                return self.collect(rows, attempts)
            weights, group = trainer.reward_weights, trainer.num_generations
            silent = partial(trainer._advantages.silent_groups, weights=weights, group=group)
            return self.dynamic.settle(rows, attempts, self.collect, silent, trainer._metrics["train"])

    def collect(self, rows: list[Row], attempts: Sequence[AttemptId]) -> RolloutBatch:
        """Generate and score a completion for each row; each process needs as many rows."""
        found = self.rollouts(rows, attempts)
        made = found.generated
        assert made is not None
        with temporarily(self, _current=found):
            given = found.rows, found.prompts, made.completions, made.completion_ids
            found.rewards = self.trainer._calculate_rewards(*given).cpu()
        return found

    def rollouts(self, rows: list[Row], attempts: Sequence[AttemptId]) -> RolloutBatch:
        """Generate a completion for each row; each process may have its own rows.

        Args:
            rows: of a dataset.
            attempts: identity of each row's attempt; seeds of environments and their turns come from it.
        """
        prompts = tool_environments.begin(self.trainer, rows, [with_images(row) for row in rows])
        ready = None if self.ahead is None else self.ahead.finished(attempts)
        found = replace(ready or RolloutBatch([]), rows=rows, attempts=attempts, prompts=prompts)
        with temporarily(self, _current=found):
            made = Generated(*self.trainer._generate(prompts))
        if found.generated is not None and not found.generated.has(made.completions, made.completion_ids):
            found.scored = {}  # a subclass has changed what was scored ahead
        found.generated = made
        added = [{k: v[i] if isinstance(v, list) else v for k, v in made.extra.items()} for i in range(len(rows))]
        found.rows = [{**row, **columns} for row, columns in zip(rows, added, strict=True)]
        return found

    def asked(
        self, rows: Sequence[Row], attempts: Sequence[AttemptId], version: int, step: int | None = None
    ) -> Asked:
        """Return the request for rows that are completed and scored in the background; main thread.

        Args:
            rows: of the dataset.
            attempts: identity of each row's attempt.
            version: number of the weights that sample, as published to the sampler.
            step: optimizer steps that made these weights; by default all that have been made.
        """
        trainer, args = self.trainer, self.trainer.args
        step = trainer.state.global_step if step is None else step
        prompts = copy.deepcopy([row["prompt"] for row in rows])
        ids = [] if self.episode_runner is not None else trainer._tokenize_prompts(prompts)[0]
        limit, limits = args.max_completion_length, limits_of(trainer)
        request = RolloutRequest(
            rows, prompts, ids, attempts, limit, limits, version, step, supports=scores_kept_sets(args)
        )
        known = [row for row in trainer.state.log_history if row.get("step", 0) <= step]
        return Asked(request, replace(trainer.state, global_step=step, log_history=known))

    # What the trainer's hooks do.

    def tokenized(self, stock: Callable[[list], Tokenized], prompts: list) -> Tokenized:
        """Tokenize as TRL does; where there are images, each prompt by itself, so that a row's tensors are known."""
        if not any(map(images_in, prompts)):
            return stock(prompts)
        names = ("tools", "rollout_func", "environment_factories")
        check_seen(self.trainer.args, {name: getattr(self.trainer, name) for name in names}, prompts)
        tokenized, rows = each_alone(stock, prompts)
        check_fields(rows, self.trainer._scorer.multimodal)
        if self._current is not None:
            self._current.images = rows
        return tokenized

    def generated(self, stock: Callable[[list], Any] | None, prompts: list) -> Generated:
        """Complete prompts by the worker, or by TRL's loop if `stock` is given, and look at what came.

        Raises:
            ConfigError: a rollout function left out the log-probabilities that the loss needs, or a tool returned
                an image.
        """
        trainer, found = self.trainer, self._current or RolloutBatch([{} for _ in prompts])
        if trainer.use_vllm and self.inference_engine is not None and trainer.model.training:
            trainer._last_loaded_step = trainer.state.global_step  # TRL would push below running requests
        with trainer._times.during("rollout"), trainer._sampling():
            generated = self._completed(found, prompts) if stock is None else self._by_trl(found, stock, prompts)
        ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        if stock is None:
            trainer._log.add_lengths(generated, ends, trainer.state)
        if trainer._evaluated is not None:
            trainer._evaluated.add_completions(
                generated.completion_ids, generated.tool_mask, ends, trainer.accelerator
            )
        first = generated.prompt_ids, generated.completion_ids, found.images
        adapted = moved(trainer._unwrapped) if isinstance(trainer.model, PeftModel) else None
        trainer._scorer.choose_forward_mode(trainer.model, *first, trainer._tokenizer.pad_token_id, adapted)
        return generated

    def _by_trl(self, found: RolloutBatch, stock: Callable[[list], Any], prompts: list) -> Generated:
        """Complete prompts by TRL's loop, or a user's rollout function, which it calls."""
        trainer, generated = self.trainer, Generated(*stock(prompts))
        if found.turns:
            rows = zip(generated.prompt_ids, generated.completion_ids, strict=True)
            found.kept = supports_of([turns_of_row(*row, found.turns) for row in rows])
        needed = trainer._sampler_corrected or (trainer.use_vllm and trainer.args.old_logps != "recomputed")
        if needed and generated.logprobs is None:
            reason = "it returned no logprobs, to which the loss with use_vllm: true takes its ratio"
            cure = "Return vLLM's log-probability of each token, or set vllm_importance_sampling_correction: false"
            cure += " and leave old_logps unset."
            raise ConfigError([Problem("rollout_func", ABSENT, reason, cure)])
        if (trajectories := generated.extra.get(COLUMN)) is not None:
            generated = generated._replace(completions=completions_seen(trajectories, generated.completions))
        if any(generated.tool_images):
            raise ConfigError([images_of_tools()])
        return generated

    def _completed(self, found: RolloutBatch, prompts: list) -> Generated:
        """Complete prompts by the worker, unless that was done ahead; environments' figures are logged."""
        trainer, images, fields, made = self.trainer, None, {}, found
        if found.generated is None:
            prompts, ids = copy.deepcopy(prompts), list[list[int]]()
            if self.episode_runner is None:
                ids, images, fields = trainer._tokenize_prompts(prompts)
            group = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
            made = self.worker.complete(self._request(found, prompts, ids, fields, group))
        assert made.generated is not None
        generated, found.kept, found.played = made.generated._replace(images=images), made.kept, made.played
        if self.episode_runner is None:
            return generated
        records = self.episode_runner.records(found.played)
        trainer._log.add_all(self.episode_runner.figures(records, warns=trainer.accelerator.is_main_process))
        if trainer.model.training:
            self.episode_runner.note_losses(records)
        if not known_everywhere(made.trajectories):
            return generated
        lists = batch(made.trajectories, self.worker.ends, logprobs=True)
        fill_empty(lists.completion_ids, lists.logprobs, self.worker.eos_token_id)
        return generated._replace(logprobs=lists.logprobs)

    def _request(
        self,
        found: RolloutBatch,
        prompts: list[Any],
        contexts: list[list[int]],
        fields: Mapping[str, Any],
        group: int,
    ) -> RolloutRequest:
        """Return the request for rows that are completed now, beside the training or by the policy itself."""
        trainer, training, version = self.trainer, self.trainer.model.training, None
        if self.inference_engine is not None and training and found.attempts:
            version = self._published(self.inference_engine)
        return RolloutRequest(
            found.rows,
            prompts,
            contexts,
            found.attempts,
            self.policy.limit,
            None if self.episode_runner is None else limits_of(trainer),
            version,
            int(trainer.state.global_step),
            fields,
            group,
            supports=training and scores_kept_sets(trainer.args),
            records=training or bool(trainer.use_vllm),
        )

    def turn(
        self, contexts: list[list[int]], fields: Mapping[str, Any], group: int, *, has_tool_images: bool
    ) -> tuple[list[list[int]], Any]:
        """Sample a completion after each context for TRL's loop, which a tool's answer calls once more.

        Arguments and result are those of TRL's `_generate_single_turn`.
        """
        if has_tool_images:
            raise ConfigError([images_of_tools()])
        found = self._current or RolloutBatch([])
        if (made := found.generated) is not None:  # ahead of training
            return [list(ids) for ids in made.completion_ids], made.logprobs
        request = self._request(found, [], contexts, fields, group)
        completion_ids, logprobs, supports = self.worker.sampled(request)
        for context, ids, support in zip(contexts, completion_ids, supports, strict=False):
            found.turns.append(Turn(context, ids, support=support))
        return completion_ids, logprobs

    # The source of the worker that runs in this thread.

    def sample(self, request: RolloutRequest) -> list[Sampled]:
        """Sample beside the training, each attempt with its own random numbers, or by the policy itself."""
        limits = [request.limit] * len(request.prompt_ids)
        if request.version is None:
            self._push()
            return self.policy.sample(request.prompt_ids, limits, fields=request.fields, group=request.group)
        assert self.inference_engine is not None
        streams = [attempt.stream() for attempt in request.attempts]
        with failing_together():
            return self.inference_engine.sample(request.version, request.prompt_ids, limits, streams)

    @contextmanager
    def turns(self, request: RolloutRequest) -> Iterator[TurnEngine]:
        """Return what samples the turns of conversations."""
        with failing_together():
            yield self._engine(request)

    def _engine(self, request: RolloutRequest) -> TurnEngine:
        args, policy, attempts = self.trainer.args, self.policy, request.attempts
        in_turn = args.environment_waves == "turn"
        if request.version is not None:
            assert self.inference_engine is not None
            sample = partial(self.inference_engine.sample, request.version)
            return WaveEngine(sample, request.step, attempts, waits=in_turn)
        self._push()
        if not in_turn and args.use_vllm and args.vllm_mode == "server" and not policy.collective:
            return ServerEngine(self.trainer.vllm_generation, request.step, attempts)
        waits = in_turn or policy.collective or not policy.takes_streams
        return WaveEngine(policy.sample, request.step, attempts, waits=waits, collective=policy.collective)

    def _push(self) -> None:
        """Give vLLM the policy's weights if it has older ones."""
        trainer = self.trainer
        if trainer.use_vllm and trainer.state.global_step != trainer._last_loaded_step:
            trainer.vllm_generation.sync_weights()
            trainer._last_loaded_step = trainer.state.global_step

    def _published(self, sampler: Sampler) -> int:
        """Return the version that samples now: the window's, or the present weights, published if they are new."""
        if self.ahead is not None and (version := self.ahead.version()) is not None:
            return version
        step = int(self.trainer.state.global_step)
        if step not in sampler.versions:
            with self.trainer._times.during("weight_push"):
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
        trainer, found = self.trainer, self._current or RolloutBatch(rows)
        made, found.scored_ids = found.generated, completion_ids
        self.rewards.schedule_weights(trainer.reward_weights, trainer.state)
        unchanged = made is not None and made.has(completions, completion_ids)
        columns = columns_of(rows, prompts, completions, completion_ids, trainer.state, trainer.environments)
        with trainer._times.during("rewards"):
            scored = self.worker.score(columns, found.scored if unchanged else {})
            by_model = partial(self._by_model, prompts, completions)
            rewards = trainer.accelerator.gather(self.rewards.values(scored, by_model, len(rows)))
        errors = [scores.error for scores in scored.values() if scores.error]
        rewards = self.rewards.checked(rewards, errors, prompts, completions)
        found.logged = self._logged(scored)
        if self.episode_runner is not None:
            played = [row[COLUMN] for row in rows]
            unscored = self.episode_runner.unscored(played, rewards.shape[1]).to(rewards.device)
            rewards = rewards.masked_fill(trainer.accelerator.gather(unscored), torch.nan)
            found.logged |= self.episode_runner.columns(played)
        found.rewards, found.turn_rewards = rewards, self.rewards.turn_rewards(scored, len(rows))
        return rewards

    def _logged(self, scored: Mapping[str, Scores]) -> dict[str, list[Any]]:
        """Return the columns that rewards have logged, and log their figures."""
        columns = defaultdict[str, list[Any]](list)
        for scores in scored.values():
            for name, values in scores.extras:
                columns[name].extend(values)
            for name, value in scores.metrics:
                self.trainer._log.of_rewards[name].append(value)
        return dict(columns)

    def _by_model(self, prompts: list[Any], completions: list[Any], place: int) -> Tensor:
        """Return the scores of the reward model at a place, as TRL computes them."""
        trainer = self.trainer
        model, processing = trainer.reward_funcs[place], trainer.reward_processing_classes[place]
        both = list(zip(prompts, completions, strict=True))
        if is_conversational({"prompt": prompts[0]}):
            options, chats = trainer.chat_template_kwargs, [{"messages": prompt + text} for prompt, text in both]
            texts = [apply_chat_template(chat, processing, **options)["text"] for chat in chats]
        else:
            texts = [prompt + text for prompt, text in both]
        padded = {"return_tensors": "pt", "padding": True, "padding_side": "right", "add_special_tokens": False}
        with profiling_context(trainer, trainer.reward_func_names[place]), torch.inference_mode():
            return model(**Trainer._prepare_inputs(trainer, processing(text=texts, **padded))).logits[:, 0]

    # Before training, beside an evaluation, and at the end.

    def reset(self) -> None:
        """Begin with the first window and the first fresh prompt."""
        if self.dynamic is not None:
            self.dynamic.prompts.drawn = 0
        if self.ahead is not None:
            self.ahead.kept = InFlight()

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which what samples beside the training is free for an evaluation."""
        if self.ahead is not None:
            self.ahead.wait()
        if self.inference_engine is None:
            return nullcontext()
        self.trainer._last_loaded_step = -1  # TRL then pushes the present weights
        return self.inference_engine.paused()

    def close(self) -> None:
        """End the processes beside this one, which would wait for the next batch; let other runs have the server."""
        trainer = self.trainer
        if self.ahead is not None:
            self.ahead.close()
        for processes in (self.episode_runner, self.rewards.runtime, self.inference_engine):
            if processes is not None:
                processes.close()
        engine = getattr(trainer, "vllm_generation", None)
        if engine is not None and trainer.args.vllm_mode == "server" and trainer.accelerator.is_main_process:
            engine.vllm_client.release()


def collector_of(trainer: Any, rewards: RewardCollector, episode_runner: EpisodeRunner | None) -> Collector:
    """Return the collector of a trainer, with the samplers of its settings."""
    args, dynamic = trainer.args, None
    policy: PolicySampler = trainer.vllm_generation if args.use_vllm else transformers_sampler(trainer, args)
    engine: Sampler | None = process_sampler(trainer, args)
    if samples_by_server(args):
        from grpo_ext.rollout.vllm.sampler import ServerSampler  # with vLLM

        engine = ServerSampler(trainer.vllm_generation)
    if args.dynamic_sampling is not None:
        dynamic = DynamicSampler(
            args,
            trainer.train_dataset,
            trainer.reward_func_names,
            trainer.num_generations,
            stateful=bool(trainer.tools) or trainer.environment_factories is not None,
            accelerator=trainer.accelerator,
        )
    ahead = RolloutsAhead(trainer, engine) if args.rollout_ahead and engine is not None else None
    return Collector(trainer, policy, engine, rewards, episode_runner, ahead, dynamic)
