"""GRPOExtTrainer: TRL's GRPOTrainer with the loss and the advantages of `grpo_ext.objective.losses`."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Self, cast

import torch
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from grpo_ext.config.adapters import make_portable
from grpo_ext.config.added_losses import INITIAL, Distillation, added_losses
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.loss import idle_clip
from grpo_ext.config.mappings import as_mapping
from grpo_ext.config.models import model_problems
from grpo_ext.config.precision import precision
from grpo_ext.config.truncation import adapter_problems, scores_kept_sets
from grpo_ext.data.chat_template import template_opens
from grpo_ext.data.given import given_data
from grpo_ext.environments.composition import EnvironmentSpec
from grpo_ext.errors import ConfigError
from grpo_ext.objective.aggregation import StepTotals
from grpo_ext.objective.ratios import masked, widest
from grpo_ext.packing.collective import failing_alike
from grpo_ext.packing.dropout import active_dropout, switch_dropout_off
from grpo_ext.packing.forward_mode import count_positions
from grpo_ext.packing.lm_head import gather_trained_head
from grpo_ext.packing.micro_batches import MicroBatch, active_mask, regroup, silent
from grpo_ext.packing.obstacles import adds_tokens, causal_lm, forward_obstacle, name_body, takes_positions
from grpo_ext.packing.policy import PrefixSharing, Scores
from grpo_ext.packing.scorer import Scorer, in_evaluation
from grpo_ext.packing.token_budget import TokenBudget
from grpo_ext.rollout.images import Tokenized, described
from grpo_ext.rollout.malloc_trim import give_back
from grpo_ext.rollout.rollout_batch import Generated, RolloutBatch
from grpo_ext.rollout.trajectories import completed
from grpo_ext.rollout.vllm.drift import DriftCheck
from grpo_ext.rollout.vllm.lazy_import import with_our_generation
from grpo_ext.trainer.added_losses import AddedLosses
from grpo_ext.trainer.advantages import Advantages, AssignedAdvantages
from grpo_ext.trainer.batches import Generation, counted, counted_once, forward_only, padded, stock_totals
from grpo_ext.trainer.callbacks import MetricsFile, StepTimes, install_progress
from grpo_ext.trainer.checkpoints.state import accept_numbered_cpu
from grpo_ext.trainer.collector import collector_of
from grpo_ext.trainer.diagnosis.recording import DRAWN, ROWS, Watching, add_ess, log_rows, row_record
from grpo_ext.trainer.episodes import EpisodeRunner, sampling_of
from grpo_ext.trainer.input_checks import fix_lengths, longest_row
from grpo_ext.trainer.lifecycle import Lifecycle
from grpo_ext.trainer.log import Log
from grpo_ext.trainer.loss import Loss, LossOutput, Moment, joined
from grpo_ext.trainer.loss_terms import EntropyCoefficient, Figures
from grpo_ext.trainer.notices import without_notices
from grpo_ext.trainer.patched_libraries import replacement_problems
from grpo_ext.trainer.reference import InitialWeights, ReferenceCheck, made_up, scored
from grpo_ext.trainer.reward_collector import RewardCollector
from grpo_ext.trainer.sampling import correct_sampler
from grpo_ext.trainer.setup import (
    EnvironmentFactory,
    Ready,
    Reward,
    RolloutFunc,
    Rows,
    check,
    name_problems,
    named_arguments,
    quantized_problems,
    reference_from,
    widen_trained,
)
from grpo_ext.trainer.teacher import teacher_of
from grpo_ext.trainer.token_budget import SHARDED, check_token_budget, more_to_come

logger = logging.getLogger(__name__)


class GRPOExtTrainer(Lifecycle):
    """`trl.GRPOTrainer` whose `loss_type` names a row of `grpo_ext.objective.losses`; takes the same arguments.

    Raises:
        ConfigError: all problems of the arguments, before anything is loaded.
    """

    _tag_names = ["trl", "grpo", "grpo-ext"]  # noqa: RUF012 (TRL's own declaration)
    _paper = {}  # noqa: RUF012 (TRL's own declaration; the card names the loss's source)
    _buffered_inputs: Any
    _entropy_window_stats: Any
    episode_runner: EpisodeRunner | None = None
    router_aux_loss_coef: Any
    vllm_generation: Any

    @named_arguments
    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: Reward | Sequence[Reward] | None = None,
        args: GRPOExtConfig | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | Mapping[str, Rows] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Optimizer | None, LambdaLR | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: RolloutFunc | None = None,
        environment_factory: EnvironmentFactory | dict[str, EnvironmentFactory] | None = None,
        *,
        reward_workers: int | None = None,
        environments: Sequence[str | Mapping[str, Any] | type | EnvironmentSpec] | None = None,
        reward_memory_gib: float = 8.0,
    ) -> None:
        """Check the arguments, then make TRL's trainer and what this one adds to it.

        Args:
            model: hub id, folder or loaded model; also 'quickstart', the tiny model that grpo-ext builds itself.
            reward_funcs: functions, models, or entries of a recipe: 'accuracy', 'my_module:my_function', {'name':
                'format', 'weight': 0.2, 'kwargs': {...}}, where 'func' may be a function.
            args: the settings, not a plain `GRPOConfig`; by default a `GRPOExtConfig` named after the model.
            train_dataset: also a list of rows, a pandas frame, or a generator, which is read to its end.
            eval_dataset: the same, or several by name.
            processing_class: tokenizer or processor; by default the one in the model's folder.
            reward_processing_classes: tokenizers of the reward models among `reward_funcs`.
            callbacks: added to those of transformers.
            optimizers: optimizer and learning-rate schedule in place of those that `args` describe.
            quantization_config: how to quantize the model's weights when it is loaded.
            peft_config: a new adapter to train.
            tools: functions that the model may call.
            rollout_func: generates the completions in place of TRL; may return trajectories.
            environment_factory: makes TRL's environments, whose methods are tools.
            reward_workers: processes that score what is named; 0: this one. As in a recipe.
            environments: conversation partners, as in a recipe; `path` may be a class.
            reward_memory_gib: memory that an environment's process may use.
        """
        ready = check(
            model,
            reward_funcs,
            args,
            given_data(train_dataset, eval_dataset, continued=environment_factory is not None),
            environments,
            reward_workers,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        self._set_up(ready, reward_memory_gib)

    @classmethod
    def of(cls, ready: Ready, reward_memory_gib: float = 8.0) -> Self:
        """Return the trainer of arguments that are checked, such as a recipe's."""
        trainer = cls.__new__(cls)
        trainer._set_up(ready, reward_memory_gib)
        return trainer

    def _set_up(self, ready: Ready, reward_memory_gib: float) -> None:
        """Make TRL's trainer, and what this one adds to it."""
        model, args = ready.model, ready.args
        if replaced := [*replacement_problems(type(self), model)]:
            raise ConfigError(replaced)
        self.objective = args.objective
        accept_numbered_cpu()
        reference = reference_from(model, args, ready.trl.get("peft_config"))
        data = ready.data.train, ready.data.evaluation
        with reference, with_our_generation(args), without_notices():
            super().__init__(model, ready.reward_funcs, args, *data, **ready.trl)
        self._check_inputs(ready)
        make_portable(self.model)
        if args.fp16:
            widen_trained(self.model)
        self._set_up_reference()
        self._set_up_rollouts(ready, reward_memory_gib)
        self._set_up_forward()
        self._set_up_added_losses()
        self._add_callbacks()
        self._set_up_loss()
        self._describe_objective()

    def _check_inputs(self, ready: Ready) -> None:
        """Check what is known once the model is loaded: its kind, the names of the rewards, its longest rows.

        Raises:
            ConfigError: the model or the data do not fit the settings.
        """
        args, data = ready.args, ready.data
        train = None if ready.environments or any(ready.rollouts.values()) else data.train
        found = *quantized_problems(args, self.model, None), *adapter_problems(args, adds_tokens(self.model))
        found += (
            *model_problems(args, cast(Any, self.model)),
            *name_problems(args, data.evaluation, self.reward_func_names),
        )
        if found:
            raise ConfigError(found)
        options = as_mapping(self.chat_template_kwargs)
        longest = partial(longest_row, self._tokenizer, options, train, int(args.max_completion_length or 0))
        policies = [causal_lm(self.accelerator.unwrap_model(m)) for m in (self.model, self.ref_model) if m is not None]
        adapter, main = isinstance(self.model, PeftModel), self.accelerator.is_main_process
        fix_lengths(policies, args, longest, adapter=adapter, warns=main)

    def _set_up_rollouts(self, ready: Ready, memory_gib: float) -> None:
        """Make what plays, samples and scores, and what corrects the loss for another sampler than the policy."""
        if ready.environments:
            # a copy: the background may play while TRL tokenizes
            tokenizer = copy.deepcopy(self._tokenizer)
            self.episode_runner = EpisodeRunner(ready.environments, tokenizer, memory_gib, sampling_of(ready.args))
        rewards = RewardCollector(self.reward_funcs, self.reward_func_names, self._guard, self.accelerator)
        self.reward_runtime = rewards.runtime
        self.opened = template_opens(self._tokenizer, as_mapping(self.chat_template_kwargs))
        if self.reward_runtime is not None:
            self.reward_runtime.opened = self.opened
        self.collector = collector_of(self, rewards, self.episode_runner)
        self._set_up_sampler()

    def _set_up_loss(self) -> None:
        """Make the loss, the advantages, and what logs both."""
        args, training = self.args, lambda: self.model.training
        self._log = Log(self._metrics, self._logs, self._pending_metrics, training, self.accelerator)
        as_stock, names = args.loss_defaults == "trl", self.reward_func_names
        warns = self.accelerator.is_main_process and not self._added.losses
        self._advantages = Advantages(
            self.objective, self.accelerator, self._log, names, as_stock=as_stock, warns=warns
        )
        aux_loss_coef = self.router_aux_loss_coef if self.aux_loss_enabled else 0.0
        self._loss = Loss(self.objective, args, self.accelerator, aux_loss_coef)
        self._entropy_coef = EntropyCoefficient(self, args)
        self._figures, self._generation = Figures(), Generation()

    def _set_up_reference(self) -> None:
        """Keep the weights that an adapter begins with, which are its reference, and what checks any reference."""
        args = self.args
        if args.beta:
            self.beta = args.beta
        initial = any(isinstance(loss, Distillation) and loss.teacher == INITIAL for loss in added_losses(args))
        if (args.beta or initial) and isinstance(self.model, PeftModel):
            self._initial = InitialWeights(self.model)
        half = bool(args.bf16 or args.fp16 or self.model.dtype.itemsize < 4)
        self._reference_check = ReferenceCheck(
            self._made_up_logps, self._initial, half=half, follows=bool(args.sync_ref_model)
        )

    def _set_up_sampler(self) -> None:
        """Guard a rollout function, and what corrects the loss for another sampler than the policy."""
        args, ends = self.args, {*self.eos_token_ids, self._tokenizer.pad_token_id}
        if self.rollout_func is not None:
            self.rollout_func = completed(self.rollout_func, ends, self._tokenizer.eos_token_id)
        self._samples_ahead = args.rollout_ahead > 0
        self.vllm_importance_sampling_correction = bool(args.sampler_rules)
        drift = self.use_vllm and args.rollout_drift != 0
        self._drift = DriftCheck(args, self.vllm_generation) if drift else None

    @property
    def _unwrapped(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    def _set_up_forward(self) -> None:
        """Switch dropout off if configured, and choose the forward that scores tokens."""
        args = self.args
        for model in (self.model, self.ref_model):
            if model is not None:
                name_body(causal_lm(self.accelerator.unwrap_model(model)))
        if self.is_fsdp_enabled:
            gather_trained_head(causal_lm(self.model))
        if args.dropout_disabled:
            switch_dropout_off(self.model)
        elif dropout := active_dropout(self.model):
            logger.warning(f"dropout is active in {', '.join(dropout)}: rollouts and the loss see different networks.")
        if adds_tokens(self.model) and takes_positions(causal_lm(self.model)):
            count_positions(causal_lm(self.model))  # in rollouts too, where PEFT counts padding behind its tokens
        self.sharing = PrefixSharing(args.prefix_setting, self.model, further=forward_obstacle(args))
        if args.prefix_setting == "true" and not self.sharing.possible:
            raise ConfigError([self.sharing.problem()])
        several, sharded = self.accelerator.num_processes > 1, self.accelerator.distributed_type in SHARDED
        if several and (self.rollout_func is not None or self.episode_runner is not None):
            self.sharing.agreed = self._largest
        check_token_budget(args, aux_loss=self.aux_loss_enabled)
        agreed = self._largest if several and (sharded or self.sharing.agreed is not None) else None
        limit = None if (most := args.micro_batch_tokens) is None else TokenBudget(most, self.sharing, agreed)
        stock = super()._get_per_token_logps_and_entropies
        quiet = partial(forward_only, self.model, args)
        self._scorer = Scorer(stock, self.sharing, self.accelerator, quiet, limit, self.temperature)

    def _set_up_added_losses(self) -> None:
        """Make the losses beside the policy's, with their teachers."""
        losses, args = added_losses(self.args), self.args
        reference = None if args.sync_ref_model else self.ref_model
        of_run = self.model, reference, self._initial, self._tokenizer, args, self.accelerator
        names = {loss.teacher for loss in losses if isinstance(loss, Distillation)}
        teachers = {name: teacher_of(name, *of_run) for name in sorted(names)}
        score, quiet = self._get_per_token_logps_and_entropies, partial(forward_only, self.model, args)
        template = as_mapping(self.chat_template_kwargs)
        self._added = AddedLosses(
            losses, teachers, self._scorer, score, quiet, self._tokenizer, template, self.accelerator
        )

    def _largest(self, number: Any) -> Any:
        """Return the largest of all processes' numbers."""
        return self.accelerator.gather(torch.tensor([number], device=self.accelerator.device)).max().item()

    def _add_callbacks(self) -> None:
        """Register the progress line, step timer, metrics file and diagnostics."""
        metrics = self._metrics["train"]
        progress = install_progress(self.callback_handler.callbacks, disable_tqdm=self.args.disable_tqdm)
        self._times = StepTimes(metrics, self.accelerator.device, ("rollout", "rewards"))
        if progress is not None and self.accelerator.is_main_process:
            self._times.sampled = progress.sampled
        if self.episode_runner is not None:
            self._times.parts += ("environments",)
        if self.use_vllm or self.collector.inference_engine is not None:
            self._times.parts += ("weight_push",)
        if self.use_vllm:
            self.vllm_generation.pushing = partial(self._times.during, "weight_push")
        for callback in (self._times, MetricsFile(), Watching(metrics)):
            self.add_callback(callback)

    def _describe_objective(self) -> None:
        """Print the loss with its paper."""
        objective = self.objective
        self.accelerator.print(f"{objective.describe()} | {objective.row.formula} | {objective.source}")
        for loss in self._added.losses:
            self.accelerator.print(f"beside it {loss.describe()}")
        if idle := idle_clip(self.args):
            self.accelerator.print(f"the clip {idle}")
        self.accelerator.print(self.sharing.describe())
        self.accelerator.print(precision(self.args, str(self.model.dtype).removeprefix("torch.")))

    # A generation.

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a generation of this process's rows: sampled or played, rewarded, scored, credited."""
        mode = "train" if self.model.training else "eval"
        if self._reference_check.first is None:
            self.check_reference()
        rollouts = self.collector.generation(inputs)
        batch = self._padded(rollouts)
        policy, entropies = self._policy_before_training(batch)
        if self.beta:
            batch["ref_per_token_logps"] = self._reference_logps(batch)
        if self._added.losses and mode == "train":
            group, logps = self.num_generations, lambda model, rows: self._logps(model, rows)[0]
            batch |= self._added.columns(rollouts.rows, group, batch, self._unwrapped, logps)
        if self._evaluated is not None and rollouts.rewards is not None:
            rank, mask = self.accelerator.process_index, batch["completion_mask"]
            batch["completion_mask"] = self._evaluated.mask_fillers(mask, rollouts.rewards, rank)
        self._compare_sampler(batch, policy if self._sampler_corrected else None, mode)
        seen = self._seen_by_estimator(batch, policy, entropies)
        credited = self._assigned_advantages(rollouts, batch, seen, mode)
        if self._sampler_corrected:  # behind the advantages: baselines are of all completions, also of rejected ones
            assert policy is not None
            batch |= self._correction(batch, policy, mode)
        played = self.episode_runner is not None and self.log_completions
        prompts = [t.opening for t in rollouts.trajectories] if played else map(described, rollouts.prompts)
        advantages, names = credited.by_completion().tolist(), self.reward_func_names
        self._log.add_completions(rollouts, prompts, advantages, names, images=self.log_multimodal)
        self._log.add_figures_of_rewards()
        if self.accelerator.device.type == "cpu":
            give_back()
        return batch

    def _padded(self, rollouts: RolloutBatch) -> dict[str, Any]:
        """Return the columns of a generation, and the number of trained tokens of all processes."""
        assert rollouts.generated is not None
        device, pad = self.accelerator.device, self._tokenizer.pad_token_id
        ends = {*self.eos_token_ids, pad} if self.mask_truncated_completions else None
        multiple, made = cast(Any, self.pad_to_multiple_of), rollouts.trajectories
        batch: dict[str, Any] = padded(rollouts.generated, pad, multiple, device, ends, trajectories=made or ())
        batch["num_items_in_batch"] = self.accelerator.gather(active_mask(batch).sum()).sum()
        return batch | rollouts.lists

    def _assigned_advantages(
        self, rollouts: RolloutBatch, batch: dict[str, Any], seen: Mapping[str, Tensor], mode: str
    ) -> AssignedAdvantages:
        """Add the advantages of this process's rows, and their records, to the columns of a generation."""
        device, rank = self.accelerator.device, self.accelerator.process_index
        group = self.num_generations if mode == "train" else self.num_generations_eval
        credited = self._advantages.assign(rollouts, self.reward_weights, seen, group)
        rows, width = batch["completion_ids"].shape
        batch |= credited.local(rank, rows, width, device)
        if mode == "train":
            assert rollouts.rewards is not None
            record = row_record(rollouts.rewards, credited.total.flatten(), rollouts.scored_ids, rank, group)
            batch[ROWS] = record.to(widest(device)).to(device)
        elif self._evaluated is not None:
            self._evaluated.add_silent(credited.silent, group)
        return credited

    def _policy_before_training(self, batch: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """Return the policy's log-probabilities of a generation and entropies, where something asks for them."""
        asked = self.objective.generation_inputs & {"per_token_logps", "old_per_token_logps", "entropies"}
        if not (self._sampler_corrected or self.objective.kl_in_reward or asked):
            return None, None
        return self._logps(self.model, batch, entropy="entropies" in asked)

    def _seen_by_estimator(
        self, batch: Mapping[str, Any], policy: Tensor | None, entropies: Tensor | None
    ) -> dict[str, Tensor]:
        """Return what the estimator sees of this process's tokens, [rows, time]."""
        mask, asked = active_mask(batch), self.objective.generation_inputs
        sampler = batch.get("sampling_per_token_logps", batch.get(DRAWN, torch.full(mask.shape, torch.nan)))
        offered = {
            "completion_ids": batch["completion_ids"],
            "per_token_logps": policy,
            "entropies": entropies,
            "ref_per_token_logps": batch.get("ref_per_token_logps"),
            "sampling_per_token_logps": sampler,
        }
        if policy is not None and "old_per_token_logps" in asked:
            offered["old_per_token_logps"] = self._loss.denominators(policy, batch, self.collector.proximal_share)
        seen = {name: values for name, values in offered.items() if name in asked and values is not None}
        if self.objective.kl_in_reward:
            assert policy is not None
            seen["kl"] = self._reward_kl(batch, policy, mask)
        return {"mask": mask} | seen

    @torch.no_grad()
    def _reward_kl(self, batch: Mapping[str, Any], policy: Tensor, mask: Tensor) -> Tensor:
        """Return the KL estimate of each token of this process's completions, to lower the rewards by; log it."""
        log_ref_ratio = masked(batch["ref_per_token_logps"] - policy, mask)
        per_token = self.objective.kl_penalty({"log_ref_ratio": log_ref_ratio, "mask": mask})
        by_row = torch.stack([per_token.sum(dim=1), mask.any(dim=1)], dim=1)
        total, known = self.accelerator.gather(by_row).cpu().double().sum(dim=0).tolist()
        self._log.add("kl", total / max(known, 1.0))
        return per_token

    def _compare_sampler(self, batch: dict[str, Any], policy: Tensor | None, mode: str) -> None:
        """Name the sampler's log-probabilities after what they may be compared with, and check its drift."""
        if "sampling_per_token_logps" not in batch:
            return
        if mode == "eval" and scores_kept_sets(self.args):  # over the tokens that were kept, not the vocabulary
            del batch["sampling_per_token_logps"]
            return
        elsewhere = self.use_vllm or self.rollout_func is not None
        if not elsewhere and not (self._samples_ahead and mode == "train"):
            batch[DRAWN] = batch.pop("sampling_per_token_logps")  # diagnostics only: no mask of the loss reads it
        elif self._drift is not None and mode == "train" and self.collector.age == 0:
            self._drift.due = True
            if policy is not None:
                self._check_drift(policy, batch)

    def _correction(self, batch: Mapping[str, Any], policy: Tensor, mode: str) -> dict[str, Tensor]:
        """Return the weights of tokens that something else than the policy sampled."""
        if "sampling_per_token_logps" not in batch:  # in evaluations by vLLM
            return {"importance_sampling_ratio": torch.ones_like(policy)}
        return correct_sampler(self.args.sampler_rules, policy, batch, self._metrics[mode], self.accelerator)

    def _reference_logps(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the reference's log-probabilities of a generation."""
        with nullcontext() if self._initial is None else self._initial.replacing(self._unwrapped):
            return self._logps(self.ref_model or self.model, batch)[0]

    def _logps(self, model: nn.Module, batch: Mapping[str, Any], *, entropy: bool = False) -> tuple[Tensor, Any]:
        """Return log-probabilities of a generation's tokens, and their entropies where asked for."""
        score, training = self._get_per_token_logps_and_entropies, self.model.training
        rows = self.args.per_device_train_batch_size if training else self.args.per_device_eval_batch_size
        with forward_only(self.model, self.args):
            scores = self._scorer.micro_batch(score, model, cast(MicroBatch, batch), entropy=entropy, batch_size=rows)
        return scores[0], scores[1]

    @property
    def _sampler_corrected(self) -> bool:
        """Whether the loss is corrected for what sampled the completions."""
        elsewhere = self.use_vllm or (self._samples_ahead and self.model.training)
        return bool(elsewhere and self.vllm_importance_sampling_correction)

    def _check_drift(self, logps: Tensor, inputs: Mapping[str, Any]) -> None:
        """Compare the sampler with the policy and log the figures."""
        assert self._drift is not None
        for name, value in self._drift.check(logps, inputs, self.accelerator).items():
            self._metrics["train"][name].append(value)

    def _tokenize_prompts(self, prompts: list) -> Tokenized:
        return self.collector.tokenized(super()._tokenize_prompts, prompts)

    def _generate(self, prompts: list) -> Generated:
        return self.collector.generated(super()._generate if self._turns_by_trl else None, prompts)

    @property
    def _turns_by_trl(self) -> bool:
        """Whether TRL's loop completes rows: it calls tools, a rollout function, and the turns of a subclass."""
        turns = getattr(self._generate_single_turn, "__func__", None)
        own = turns is GRPOExtTrainer._generate_single_turn
        return bool(self.tools or self.rollout_func is not None or self.environment_factories is not None or not own)

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: Mapping[str, Any],
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], Any]:
        return self.collector.turn(prompt_ids, multimodal_fields, num_generations, has_tool_images=has_tool_images)

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list, completions: list, completion_ids_list: list[list[int]]
    ) -> Tensor:
        return self.collector.rewarded(inputs, prompts, completions, completion_ids_list)

    def close_rewards(self) -> None:
        """End the processes beside this one, after the last use of a trainer that was not trained."""
        self.collector.close()

    # The loss.

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Scores:
        return self._scorer.tokens(*args, **kwargs)

    def _scores(self, model: nn.Module, inputs: MicroBatch, active: Tensor | None) -> Scores:
        """Score a micro-batch: one forward for the loss and for old log-probabilities."""
        score = self._get_per_token_logps_and_entropies
        return self._scorer.micro_batch(score, model, inputs, active, aux_loss=self.aux_loss_enabled)

    def _active_rows(self, inputs: MicroBatch, mode: str) -> Tensor | None:
        """Rows that have a gradient, or None where all are computed."""
        if mode != "train" or not self._skips or self._shows_drift(inputs):
            return None
        active = ~silent(inputs["advantages"])
        return None if active.all() else active

    def _shows_drift(self, inputs: MicroBatch) -> bool:
        """Whether the drift check reads all rows of this micro-batch, because no pass came before it."""
        unread = self._drift is not None and "sampling_per_token_logps" in inputs and not self._sampler_corrected
        return unread and inputs is self._buffered_inputs[0]

    @property
    def _skips(self) -> bool:
        """Whether completions without an advantage have no part in the loss, nor in what steers the run."""
        terms = self.objective.kl_in_loss or self._entropy_bonus_enabled or self.aux_loss_enabled
        terms = terms or self._added.reads_policy
        coupled = self.top_entropy_quantile < 1.0 or self.off_policy_mask_threshold is not None
        return self.args.zero_advantages_skipped and self.objective.row.silent_at_zero and not terms and not coupled

    def _compute_loss(self, model: nn.Module, inputs: MicroBatch) -> Tensor:
        mode, outputs = self._log.mode, list[LossOutput]()
        totals = self._totals(inputs, active_mask(inputs), mode)
        parts = self._scorer.parts(model, inputs, self._active_rows(inputs, mode))
        added = self._generation.added_totals_of(inputs) if mode == "train" and self._added.losses else []
        accumulation = self.current_gradient_accumulation_steps if mode == "train" else 1.0
        count = sum(not part.is_spare for part in parts)
        for part in parts:
            last = part is parts[-1]
            weighed, coef = self._sampler_corrected, self._entropy_coef.value
            at = Moment(mode == "train", accumulation, weighed, coef, count, self.collector.proximal_share)
            with nullcontext() if last else more_to_come(self.accelerator, model):
                heads = self._added.teacher_heads(self._unwrapped, part.inputs) if added else []
                output = self._loss(self._scores(model, part.inputs, part.active), part, totals, at)
                if added and not part.is_spare:
                    progress = self.state.global_step, self.state.max_steps
                    output = self._added.add(output, model, part.inputs, heads, added, progress)
                if not last:
                    self._add_gradient(output.loss)
                self._log_loss(output)
            outputs.append(output if last else output.detached())
        output = joined(outputs, parts)
        if inputs in self._generation:
            inputs.setdefault("old_per_token_logps", output.per_token_logps.detach())
        if mode == "train" and self._drift is not None and self._drift.due:
            self._check_drift(output.per_token_logps.detach(), inputs)
        self._guard.note(output)
        stock = self.args.loss_defaults == "trl"
        if self._evaluated is None and (mode == "eval" or stock or self.accelerator.sync_gradients):
            self._figures.log(self._metrics[mode], self.accelerator)
            add_ess(self._metrics[mode])
        return output.loss

    def _add_gradient(self, loss: Tensor) -> None:
        """Add the gradient of a part of a micro-batch, as transformers' `training_step` does of the last one."""
        own = {"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}
        self.accelerator.backward(loss, **own)

    def _log_loss(self, output: LossOutput) -> None:
        """Log the figures of some rows, and let their entropy steer the bonus."""
        if (figures := output.figures) is None:
            return
        self._figures.add(figures)
        if figures.entropy is not None and self._log.mode == "train":
            self._entropy_coef.add(figures.entropy, self._log)
        if figures.aux_loss is not None:
            aux_loss = self.accelerator.gather_for_metrics(figures.aux_loss.detach())
            self._log.add("aux_loss", aux_loss.mean().item())

    # Micro-batches.

    def _prepare_inputs(self, generation_batch: Sequence[dict[str, Any]]) -> MicroBatch:  # type: ignore[override]
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            self._eval_rows.seen += len(generation_batch) * self.accelerator.num_processes
            return inputs
        if self._buffered_inputs is not self._generation.micro_batches:  # TRL has just generated
            self._generation = self._arranged(self._buffered_inputs)
            names, metrics, by_turn = self.reward_func_names, self._metrics["train"], self.objective.sees_turns
            log_rows(self._buffered_inputs, names, metrics, self.accelerator, by_turn=by_turn)
            self._buffered_inputs = self._generation.micro_batches
            inputs = self._buffered_inputs[self._step % len(self._buffered_inputs)]
        if self.accelerator.sync_gradients:  # the policy is about to move
            others = (batch for batch in self._buffered_inputs if batch is not inputs)
            later = [batch for batch in others if "old_per_token_logps" not in batch]
            self._add_old_logps(self._without_samplers_old(later))
        return inputs

    def _without_samplers_old(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return the batches whose old log-probabilities are, in part at least, not the sampler's."""
        if self.args.old_logps == "recomputed" or not (self.use_vllm or self._samples_ahead) or not batches:
            return batches
        unknown = [(batch["sampling_per_token_logps"].isnan() & active_mask(batch).bool()).any() for batch in batches]
        anywhere = self.accelerator.gather(torch.stack(unknown)).view(-1, len(batches)).any(dim=0)
        return [batch for batch, needs in zip(batches, anywhere.tolist(), strict=True) if needs]

    def _add_old_logps(self, batches: list[MicroBatch]) -> None:
        """Add old log-probabilities to the micro-batches that have none, by the loss's own forward."""
        if batches:
            with forward_only(self.model, self.args):
                for batch in batches:
                    batch["old_per_token_logps"] = self._scores(self.model, batch, self._active_rows(batch, "train"))[
                        0
                    ]

    def _arranged(self, batches: list[MicroBatch]) -> Generation:
        window = self.args.gradient_accumulation_steps
        if self._regroups:
            batches = regroup(batches, window, self._skips)
        if not self.args.exact_denominators:
            return Generation(batches)
        every = [active_mask(batch) for batch in batches], *zip(*map(self._added.masks, batches), strict=True)
        totals, *added = (counted(masks, window, self.accelerator) for masks in every)
        return Generation(batches, totals, added)

    def _totals(self, inputs: MicroBatch, mask: Tensor, mode: str) -> StepTotals:
        """Denominators of the optimizer step that a micro-batch belongs to."""
        steps = self.current_gradient_accumulation_steps if mode == "train" else 1
        if self.args.exact_denominators:
            return self._generation.totals_of(inputs) or counted_once(mask, steps, self.accelerator)
        share = steps / int(self.args.steps_per_generation or 1) if mode == "train" else 1.0
        return stock_totals(inputs, steps, share, self.accelerator.num_processes)

    @property
    def _regroups(self) -> bool:
        """Whether groups stay together and padding goes; stock TRL scatters rows and keeps the padding.

        False where a micro-batch's part of the loss depends on its other rows.
        """
        additive = self.objective.additive and self.top_entropy_quantile == 1.0
        additive = additive and not self.aux_loss_enabled
        return self.sharing.possible and self.args.exact_denominators and additive

    def _made_up_logps(self, model: nn.Module) -> Tensor:
        """Return log-probabilities of made-up rows, by TRL's forward and without dropout; collective.

        The way in which rows are scored may be chosen between two calls, and TRL's own is the same in both.
        """
        vocabulary = causal_lm(self._unwrapped).config.get_text_config().vocab_size
        ids, dropout = made_up(self._tokenizer, vocabulary, self.accelerator.device), active_dropout(model)
        with forward_only(self.model, self.args), in_evaluation(model) if dropout else nullcontext(), failing_alike():
            return scored(self._scorer.trl, model, ids)
