"""`RolloutHooks`: what a trainer does for its `Collector`, by TRL's hooks, which a subclass may override.

Each hook is called once a generation. Where TRL's own loop completes rows (tools, a `rollout_func`, a subclass's
turns), it asks for each turn by `_generate_single_turn`.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer
from trl.data_utils import apply_chat_template, is_conversational
from trl.extras.profiling import profiling_context

from grpo_ext.config.images import image_problems, images_in
from grpo_ext.config.mappings import as_mapping
from grpo_ext.config.process_engine import samples_by_server
from grpo_ext.config.temporary import temporarily
from grpo_ext.data.chat_template import template_opens
from grpo_ext.data.images import with_images
from grpo_ext.environments.episode import EpisodeLimits
from grpo_ext.packing.images import RowImages
from grpo_ext.packing.scorer import Scorer
from grpo_ext.rollout.dynamic_sampling import DynamicSampler
from grpo_ext.rollout.images import Tokenized, images_of_row
from grpo_ext.rollout.process.policy import process_sampler
from grpo_ext.rollout.rollout_batch import Generated
from grpo_ext.rollout.samplers import Sampler
from grpo_ext.rollout.trajectories import completed
from grpo_ext.rollout.transformers_engine import positions_of, transformers_sampler
from grpo_ext.rollout.vllm.drift import DriftCheck
from grpo_ext.trainer import tool_environments
from grpo_ext.trainer.callbacks import StepTimes
from grpo_ext.trainer.collector import Collector, usable
from grpo_ext.trainer.episodes import EpisodeRunner, sampling_of
from grpo_ext.trainer.input_checks import check_fields, check_seen
from grpo_ext.trainer.lifecycle import Lifecycle
from grpo_ext.trainer.log import Log
from grpo_ext.trainer.nan_report import sampling
from grpo_ext.trainer.reward_collector import RewardCollector
from grpo_ext.trainer.rollout_worker import RolloutWorker, Row
from grpo_ext.trainer.setup import Ready


class RolloutHooks(Lifecycle):
    """A trainer whose rollouts its `collector` makes."""

    episode_runner: EpisodeRunner | None = None
    _batch_environments: Any
    chat_template_kwargs: dict[str, Any]
    environments: Any
    reward_funcs: list[Any]
    reward_weights: Tensor
    vllm_generation: Any
    _log: Log
    _scorer: Scorer
    _times: StepTimes

    def _set_up_rollouts(self, ready: Ready, memory_gib: float) -> None:
        """Make what plays, samples and scores, and what corrects the loss for another sampler than the policy."""
        args, tokenizer, metrics = self.args, self._tokenizer, self._metrics["train"]
        if ready.environments:
            # a copy: the background may play while TRL tokenizes
            own = copy.deepcopy(tokenizer)
            self.episode_runner = EpisodeRunner(ready.environments, own, memory_gib, sampling_of(args))
        funcs = self.reward_funcs, self.reward_func_names, self.reward_weights
        rewards = RewardCollector(*funcs, self._model_scores, self._guard, self.accelerator)
        self.reward_runtime = rewards.runtime
        self.opened = template_opens(tokenizer, as_mapping(self.chat_template_kwargs))
        if self.reward_runtime is not None:
            self.reward_runtime.opened = self.opened
        engine: Sampler | None = process_sampler(self, args)
        if samples_by_server(args):
            from grpo_ext.rollout.vllm.sampler import ServerSampler  # with vLLM

            engine = ServerSampler(self.vllm_generation)
        self._times = StepTimes(metrics, self.accelerator.device, ("rollout", "rewards"))
        if self.episode_runner is not None:
            self._times.parts += ("environments",)
        if self.use_vllm or engine is not None:
            self._times.parts += ("weight_push",)
        if self.use_vllm:
            self.vllm_generation.pushing = partial(self._times.during, "weight_push")
        length, counts_all = args.max_completion_length or 0, args.completion_length_counts == "all"
        limits = EpisodeLimits(length, counts_all, positions_of(self._unwrapped, args), frozenset(self.eos_token_ids))
        worker = partial(
            RolloutWorker,
            scorers=rewards.scorers,
            processing_class=self.processing_class,
            limits=limits,
            episode_runner=self.episode_runner,
            options=self.chat_template_kwargs,
            image_obstacle="; ".join(map(str, image_problems(args, ["images"]))),
            loop=getattr(self, "async_loop", None),
            waiting=partial(self._times.during, "environments"),
            timed=partial(profiling_context, self),
        )
        dynamic, stateful = None, bool(self.tools) or self.environment_factories is not None
        if args.dynamic_sampling is not None:
            rows = self.train_dataset, self.reward_func_names, self.num_generations
            dynamic = DynamicSampler(args, *rows, stateful=stateful, accelerator=self.accelerator)
        policy = self.vllm_generation if args.use_vllm else transformers_sampler(self, args)
        judge = self._advantages.zero_advantage_groups
        zero_advantages = partial(judge, weights=self.reward_weights, group=self.num_generations)
        shared = self, self._log, self._times
        self.collector = Collector(*shared, policy, engine, rewards, dynamic, zero_advantages, worker)
        if self.rollout_func is not None:
            self.rollout_func = completed(self.rollout_func, self.collector.worker.ends, tokenizer.eos_token_id)
        self.vllm_importance_sampling_correction = bool(args.sampler_rules)
        drift = self.use_vllm and args.rollout_drift != 0
        self._drift = DriftCheck(args, self.vllm_generation) if drift else None

    @property
    def _unwrapped(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    @property
    def _sampler_corrected(self) -> bool:
        """Whether the loss is corrected for what sampled the completions."""
        elsewhere = self.use_vllm or (self.args.rollout_ahead and self.model.training)
        return bool(elsewhere and self.vllm_importance_sampling_correction)

    def close_rewards(self) -> None:
        """End the processes beside this one, after the last use of a trainer that was not trained."""
        self.collector.close()

    # Prompts.

    def prompts_of(self, rows: Sequence[Row]) -> list[Any]:
        """Return the prompts of rows as the model gets them, with their images; reset TRL's environments and tools."""
        prompts, several = [with_images(row) for row in rows], self._multi_environment
        if self.environment_factories is not None:
            names = tool_environments.named(rows, self.environment_factories, several=several)
            self._batch_environments = names
            self.environments = tool_environments.instances(names, self.environment_factories, self._environment_pool)
        if self.tools:
            tools = tool_environments.tools_by_row(self._standalone_tools, self.environments or [None] * len(rows))
            self._sync_tool_dicts, self._async_tool_dicts = tools
        if self.environment_factories is None:
            return prompts
        return tool_environments.observed(rows, prompts, self.environments, several=several)

    def _tokenize_prompts(self, prompts: list) -> Tokenized:
        if not any(map(images_in, prompts)):
            return super()._tokenize_prompts(prompts)
        check_seen(self.args, self.rollout_func, prompts)
        ids, images, fields = self.collector.tokenized(self._tokenized_alone, prompts, self._scorer.multimodal)
        return ids, images, {} if self.tools else fields  # TRL's loop would cut them to rows

    def _tokenized_alone(self, prompt: Any, row: int | None) -> Tokenized:
        """Tokenize one prompt as TRL does, with the tools of the row of this number, or with none."""
        changed: dict[str, Any] = {"tools": [], "environment_factories": None} if row is None else {}
        if row is not None and self.environment_factories is not None:
            changed = {"_batch_environments": self._batch_environments[row : row + 1]}
        with temporarily(self, **changed):
            return super()._tokenize_prompts([prompt])

    def row_images(self, ids: list[int], images: Sequence[Any] | None) -> RowImages:
        """Return the images of a row with these tokens, wherever they are."""
        if images:
            check_seen(self.args)
        row = images_of_row(self._tokenized_alone, ids, images)
        check_fields([row], self._scorer.multimodal)
        return row

    # Completions.

    def _generate(self, prompts: list) -> Generated:
        if self.use_vllm and self.collector.inference_engine is not None and self.model.training:
            self._last_loaded_step = self.state.global_step  # TRL would push below running requests
        turns = getattr(self._generate_single_turn, "__func__", None)
        # TRL's loop completes rows: it calls tools, a rollout function, and the turns of a subclass
        by_trl = bool(self.tools) or self.rollout_func is not None or self.environment_factories is not None
        by_trl = by_trl or turns is not RolloutHooks._generate_single_turn
        with self._times.during("rollout"), sampling(self.model, self.state):
            if by_trl:
                needed = self._sampler_corrected or (self.use_vllm and self.args.old_logps != "recomputed")
                generated = usable(Generated(*super()._generate(prompts)), needs_logprobs=needed)
                self.collector.add_supports(generated)
            else:
                group = self.num_generations if self.model.training else self.num_generations_eval
                generated = self.collector.completed(prompts, group)
            self.collector.add_images(generated)
        ends = self.collector.worker.ends
        if not by_trl:
            self._log.add_lengths(generated, ends, self.state)
        if self._evaluated is not None:
            self._evaluated.add_completions(generated.completion_ids, generated.tool_mask, ends, self.accelerator)
        return generated

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: Mapping[str, Any],
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], Any]:
        fields = {} if has_tool_images else multimodal_fields  # those are of image processors alone
        return self.collector.turn(prompt_ids, images, fields, num_generations)

    def _tool_call_loop(self, *rows: Any, **named: Any) -> Any:
        made = super()._tool_call_loop(*rows, **named)
        if self.use_vllm:
            self.vllm_generation.join()  # the rows of other processes may have turns left
        return made

    def push_weights(self) -> None:
        """Give vLLM the policy's weights if it has older ones."""
        if self.use_vllm and self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step

    # Rewards.

    def _calculate_rewards(
        self, inputs: list[Row], prompts: list, completions: list, completion_ids_list: list[list[int]]
    ) -> Tensor:
        return self.collector.rewarded(inputs, prompts, completions, completion_ids_list)

    def _model_scores(self, place: int, prompts: list[Any], completions: list[Any]) -> Tensor:
        """Return the scores of the reward model at a place, as TRL computes them."""
        model, processing = self.reward_funcs[place], self.reward_processing_classes[place]
        both = list(zip(prompts, completions, strict=True))
        if is_conversational({"prompt": prompts[0]}):
            options, chats = self.chat_template_kwargs, [{"messages": prompt + text} for prompt, text in both]
            texts = [apply_chat_template(chat, processing, **options)["text"] for chat in chats]
        else:
            texts = [prompt + text for prompt, text in both]
        padded = {"return_tensors": "pt", "padding": True, "padding_side": "right", "add_special_tokens": False}
        with profiling_context(self, self.reward_func_names[place]), torch.inference_mode():
            return model(**Trainer._prepare_inputs(self, processing(text=texts, **padded))).logits[:, 0]
