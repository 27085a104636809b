"""GRPOExtTrainer: TRL's GRPOTrainer with the loss and the advantages of `grpo_ext.objective.losses`."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Self, cast

import torch
from peft import PeftConfig, PeftModel
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from grpo_ext.config.adapters import checkpointing_problems, make_portable
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.images import described
from grpo_ext.config.loss import idle_clip
from grpo_ext.config.mappings import as_mapping
from grpo_ext.config.precision import precision
from grpo_ext.config.truncation import adapter_problems, scores_over_support
from grpo_ext.data.python_data import python_data
from grpo_ext.environments.composition import EnvironmentSpec
from grpo_ext.errors import ConfigError
from grpo_ext.objective.ratios import masked, widest
from grpo_ext.packing.micro_batches import active_mask
from grpo_ext.packing.obstacles import adds_tokens, causal_lm
from grpo_ext.packing.routes import ROUTES
from grpo_ext.rollout.malloc_trim import give_back
from grpo_ext.rollout.rollout_batch import RolloutBatch
from grpo_ext.rollout.vllm.lazy_import import with_our_generation
from grpo_ext.terminal import without_notices
from grpo_ext.trainer.advantages import AssignedAdvantages
from grpo_ext.trainer.batches import padded
from grpo_ext.trainer.callbacks import MetricsFile, install_progress
from grpo_ext.trainer.checkpoints.state import accept_numbered_cpu
from grpo_ext.trainer.diagnosis.recording import ROWS, SAMPLER_LOGPS, Watching, row_record
from grpo_ext.trainer.input_checks import fix_lengths, longest_row
from grpo_ext.trainer.libraries import replacement_problems
from grpo_ext.trainer.loss_hooks import LossHooks
from grpo_ext.trainer.reference import moved
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

logger = logging.getLogger(__name__)


class GRPOExtTrainer(LossHooks):
    """`trl.GRPOTrainer` whose `loss_type` names a row of `grpo_ext.objective.losses`; takes the same arguments.

    Raises:
        ConfigError: all problems of the arguments, before anything is loaded.
    """

    _tag_names = ["trl", "grpo", "grpo-ext"]  # noqa: RUF012 (TRL's own declaration)
    _paper = {}  # noqa: RUF012 (TRL's own declaration; the card names the loss's source)

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
            python_data(train_dataset, eval_dataset, continued=environment_factory is not None),
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
        with reference, without_notices(), with_our_generation(args):
            super().__init__(model, ready.reward_funcs, args, *data, **ready.trl)
        self._check_inputs(ready)
        make_portable(self.model)
        if args.fp16:
            widen_trained(self.model)
        self._set_up_loss()
        self._set_up_rollouts(ready, reward_memory_gib)
        self._set_up_forward()
        self._set_up_reference()
        self._set_up_added_losses()
        progress = install_progress(self.callback_handler.callbacks, disable_tqdm=args.disable_tqdm)
        if progress is not None and self.accelerator.is_main_process:
            self._times.sampled = progress.sampled
        for callback in (self._times, MetricsFile(), Watching(self._metrics["train"])):
            self.add_callback(callback)
        for name in ("epsilon_low", "epsilon_high"):  # the resolved ones, for subclasses that read them
            setattr(self, name, self.objective.options.get(name))
        self._made_with = self._read_once()
        self._describe_objective()

    def _check_inputs(self, ready: Ready) -> None:
        """Check what is known once the model is loaded: its kind, the names of the rewards, its longest rows.

        Raises:
            ConfigError: the model or the data do not fit the settings.
        """
        args, data = ready.args, ready.data
        train = None if ready.environments or any(ready.rollouts.values()) else data.train
        problems = *quantized_problems(args, self.model, None), *adapter_problems(args, adds_tokens(self.model))
        problems += (
            *checkpointing_problems(args, cast(Any, self.model)),
            *name_problems(args, data.evaluation, self.reward_func_names),
        )
        if problems:
            raise ConfigError(problems)
        options = as_mapping(self.chat_template_kwargs)
        longest = partial(longest_row, self._tokenizer, options, train, int(args.max_completion_length or 0))
        policies = [causal_lm(self.accelerator.unwrap_model(m)) for m in (self.model, self.ref_model) if m is not None]
        adapter, main = isinstance(self.model, PeftModel), self.accelerator.is_main_process
        fix_lengths(policies, args, longest, adapter=adapter, warns=main)

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
        if self.beta and self._reference_check.first is None:
            self.check_reference()
        rollouts = self.collector.generation(inputs)
        self._choose_forward_mode(rollouts)
        batch = self._padded(rollouts)
        policy, entropies = self._policy_before_training(batch)
        if self.beta:
            with nullcontext() if self._initial is None else self._initial.replacing(self._unwrapped):
                rows = {name: values for name, values in batch.items() if name != ROUTES}  # it chooses by itself
                batch["ref_per_token_logps"] = self._logps(self.ref_model or self.model, rows)[0]
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
        prompts = [t.opening for t in rollouts.trajectories] if played else rollouts.prompts
        advantages, names = credited.by_completion().tolist(), self.reward_func_names
        self._log.add_completions(rollouts, map(described, prompts), advantages, names, images=self.log_multimodal)
        self._log.add_figures_of_rewards()
        if self.accelerator.device.type == "cpu":
            give_back()
        return batch

    def _choose_forward_mode(self, rollouts: RolloutBatch) -> None:
        """Choose, by the first rollouts, a forward whose scores are exact."""
        if self._scorer.compared:
            return
        assert rollouts.generated is not None
        adapted = moved(self._unwrapped) if isinstance(self.model, PeftModel) else None
        first = rollouts.generated.prompt_ids, rollouts.generated.completion_ids, rollouts.images
        self._scorer.choose_forward_mode(self.model, *first, self._tokenizer.pad_token_id, adapted)

    def _padded(self, rollouts: RolloutBatch) -> dict[str, Any]:
        """Return the columns of a generation, and the number of trained tokens of all processes."""
        assert rollouts.generated is not None
        device, pad = self.accelerator.device, self._tokenizer.pad_token_id
        ends = self.collector.worker.ends if self.mask_truncated_completions else None
        rows, multiple = rollouts.generated, cast(Any, self.pad_to_multiple_of)
        batch: dict[str, Any] = padded(rows, pad, multiple, device, ends, trajectories=rollouts.trajectories)
        batch["num_items_in_batch"] = self.accelerator.gather(active_mask(batch).sum()).sum()
        lists = rollouts.lists
        if not (self.args.replay_routes and self.model.training):
            lists.pop(ROUTES, None)
        elif len(lists.get(ROUTES, ())) != len(rollouts.rows):
            raise RuntimeError("replay_routes: the sampler has returned no routes, so the loss would choose others")
        return batch | lists

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
            self._evaluated.add_zero_variance(credited.zero_variance, group)
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
        sampler = batch.get("sampling_per_token_logps", batch.get(SAMPLER_LOGPS, torch.full(mask.shape, torch.nan)))
        offered = {
            "completion_ids": batch["completion_ids"],
            "per_token_logps": policy,
            "entropies": entropies,
            "ref_per_token_logps": batch.get("ref_per_token_logps"),
            "sampling_per_token_logps": sampler,
        }
        if policy is not None and "old_per_token_logps" in asked:
            offered["old_per_token_logps"] = self._loss.denominators(policy, batch, self._proximal_share)
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
        if mode == "eval" and scores_over_support(self.args):  # over the tokens that were kept, not the vocabulary
            del batch["sampling_per_token_logps"]
            return
        elsewhere = self.use_vllm or self.rollout_func is not None
        if not elsewhere and not (self.args.rollout_ahead and mode == "train"):
            batch[SAMPLER_LOGPS] = batch.pop("sampling_per_token_logps")  # diagnostics only: no loss masks by it
        elif self._drift is not None and mode == "train" and self.collector.age == 0:
            self._drift.due = True
            if policy is not None:
                self._check_drift(policy, batch)

    def _correction(self, batch: Mapping[str, Any], policy: Tensor, mode: str) -> dict[str, Tensor]:
        """Return the weights of tokens that something else than the policy sampled."""
        if "sampling_per_token_logps" not in batch:  # in evaluations by vLLM
            return {"importance_sampling_ratio": torch.ones_like(policy)}
        return correct_sampler(self.args.sampler_rules, policy, batch, self._metrics[mode], self.accelerator)
