"""`Collector`: from the dataset's rows to one generation, sampled or played, now or ahead of training, and scored.

TRL's hooks for a prompt's tokens, a turn, and rewards stay the trainer's, so that a subclass may replace them. They
pass what they get to the methods here, some with TRL's own as `stock`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from grpo_ext.config.process_engine import samples_by_server
from grpo_ext.config.temporary import temporarily
from grpo_ext.data.pictures import with_images
from grpo_ext.environments.engine import TurnEngine
from grpo_ext.environments.rendering import Renderer
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.objective.trajectory import COLUMN
from grpo_ext.rewards.containment import Scored
from grpo_ext.rewards.outcomes import Scores
from grpo_ext.rollout.collected import Collected, Generated
from grpo_ext.rollout.dynamic_sampling import DynamicSampler
from grpo_ext.rollout.process.policy import process_sampler
from grpo_ext.rollout.samplers import PolicySampler, Sampled, Sampler, failing_together
from grpo_ext.rollout.seeds import AttemptId
from grpo_ext.rollout.seeing import Tokenized, each_alone, images_in
from grpo_ext.rollout.trajectories import completions_seen, fill_empty
from grpo_ext.rollout.transformers_engine import transformers_sampler
from grpo_ext.rollout.turn_engines import ServerEngine, WaveEngine
from grpo_ext.trainer import tool_environments
from grpo_ext.trainer.acting import Acting, Played, limits_of
from grpo_ext.trainer.ahead import RolloutsAhead
from grpo_ext.trainer.in_flight import InFlight
from grpo_ext.trainer.reference import moved
from grpo_ext.trainer.reward_collector import RewardCollector
from grpo_ext.trainer.seeing import check_fields, check_seen, images_of_tools


class Collector:
    """Makes the generations of a trainer.

    Args:
        trainer: the trainer, whose hooks it calls.
        own: the policy as its own sampler, or vLLM with its present weights.
        beside: the sampler that runs beside training: a process, or a vLLM server.
        rewards: the rewards.
        acting: environments.
        ahead: samples by older weights, for `rollout_ahead`.
        dynamic: replaces groups without a signal, for `dynamic_sampling`.
    """

    def __init__(
        self,
        trainer: Any,
        own: PolicySampler,
        beside: Sampler | None,
        rewards: RewardCollector,
        acting: Acting | None = None,
        ahead: RolloutsAhead | None = None,
        dynamic: DynamicSampler | None = None,
    ) -> None:
        self.trainer, self.own, self.beside, self.rewards = trainer, own, beside, rewards
        self.acting, self.ahead, self.dynamic = acting, ahead, dynamic
        self._current: Collected | None = None

    @property
    def age(self) -> int:
        """Return by how many windows the weights that sampled the generation are older than the policy's."""
        return 0 if self.ahead is None else self.ahead.age

    def generation(self, rows: list[dict[str, Any]]) -> Collected:
        """Return the next generation of the trainer, in training or evaluation; collective."""
        trainer, training = self.trainer, self.trainer.model.training
        attempts = trainer.attempt_ids(len(rows))
        with self.ahead.taking(rows) if self.ahead is not None and training else nullcontext():
            if self.dynamic is None or not training:
                return self.collect(rows, attempts)
            weights, group = trainer.reward_weights, trainer.num_generations
            silent = partial(trainer._credit.silent_groups, weights=weights, group=group)
            return self.dynamic.settle(rows, attempts, self.collect, silent, trainer._metrics["train"])

    def collect(self, rows: list[dict[str, Any]], attempts: Sequence[AttemptId]) -> Collected:
        """Generate and score a completion for each row; each process needs as many rows."""
        collected, logs = self.rollouts(rows, attempts), self.trainer._pending_extra_logs
        made = collected.generated
        assert made is not None
        logs.clear()
        with temporarily(self, _current=collected):
            given = collected.rows, collected.prompts, made.completions, made.completion_ids
            collected.rewards = self.trainer._calculate_rewards(*given).cpu()
        logs.clear()
        return collected

    def rollouts(self, rows: list[dict[str, Any]], attempts: Sequence[AttemptId]) -> Collected:
        """Generate a completion for each row; each process may have its own rows.

        Args:
            rows: of a dataset.
            attempts: identity of each row's attempt; seeds of environments and their turns come from it.
        """
        prompts = tool_environments.begin(self.trainer, rows, [with_images(row) for row in rows])
        ready = None if self.ahead is None else self.ahead.finished(attempts)
        collected = Collected(rows, attempts, prompts, ready=ready)
        with temporarily(self, _current=collected):  # the hooks fill it
            collected.generated = Generated(*self.trainer._generate(prompts))
        extra = collected.generated.extra
        added = [{k: v[i] if isinstance(v, list) else v for k, v in extra.items()} for i in range(len(rows))]
        collected.rows = [{**row, **columns} for row, columns in zip(rows, added, strict=True)]
        return collected

    # What the trainer's hooks do.

    def tokenized(self, stock: Callable[[list], Tokenized], prompts: list) -> Tokenized:
        """Tokenize as TRL does; where there are images, each prompt by itself, so that a row's tensors are known."""
        if not any(map(images_in, prompts)):
            return stock(prompts)
        check_seen(self.trainer, prompts)
        tokenized, rows = each_alone(stock, prompts)
        check_fields(rows, self.trainer._scorer.multimodal)
        if self._current is not None:
            self._current.images = rows
        return tokenized

    def generated(self, stock: Callable[[list], Any], prompts: list) -> Generated:
        """Generate as TRL does, by the sampler of this trainer, and look at what came.

        Raises:
            ConfigError: a rollout function left out the log-probabilities that the loss needs, or a tool returned
                an image.
        """
        trainer, collected = self.trainer, self._current or Collected([])
        if trainer.use_vllm and self.beside is not None and trainer.model.training:
            trainer._last_loaded_step = trainer.state.global_step  # TRL would push below running requests
        with trainer._times.during("rollout"), trainer._sampling():
            generated = Generated(*stock(prompts))
        needed = trainer._sampler_corrected or (trainer.use_vllm and trainer.args.old_logps == "sampler")
        if needed and generated.logprobs is None:
            reason = "it returned no logprobs, to which the loss with use_vllm: true takes its ratio"
            cure = "Return vLLM's log-probability of each token, or set vllm_importance_sampling_correction: false"
            cure += " and leave old_logps unset."
            raise ConfigError([Problem("rollout_func", ABSENT, reason, cure)])
        if trainer._evaluated is not None:
            ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
            trainer._evaluated.add_completions(
                generated.completion_ids, generated.tool_mask, ends, trainer.accelerator
            )
        if (trajectories := generated.extra.get(COLUMN)) is not None:
            generated = generated._replace(completions=completions_seen(trajectories, generated.completions))
        if any(generated.tool_images):
            raise ConfigError([images_of_tools()])
        collected.generated = generated
        first = generated.prompt_ids, generated.completion_ids, collected.images
        adapted = moved(trainer._unwrapped) if isinstance(trainer.model, PeftModel) else None
        trainer._scorer.choose_way(trainer.model, *first, trainer._tokenizer.pad_token_id, adapted)
        return generated

    def turn(
        self,
        contexts: list[list[int]],
        fields: Mapping[str, Any],
        group: int,
        *,
        has_tool_images: bool,
    ) -> tuple[list[list[int]], Any]:
        """Sample a completion after each context: from what is ready, beside the training, or by the policy itself.

        Arguments and result are those of TRL's `_generate_single_turn`, which a tool's answer calls once more.
        """
        if has_tool_images:
            raise ConfigError([images_of_tools()])
        collected, training = self._current, self.trainer.model.training
        if collected is not None and (ready := collected.ready) is not None:
            collected.kept = list(ready.kept)
            return [list(ids) for ids in ready.completion_ids], ready.logprobs
        made = self._sampled(contexts, fields, group)
        completion_ids = [row.ids for row in made]
        known = all(row.logps is not None for row in made) and (training or self.trainer.use_vllm)
        logprobs = [row.logps for row in made] if known else None
        if collected is not None and training:
            collected.kept = [row.kept for row in made if row.kept is not None]
        fill_empty(completion_ids, logprobs, self.trainer._tokenizer.eos_token_id)
        return completion_ids, logprobs

    def _sampled(self, contexts: list[list[int]], fields: Mapping[str, Any], group: int) -> list[Sampled]:
        """Sample beside the training, each attempt with its own random numbers, or by the policy itself."""
        collected, limits = self._current, [self.own.limit] * len(contexts)
        if self.beside is None or not self.trainer.model.training or collected is None:
            self._push()
            return self.own.sample(contexts, limits, fields=fields, group=group)
        streams = [attempt.stream() for attempt in collected.attempts]
        version = self._published(self.beside)
        with failing_together():
            return self.beside.sample(version, contexts, limits, streams)

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

    def play(self, prompts: list, trainer: object) -> dict[str, Any]:
        """Play conversations with environments; TRL's `rollout_func`."""
        assert self.acting is not None
        assert self._current is not None
        ready = self._current.ready
        played = self._played(self.acting, self._current) if ready is None else ready.played
        metrics = self.trainer._metrics["train" if self.trainer.model.training else "eval"]
        records = self.acting.records(played)
        for name, value in self.acting.figures(records, warns=self.trainer.accelerator.is_main_process).items():
            metrics[name].append(value)
        if self.trainer.model.training:
            self.acting.note_losses(records)
        return {"trajectories": [trajectory for trajectory, _ in played]}

    def _played(self, acting: Acting, collected: Collected) -> Played:
        trainer, limits = self.trainer, limits_of(self.trainer)
        renderer = Renderer(trainer._tokenizer, trainer.chat_template_kwargs)
        waiting = partial(trainer._times.during, "environments")
        with failing_together(), self._turns(collected.attempts) as engine:
            return acting.play(collected.rows, collected.attempts, engine, limits, renderer, waiting)

    @contextmanager
    def _turns(self, attempts: Sequence[AttemptId]) -> Iterator[TurnEngine]:
        """Return what samples the turns of conversations."""
        trainer, args, own = self.trainer, self.trainer.args, self.own
        step, in_turn = int(trainer.state.global_step), args.environment_waves == "turn"
        if self.beside is not None and trainer.model.training:
            sample = partial(self.beside.sample, self._published(self.beside))
            yield WaveEngine(sample, step, attempts, waits=in_turn)
            return
        self._push()
        if not in_turn and args.use_vllm and args.vllm_mode == "server" and not own.together:
            yield ServerEngine(trainer.vllm_generation, step, attempts)
            return
        waits = in_turn or own.together or not own.takes_streams
        yield WaveEngine(own.sample, step, attempts, waits=waits, together=own.together)

    def rewarded(
        self,
        stock: Callable[..., Tensor],
        rows: list[dict[str, Any]],
        prompts: list,
        completions: list,
        completion_ids: list[list[int]],
    ) -> Tensor:
        """Score completions as TRL does, or take the scores that are ready.

        Raises:
            RewardError: a reward failed, on any process.
            NonFiniteError: a reward returned NaN or inf, and the run is to stop.
        """
        trainer, collected = self.trainer, self._current or Collected(rows)
        collected.scored_ids = completion_ids
        self.rewards.schedule_weights(trainer.reward_weights, trainer.state)
        with temporarily(self, _current=collected), trainer._times.during("rewards"):
            rewards = stock(rows, prompts, completions, completion_ids)
        rewards = self.rewards.checked(rewards, collected.errors, prompts, completions)
        if self.acting is not None:
            played = [row[COLUMN] for row in rows]
            unscored = self.acting.unscored(played, rewards.shape[1]).to(rewards.device)
            rewards = rewards.masked_fill(trainer.accelerator.gather(unscored), torch.nan)
            for name, values in self.acting.columns(played).items():
                trainer._pending_extra_logs[name].extend(values)
        collected.rewards, collected.turn_rewards = rewards, self.rewards.turn_rewards(collected, len(completions))
        collected.logged = {name: list(values) for name, values in trainer._pending_extra_logs.items()}
        return rewards

    def ready_scores(self, name: str, columns: Mapping[str, Any]) -> Scores | None:
        """Return the scores of a reward if the background has scored these completions, and log what it logged."""
        ready = None if self._current is None else self._current.ready
        given = columns.get("completions"), columns.get("completion_ids")
        if ready is None or given != (ready.completions, ready.completion_ids):
            return None
        scored: Scored | None = ready.scored.get(name)  # a script that resumes may have another reward
        return None if scored is None else scored.replayed(columns)

    def take_scores(self, name: str, scores: Scores) -> None:
        """Keep what a reward returned beside its numbers."""
        if self._current is not None:
            self._current.turns_by_reward[name] = scores.turns
            self._current.errors += [scores.error] if scores.error else []

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
        if self.beside is None:
            return nullcontext()
        self.trainer._last_loaded_step = -1  # TRL then pushes the present weights
        return self.beside.paused()

    def close(self) -> None:
        """End the processes beside this one, which would wait for the next batch; let other runs have the server."""
        trainer = self.trainer
        if self.ahead is not None:
            self.ahead.close()
        for processes in (self.acting, self.rewards.runtime, self.beside):
            if processes is not None:
                processes.close()
        engine = getattr(trainer, "vllm_generation", None)
        if engine is not None and trainer.args.vllm_mode == "server" and trainer.accelerator.is_main_process:
            engine.vllm_client.release()


def collector_of(trainer: Any, rewards: RewardCollector, acting: Acting | None) -> Collector:
    """Return the collector of a trainer, with the samplers of its settings."""
    args, dynamic = trainer.args, None
    own: PolicySampler = trainer.vllm_generation if args.use_vllm else transformers_sampler(trainer, args)
    beside: Sampler | None = process_sampler(trainer, args)
    if samples_by_server(args):
        from grpo_ext.rollout.vllm.sampler import ServerSampler  # with vLLM

        beside = ServerSampler(trainer.vllm_generation)
    if args.dynamic_sampling is not None:
        dynamic = DynamicSampler(
            args,
            trainer.train_dataset,
            trainer.reward_func_names,
            trainer.num_generations,
            stateful=bool(trainer.tools) or trainer.environment_factories is not None,
            accelerator=trainer.accelerator,
        )
    ahead = RolloutsAhead(trainer, beside) if args.rollout_ahead and beside is not None else None
    return Collector(trainer, own, beside, rewards, acting, ahead, dynamic)
