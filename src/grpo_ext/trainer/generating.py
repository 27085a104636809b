"""GeneratingTrainer: the hooks of TRL's GRPOTrainer that make one generation."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor

from grpo_ext.config.process_engine import samples_by_server
from grpo_ext.config.temporary import temporarily
from grpo_ext.config.truncation import OF_THE_MODEL, scores_kept_sets
from grpo_ext.data.pictures import with_images
from grpo_ext.environments.rendering import Renderer
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.objective.trajectory import COLUMN
from grpo_ext.packing.micro_batches import PARENTS, live_mask
from grpo_ext.rewards.containment import Scored
from grpo_ext.rewards.outcomes import Scores
from grpo_ext.rewards.runtime import Runtime
from grpo_ext.rollout.collected import Collected, Finished, Generated
from grpo_ext.rollout.dynamic_sampling import DynamicSampler
from grpo_ext.rollout.kept_log import Drawn, returning
from grpo_ext.rollout.process.policy import process_sampler
from grpo_ext.rollout.samplers import Sampler, failing_together
from grpo_ext.rollout.seeds import AttemptId
from grpo_ext.rollout.seeing import Tokenized, each_alone, images_in
from grpo_ext.rollout.trajectories import completed, completions_seen, fill_empty, parents_of
from grpo_ext.rollout.transformers_engine import GroupedEngine, grouped_engine
from grpo_ext.rollout.turn_engines import SamplerEngine, WaveEngine, engine_of
from grpo_ext.rollout.vllm.drift import DriftCheck
from grpo_ext.rollout.vllm.lazy_import import server_sampler
from grpo_ext.trainer import tool_environments
from grpo_ext.trainer.acting import Acting, Played, limits_of, sampling_of
from grpo_ext.trainer.batches import padded
from grpo_ext.trainer.callbacks import StepTimes
from grpo_ext.trainer.crediting import CreditingTrainer
from grpo_ext.trainer.diagnosis.recording import DRAWN
from grpo_ext.trainer.reference import moved
from grpo_ext.trainer.reward_collector import RewardCollector
from grpo_ext.trainer.sampling import correct_sampler
from grpo_ext.trainer.seeing import check_fields, check_seen, images_of_tools


class GeneratingTrainer(CreditingTrainer):
    """`trl.GRPOTrainer` that fills one `Collected` per generation."""

    acting: Acting | None
    opened: str
    reward_runtime: Runtime | None
    _collecting: Collected | None = None
    """The generation that TRL's hooks fill at the moment."""
    _age = 0
    """Generations by which the weights that sampled a generation are older than the policy's."""
    _beside: Sampler | None
    """The sampler that runs beside training: a process, or a vLLM server."""
    _engine: GroupedEngine | None
    _older: bool
    """Whether completions are of older weights."""
    _pending_extra_logs: Any
    _rewards: RewardCollector
    _times: StepTimes
    model_wrapped: Any
    use_vllm: bool
    _unwrapped: Any
    _last_loaded_step: int
    vllm_importance_sampling_correction: bool

    def _set_up_rollouts(self) -> None:
        """Choose what generates completions, and guard a rollout function."""
        args = self.args
        if self.acting is not None:
            self.rollout_func = self._play
        if self.rollout_func is not None:
            ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
            self.rollout_func = completed(self.rollout_func, ends, self._tokenizer.eos_token_id)
        self._engine = grouped_engine(args, sharded=self.is_fsdp_enabled)
        self._older = args.rollout_ahead > 0
        self._beside = process_sampler(self, args)
        if samples_by_server(args):
            self._beside = server_sampler(self.vllm_generation)
        self.vllm_importance_sampling_correction = bool(args.sampler_rules)
        drift = self.use_vllm and args.rollout_drift != 0
        self._drift = DriftCheck(args, cast(Any, self.vllm_generation)) if drift else None
        self._sampler = None
        if args.dynamic_sampling is not None:
            self._sampler = DynamicSampler(
                args,
                self.train_dataset,
                self.reward_func_names,
                self.num_generations,
                stateful=bool(self.tools) or self.environment_factories is not None,
                accelerator=self.accelerator,
            )

    @contextmanager
    def _filling(self, collected: Collected) -> Iterator[Collected]:
        """Let TRL's hooks fill `collected`."""
        self._collecting, before = collected, self._collecting
        try:
            yield collected
        finally:
            self._collecting = before

    def rollouts(self, rows: list[dict[str, Any]], attempts: Sequence[AttemptId]) -> Collected:
        """Generate a completion for each row; each process may have its own rows.

        Args:
            rows: of a dataset.
            attempts: identity of each row's attempt; seeds of environments and their turns come from it.
        """
        prompts = tool_environments.begin(self, rows, [with_images(row) for row in rows])
        with self._filling(Collected(rows, attempts, prompts, ready=self._finished(attempts))) as collected:
            collected.generated = Generated(*self._generate(prompts))
        extra = collected.generated.extra
        added = [{k: v[i] if isinstance(v, list) else v for k, v in extra.items()} for i in range(len(rows))]
        collected.rows = [{**row, **columns} for row, columns in zip(rows, added, strict=True)]
        return collected

    def collect(self, rows: list[dict[str, Any]], attempts: Sequence[AttemptId]) -> Collected:
        """Generate and score a completion for each row; each process needs as many rows."""
        collected = self.rollouts(rows, attempts)
        made = collected.generated
        assert made is not None
        self._pending_extra_logs.clear()
        with self._filling(collected):
            rewards = self._calculate_rewards(collected.rows, collected.prompts, made.completions, made.completion_ids)
        collected.rewards = rewards
        self._pending_extra_logs.clear()
        return collected

    def _finished(self, attempts: Sequence[AttemptId]) -> Finished | None:
        """Return what was made of attempts before their generation began; None where they are made now."""
        return None

    def _tokenize_prompts(self, prompts: list) -> Tokenized:
        """Tokenize as TRL does; where there are images, each prompt by itself, so that a row's tensors are known."""
        stock = super()._tokenize_prompts
        if not any(map(images_in, prompts)):
            return stock(prompts)
        check_seen(self, prompts)
        tokenized, rows = each_alone(stock, prompts)
        check_fields(rows, self._scorer.multimodal)
        if self._collecting is not None:
            self._collecting.images = rows
        return tokenized

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[list[list[int]], Any]:
        collected, training = self._collecting, self.model.training
        if collected is not None and (ready := collected.ready) is not None:
            collected.kept = list(ready.kept)
            return [list(ids) for ids in ready.completion_ids], ready.logprobs
        if self._beside is not None and training and collected is not None:
            return self._sampled_beside(self._beside, collected, prompt_ids)
        with self._only_settings(), self._drawing() as drawn:
            completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if drawn.logps and training:
            logprobs = [row[: len(ids)].tolist() for row, ids in zip(drawn.logps[-1], completion_ids, strict=True)]
        if collected is not None and training:
            collected.kept = drawn.kept(completion_ids)
        fill_empty(completion_ids, logprobs, self._tokenizer.eos_token_id)
        return completion_ids, logprobs

    def _sampled_beside(
        self, sampler: Sampler, collected: Collected, contexts: list[list[int]]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Sample, in training, by what samples beside it, with random numbers of each attempt's own."""
        limits = [int(self.generation_config.max_new_tokens or 1)] * len(contexts)
        streams = [attempt.stream() for attempt in collected.attempts]
        version = self._publish(sampler)
        with failing_together():
            made = sampler.sample(version, contexts, limits, streams)
        collected.kept = [row.kept for row in made if row.kept is not None]
        return [row.ids for row in made], [row.logps for row in made]

    def _publish(self, sampler: Sampler) -> int:
        """Give the sampler the present weights, if a step has been made since it got some; return their number."""
        step = int(self.state.global_step)
        if step not in sampler.versions:
            with self._times.during("weight_push"):
                for version in sampler.versions:
                    sampler.forget(version)
                sampler.publish(step)
        return step

    def background_paused(self) -> AbstractContextManager[None]:
        """Return a context in which what samples beside the training is free for an evaluation."""
        if self._beside is None:
            return nullcontext()
        self._last_loaded_step = -1  # TRL then pushes the present weights
        return self._beside.paused()

    def _only_settings(self) -> AbstractContextManager[None]:
        """Let transformers draw by the trainer's settings only, as vLLM does, not by generation_config.json too."""
        own = getattr(self.accelerator.unwrap_model(self.model), "generation_config", None)
        if own is None or self.use_vllm or self.args.loss_defaults == "trl":
            return nullcontext()
        return temporarily(own, **{name: None for name in OF_THE_MODEL if getattr(own, name, None) is not None})

    def _drawing(self) -> AbstractContextManager[Drawn]:
        """Let the engine decode, and record its draws."""
        if self._engine is not None:
            return self._engine.generating(self.accelerator.unwrap_model(self.model_wrapped))
        if self.use_vllm and self.model.training:
            return returning(cast(Any, self.vllm_generation).keeping())
        return nullcontext(Drawn())

    def _generate(self, prompts: list) -> Generated:
        collected = self._collecting or Collected([])
        if self.use_vllm and self._beside is not None and self.model.training:
            self._last_loaded_step = self.state.global_step  # TRL would push below running requests
        with self._times.during("rollout"), self._sampling():
            generated = Generated(*super()._generate(prompts))
        self._check_logprobs(generated)
        if self._evaluated is not None:
            ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
            self._evaluated.add_completions(generated.completion_ids, generated.tool_mask, ends, self.accelerator)
        if (trajectories := generated.extra.get(COLUMN)) is not None:
            generated = generated._replace(completions=completions_seen(trajectories, generated.completions))
        if any(generated.tool_images):
            raise ConfigError([images_of_tools()])
        collected.generated = generated
        first = generated.prompt_ids, generated.completion_ids, collected.images
        adapted = moved(self._unwrapped) if isinstance(self.model, PeftModel) else None
        self._scorer.choose_way(self.model, *first, self._tokenizer.pad_token_id, adapted)
        return generated

    def _check_logprobs(self, generated: Generated) -> None:
        """Raise `ConfigError` if a rollout function left out the log-probabilities that the loss needs."""
        needed = self._sampler_corrected or (self.use_vllm and self.args.old_logps == "sampler")
        if needed and generated.logprobs is None:
            reason = "it returned no logprobs, to which the loss with use_vllm: true takes its ratio"
            cure = "Return vLLM's log-probability of each token, or set vllm_importance_sampling_correction: false"
            cure += " and leave old_logps unset."
            raise ConfigError([Problem("rollout_func", ABSENT, reason, cure)])

    def _play(self, prompts: list, trainer: object) -> dict[str, Any]:
        """Play conversations with environments; TRL's `rollout_func`."""
        assert self.acting is not None
        assert self._collecting is not None
        ready = self._collecting.ready
        played = self._played_now(self.acting, self._collecting) if ready is None else ready.played
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in self.acting.figures(played, self.accelerator).items():
            metrics[name].append(value)
        return {"trajectories": [trajectory for trajectory, _ in played]}

    def _played_now(self, acting: Acting, collected: Collected) -> Played:
        sampling, ends = sampling_of(self, self.args, self._engine), frozenset(self.eos_token_ids)
        limits = limits_of(self.args, sampling.positions, ends)
        renderer = Renderer(self._tokenizer, cast(dict[str, Any], self.chat_template_kwargs))
        waiting = partial(self._times.during, "environments")
        if self._beside is None or not self.model.training:
            engine: WaveEngine | SamplerEngine = engine_of(sampling, collected.attempts)
            return acting.play(collected.rows, collected.attempts, engine, limits, renderer, waiting)
        published, waits = self._publish(self._beside), self.args.environment_waves == "turn"
        engine = SamplerEngine(self._beside, published, sampling.version, collected.attempts, waits=waits)
        with failing_together():
            return acting.play(collected.rows, collected.attempts, engine, limits, renderer, waiting)

    def _ready_scores(self, name: str, columns: Mapping[str, Any]) -> Scores | None:
        """Return the scores of a reward if the background has scored these completions, and log what it logged."""
        ready = None if self._collecting is None else self._collecting.ready
        given = columns["completions"], columns["completion_ids"]
        if ready is None or given != (ready.completions, ready.completion_ids):
            return None
        scored: Scored | None = ready.scored.get(name)  # a script that resumes may have another reward
        return None if scored is None else scored.replayed(columns)

    def _take_scores(self, name: str, scores: Scores) -> None:
        """Keep what a reward returned beside its numbers."""
        if self._collecting is not None:
            self._collecting.turns_by_reward[name] = scores.turns
            self._collecting.errors += [scores.error] if scores.error else []

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list, completions: list, completion_ids_list: list[list[int]]
    ) -> Tensor:
        collected = self._collecting or Collected(inputs)
        collected.scored_ids = completion_ids_list
        self._rewards.schedule_weights(self.reward_weights, self.state)
        with self._filling(collected), self._times.during("rewards"):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        rewards = self._rewards.checked(rewards, collected.errors, prompts, completions)
        if self.acting is not None:
            played = [row[COLUMN] for row in inputs]
            unscored = self.acting.unscored(played, rewards.shape[1]).to(rewards.device)
            rewards = rewards.masked_fill(self.accelerator.gather(unscored), torch.nan)
            for name, values in self.acting.columns(played).items():
                self._pending_extra_logs[name].extend(values)
        collected.rewards, collected.turn_rewards = rewards, self._rewards.turn_rewards(collected, len(completions))
        collected.logged = {name: list(values) for name, values in self._pending_extra_logs.items()}
        return rewards

    def close_rewards(self) -> None:
        """End the processes beside this one, which would wait for the next batch; let other runs have the server."""
        for processes in (self.acting, self.reward_runtime, self._beside):
            if processes is not None:
                processes.close()
        engine = getattr(self, "vllm_generation", None)
        if engine is not None and self.args.vllm_mode == "server" and self.accelerator.is_main_process:
            engine.vllm_client.release()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a generation of this process's rows: sampled or played, rewarded, scored, credited."""
        mode = "train" if self.model.training else "eval"
        if self._first_logps is None:
            self.check_reference()
        collected = self._begun(inputs, mode)
        batch = self._padded(collected)
        policy = self._policy_logps(batch) if self._sampler_corrected else None
        if self.beta:
            batch["ref_per_token_logps"] = self._reference_logps(batch)
        if self._evaluated is not None and collected.rewards is not None:
            rank, mask = self.accelerator.process_index, batch["completion_mask"]
            batch["completion_mask"] = self._evaluated.mask_fillers(mask, collected.rewards, rank)
        self._compare_sampler(batch, policy, mode)
        logged = self._assign_credit(collected, batch, policy, mode)
        if policy is not None:  # behind the advantages, whose baselines are of all completions, also of rejected ones
            batch |= self._correction(batch, policy, mode)
        self._log_generation(collected, logged)
        return batch

    def _padded(self, collected: Collected) -> dict[str, Any]:
        """Return the columns of a generation, and the number of trained tokens of all processes."""
        assert collected.generated is not None
        device, pad = self.accelerator.device, self._tokenizer.pad_token_id
        ends = {*self.eos_token_ids, pad} if self.mask_truncated_completions else None
        batch: dict[str, Any] = padded(collected.generated, pad, cast(Any, self.pad_to_multiple_of), device, ends)
        batch["num_items_in_batch"] = self.accelerator.gather(live_mask(batch).sum()).sum()
        made = collected.trajectories
        if made and (parents := parents_of(made, batch["completion_ids"].shape[1])) is not None:
            batch[PARENTS] = parents.to(device)
        return batch | collected.lists

    def _compare_sampler(self, batch: dict[str, Any], policy: Tensor | None, mode: str) -> None:
        """Name the sampler's log-probabilities after what they may be compared with, and check its drift."""
        if "sampling_per_token_logps" not in batch:
            return
        if mode == "eval" and scores_kept_sets(self.args):  # over the tokens that were kept, not the vocabulary
            del batch["sampling_per_token_logps"]
            return
        elsewhere = self.use_vllm or (self.rollout_func is not None and self.acting is None)
        if not elsewhere and not (self._older and mode == "train"):
            batch[DRAWN] = batch.pop("sampling_per_token_logps")  # diagnostics only: no mask of the loss reads it
        elif self._drift is not None and mode == "train" and self._age == 0:
            self._drift.due = True
            if policy is not None:
                self._check_drift(policy, batch)

    def _correction(self, batch: Mapping[str, Any], policy: Tensor, mode: str) -> dict[str, Tensor]:
        """Return the weights of tokens that something else than the policy sampled."""
        if "sampling_per_token_logps" not in batch:  # in evaluations by vLLM
            return {"importance_sampling_ratio": torch.ones_like(policy)}
        return correct_sampler(self.args.sampler_rules, policy, batch, self._metrics[mode], self.accelerator)

    def _begun(self, rows: list[dict[str, Any]], mode: str) -> Collected:
        """Return a generation of these rows, sampled or played and scored."""
        attempts = self.attempt_ids(len(rows))
        if self._sampler is None or mode != "train":
            return self.collect(rows, attempts)
        silent = partial(self._credit.silent_groups, weights=self.reward_weights, group=self.num_generations)
        seen = self.state.num_input_tokens_seen
        try:
            return self._sampler.settle(rows, attempts, self.collect, silent, self._metrics[mode])
        except BaseException:
            self.state.num_input_tokens_seen = seen
            raise

    @property
    def _sampler_corrected(self) -> bool:
        """Whether the loss is corrected for what sampled the completions."""
        elsewhere = self.use_vllm or (self._older and self.model.training)
        return bool(elsewhere and self.vllm_importance_sampling_correction)

    def _check_drift(self, logps: Tensor, inputs: Mapping[str, Any]) -> None:
        """Compare the sampler with the policy and log the figures."""
        assert self._drift is not None
        for name, value in self._drift.check(logps, inputs, self.accelerator).items():
            self._metrics["train"][name].append(value)
