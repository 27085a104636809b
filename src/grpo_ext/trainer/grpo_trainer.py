"""GRPOExtTrainer: TRL's GRPOTrainer with the loss and the advantages of `grpo_ext.objective.losses`."""

import inspect
import json
import logging
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import nanstd

from grpo_ext.config.batches import eval_batch_problems
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.errors import ConfigError, RewardError, RolloutDrift, ServerLost
from grpo_ext.objective import surrogates
from grpo_ext.objective.advantages import group_means, zero_variance
from grpo_ext.objective.combinations import weighted_total
from grpo_ext.objective.objective import Objective
from grpo_ext.objective.ratios import masked
from grpo_ext.packing import micro_batches
from grpo_ext.packing.dropout import active_dropout, switch_dropout_off
from grpo_ext.packing.forward import log_probs
from grpo_ext.packing.layout import Layout
from grpo_ext.packing.obstacles import causal_lm, forward_obstacle
from grpo_ext.packing.policy import CURE, PrefixSharing
from grpo_ext.rewards.containment import contained
from grpo_ext.rewards.runtime import Component
from grpo_ext.rollout.dynamic_sampling import DynamicSampler, Settled
from grpo_ext.rollout.empty_completions import fill_empty, without_empty_completions
from grpo_ext.rollout.transformers_engine import engine_for
from grpo_ext.rollout.vllm.drift_check import DriftCheck
from grpo_ext.rollout.vllm.generation import in_place_of_trls
from grpo_ext.trainer.arguments import check_data, check_reward_names
from grpo_ext.trainer.checkpoints import HISTORY_FILE, OBJECTIVE_FILE, SAMPLING_FILE, accept_numbered_cpu
from grpo_ext.trainer.denominators import Denominators
from grpo_ext.trainer.entropy import entropy_bonus, high_entropy_mask
from grpo_ext.trainer.metrics import log_loss_metrics
from grpo_ext.trainer.reference import reference_copied_from

logger = logging.getLogger(__name__)

_FORWARD = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
MULTIMODAL_INPUTS = _FORWARD[_FORWARD.index("compute_aux_loss") + 1 :]
"""What TRL's forward takes beside tokens: images and all that belongs to them."""


class GRPOExtTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` whose `loss_type` names a row of `grpo_ext.objective.losses`; takes the same arguments.

    Raises:
        ConfigError: what is wrong with the arguments, before anything is loaded.
    """

    _tag_names = ["trl", "grpo", "grpo-ext"]  # noqa: RUF012 (TRL's own declaration)
    args: GRPOExtConfig
    model: Any
    _logs: dict[str, Any]
    _pending_extra_logs: Any
    model_wrapped: Any
    _buffered_inputs: Any
    _entropy_window_stats: Any
    num_generations: Any
    num_generations_eval: Any
    router_aux_loss_coef: Any

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOExtConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        """As `trl.GRPOTrainer`; `args` may be left out, a plain `GRPOConfig` is refused."""
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = GRPOExtConfig(f"{name.split('/')[-1] or 'model'}-GRPO")
        if not isinstance(args, GRPOExtConfig):
            raise TypeError(
                f"args is a {type(args).__name__}: give a GRPOExtConfig, which has the same fields and more."
            )
        self.objective: Objective = args.objective
        check_data(args, train_dataset, eval_dataset)
        accept_numbered_cpu()
        ours = in_place_of_trls(args.use_vllm, args.vllm_weight_transfer, args.sampler_dtype)
        with reference_copied_from(model, args, kwargs.get("peft_config")), ours:
            super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, processing_class, **kwargs)
        check_reward_names(self.reward_func_names)
        self._contain_rewards()
        if self.rollout_func is not None:
            self.rollout_func = without_empty_completions(self.rollout_func, self._tokenizer.eos_token_id)
        if args.dropout_disabled:
            switch_dropout_off(self.model)
        elif dropout := active_dropout(self.model):
            logger.warning(f"dropout is active in {', '.join(dropout)}: rollouts and the loss see different networks.")
        obstacle = forward_obstacle(args)
        precise = self.accelerator.mixed_precision == "no"
        self.sharing = PrefixSharing(args.prefix_setting, self.model, further=obstacle, full_precision=precise)
        if args.prefix_setting == "true" and not self.sharing.possible:
            raise ConfigError([f"shared_prefix=true is not exact here: {self.sharing.reason}. {CURE}"])
        self._name_objective()
        self._drift = DriftCheck(self) if self.use_vllm and args.rollout_drift != 0 else None
        self._engine = engine_for(self)
        self._sampler = DynamicSampler(self) if args.dynamic_sampling is not None else None
        self._settled: Settled | None = None
        self._history: deque[Tensor] = deque(maxlen=self.objective.advantage_kwargs.get("window", 1) - 1)
        self._rewards_per_func: Tensor | None = None
        self._denominators = Denominators(self)
        self._arranged: list[dict[str, Any]] | None = None

    def _name_objective(self) -> None:
        """Tell the user, the model card, and those attributes that stock TRL goes on to read."""
        objective = self.objective
        self.scale_rewards = objective.advantage if objective.advantage in ("group", "batch", "none") else "group"
        in_trl = ("sum_then_normalize", "normalize_then_sum")
        self.multi_objective_aggregation = objective.combination if objective.combination in in_trl else in_trl[0]
        self._name = f"GRPO ({objective.loss_type})"
        title, _, arxiv = objective.row.paper.partition(", arXiv:")
        self._paper = {"title": title, "id": arxiv.split(",")[0]} if arxiv else {}
        self.accelerator.print(f"{objective.describe()} | {objective.row.formula} | {objective.row.paper}")
        self.accelerator.print(self.sharing.describe())

    # Rollouts: stock TRL's, guarded where it would crash or reuse what is stale.

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; a second call starts from fresh rollouts."""
        self._buffered_inputs = None
        self._step = 0
        try:
            return super().train(*args, **kwargs)
        except (ServerLost, RolloutDrift) as error:
            self._save_and_explain(error)
            raise

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As TRL's, after a check that evaluation batches hold whole groups.

        Raises:
            ConfigError: they do not.
        """
        problems = list(eval_batch_problems(self.args))
        if problems:
            raise ConfigError(problems)
        return super().evaluate(*args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple[list[list[int]], Any]:
        with self._engine(self.accelerator.unwrap_model(self.model_wrapped)):
            completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        fill_empty(completion_ids, logprobs, self._tokenizer.eos_token_id)
        return completion_ids, logprobs

    def _generate(self, prompts: list) -> tuple[Any, ...]:
        return super()._generate(prompts) if self._settled is None else self._settled.generation

    # Advantages: from the rewards that TRL gathers, by the objective's estimator.

    def _contain_rewards(self) -> None:
        """No reward may raise on one process alone: the others would wait for it until their collective times out."""
        self._reward_errors: list[str] = []
        self.reward_runtime = next((f.runtime for f in self.reward_funcs if isinstance(f, Component)), None)
        if self.reward_runtime is not None:
            self.reward_runtime.deferred = True
            self._reward_errors = self.reward_runtime.errors
        self.reward_funcs = [contained(f, self._reward_errors) for f in self.reward_funcs]

    def close_rewards(self) -> None:
        """End the processes that score rewards; they would otherwise wait for the next batch."""
        if self.reward_runtime is not None:
            self.reward_runtime.close()

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._settled is not None:
            self._pending_extra_logs.update(self._settled.logged)
            self._rewards_per_func = self._settled.rewards
            return self._rewards_per_func
        for i, function in enumerate(self.reward_funcs):
            if isinstance(function, Component) and function.spec.weight_schedule is not None:
                self.reward_weights[i] = function.weight(self.state.global_step, self.state.max_steps)
        rewards = super()._calculate_rewards(*args, **kwargs)
        errors = gather_object(self._reward_errors) if self.accelerator.num_processes > 1 else self._reward_errors
        if errors:
            raise RewardError("\n".join(errors))
        for column in rewards.isinf().any(dim=0).nonzero().flatten().tolist():
            logger.warning(
                f"reward {self.reward_func_names[column]!r} returned {int(rewards[:, column].isinf().sum())} infinite "
                "values: those completions count as not scored by it."
            )
        self._rewards_per_func = rewards.masked_fill(rewards.isinf(), torch.nan)
        return self._rewards_per_func

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        mode = "train" if self.model.training else "eval"
        if self._sampler is not None and mode == "train":
            self._settled = self._sampler.settle(inputs)
            inputs = self._settled.examples
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self._settled = None
        if mode == "train" and self._drift is not None and "sampling_per_token_logps" in output:
            self._drift.due = True
            if "old_per_token_logps" in output:
                self._drift(output["old_per_token_logps"], output)
        rewards, weights = self._grouped_rewards(mode), self.reward_weights.double().to(self.accelerator.device)
        total = weighted_total(rewards, weights, missing=self.objective.missing_rewards)
        self._log_rewards(total, mode)
        if self.objective.stock_advantages and self.args.loss_defaults == "trl":
            return output
        if self.objective.kl_in_reward:
            total = total - self.objective.beta * self._reward_kl(output, mode).view_as(total)
            rewards, weights = total[..., None], weights.new_ones(1)
        values = self._advantages(rewards, weights, total, mode).flatten().to(output["advantages"].dtype)
        local = len(output["advantages"])
        output["advantages"] = values[self.accelerator.process_index * local :][:local].clone()
        self._replace_logged_advantages(values.tolist())
        return output

    def _grouped_rewards(self, mode: str) -> Tensor:
        """Rewards [groups, completions, functions] of all processes."""
        assert self._rewards_per_func is not None
        g = self.num_generations if mode == "train" else self.num_generations_eval
        return self._rewards_per_func.double().view(-1, g, self._rewards_per_func.shape[1])

    def _log_rewards(self, total: Tensor, mode: str) -> None:
        """The total that trains, in place of TRL's, which counts a partial None as 0; and the silent groups."""
        metrics = self._metrics[mode]
        if self.objective.missing_rewards != "zero":
            metrics["reward"][-1] = total.nanmean().item()
            metrics["reward_std"][-1] = nanstd(total).item()
        metrics["advantages/zero_variance_groups"].append(zero_variance(total).float().mean().item())

    def _advantages(self, rewards: Tensor, weights: Tensor, total: Tensor, mode: str) -> Tensor:
        history = torch.cat(list(self._history)).to(rewards.device) if self._history else None

        def log_metric(name: str, value: float) -> None:
            self._metrics[mode][name].append(value)

        values = self.objective.advantages(rewards, weights, history, log_metric)
        if mode == "train" and self._history.maxlen:
            columns = [*rewards.unbind(dim=-1), total]
            self._history.append(torch.stack([group_means(column) for column in columns], dim=-1).cpu())
        return values

    def _replace_logged_advantages(self, values: list[float]) -> None:
        """Swap the tail that TRL has just appended to the table of completions."""
        logged = self._logs["advantages"]
        for _ in range(min(len(values), len(logged))):
            logged.pop()
        logged.extend(values)

    @torch.no_grad()
    def _reward_kl(self, output: dict[str, Any], mode: str) -> Tensor:
        """KL estimate of each completion of all processes, summed over its tokens."""
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        old = output.get("old_per_token_logps")
        if old is None:
            old, _, _ = self._forward(self.model, output, batch_size=self.args.per_device_train_batch_size)
            output["old_per_token_logps"] = old
        per_token = self.objective.kl_penalty({"log_ref_ratio": masked(output["ref_per_token_logps"] - old, mask)})
        penalty = self.accelerator.gather(per_token.sum(dim=-1)).double()
        self._metrics[mode]["kl"].append(penalty.mean().item())
        return penalty

    # The loss.

    def _forward(self, model: Any, inputs: dict[str, Any], **kwargs: Any) -> tuple[Tensor, Any, Any]:
        """Log-probabilities of the completion's tokens, entropies, auxiliary loss."""
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            **{name: inputs[name] for name in MULTIMODAL_INPUTS if name in inputs},
            **kwargs,
        )

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        options = {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss}
        stock = super()._get_per_token_logps_and_entropies
        if not self.sharing.possible or any(value is not None for value in multimodal.values()):
            return stock(model, input_ids, attention_mask, logits_to_keep, batch_size, **options, **multimodal)

        def plain(ids: Tensor, mask: Tensor, completion: int) -> Any:
            return stock(model, ids, mask, completion, **options)

        def packed(ids: Tensor, layout: Layout, completion: int, **extra: Any) -> Any:
            base = causal_lm(self.accelerator.unwrap_model(model))
            with self.accelerator.autocast():
                return log_probs(model, base, ids, layout, completion, **extra)

        rows = batch_size or len(input_ids)
        return self.sharing.scores(plain, packed, input_ids, attention_mask, logits_to_keep, rows, **options)

    def _live_rows(self, inputs: dict[str, Any], mode: str) -> Tensor | None:
        """Rows that have a gradient, or None where all are to be computed."""
        if mode != "train" or not self._skips or any(name in inputs for name in MULTIMODAL_INPUTS):
            return None
        if self._drift is not None and self._drift.due:
            return None
        live = ~micro_batches.silent(inputs["advantages"])
        return None if live.all() else live

    @property
    def _skips(self) -> bool:
        """Whether a completion without an advantage has no part in the loss, nor in what steers the run."""
        terms = self.objective.kl_in_loss or self._entropy_bonus_enabled or self.aux_loss_enabled
        coupled = self.top_entropy_quantile < 1.0 or self.off_policy_mask_threshold is not None
        own = self.objective.row.function.__module__ == surrogates.__name__
        return self.args.zero_advantages_skipped and own and not terms and not coupled

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        objective, mode = self.objective, "train" if self.model.training else "eval"
        live = self._live_rows(inputs, mode)
        if live is None:
            logps, entropies, aux_loss = self._forward(
                model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
            )
        else:
            forward = partial(self._forward, model, compute_entropy=True)
            logps, entropies = micro_batches.of_live_rows(forward, inputs, live)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        if mode == "train" and self._drift is not None and self._drift.due:
            self._drift(logps.detach(), inputs)
        tensors = objective.tensors(logps, inputs, mask)
        entropy_mask = None
        if self.top_entropy_quantile < 1.0:
            entropy_mask = self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)

        per_token_loss = objective.surrogate_loss(tensors)
        for factor in self._loss_factors(tensors, inputs, entropy_mask):
            per_token_loss = per_token_loss * factor
        if objective.kl_in_loss:
            tensors["kl"] = objective.kl_penalty(tensors)
            per_token_loss = per_token_loss + objective.beta * tensors["kl"]

        world = self.accelerator.num_processes  # processes average their gradients; the shares are to be added
        totals = self._denominators.of(inputs, mask, mode)
        loss = policy_loss = objective.aggregate(per_token_loss, mask, totals) * world
        accumulation = self.current_gradient_accumulation_steps if mode == "train" else 1.0
        if self._entropy_bonus_enabled:
            logged = policy_loss.detach() * (1.0 if objective.aggregation == "token-mean" else accumulation)  # as TRL
            self._metrics[mode]["policy_loss"].append(self.accelerator.gather(logged).nanmean().item())
            loss = loss - entropy_bonus(self, entropies, mask, entropy_mask, totals, mode)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss / accumulation
            self._metrics[mode]["aux_loss"].append(self.accelerator.gather_for_metrics(aux_loss).mean().item())
        log_loss_metrics(self, tensors, entropies, self._metrics[mode], live)
        return loss

    def _loss_factors(
        self, tensors: dict[str, Any], inputs: dict[str, Any], entropy_mask: Tensor | None
    ) -> Iterator[Tensor]:
        """What TRL multiplies the surrogate with: off-policy mask, high-entropy mask, correction of the sampler."""
        if self.off_policy_mask_threshold is not None:
            yield self.get_off_policy_mask(
                advantages=tensors["advantages"],
                per_token_logps=tensors["per_token_logps"],
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", tensors["old_per_token_logps"]),
                mask=tensors["mask"],
                off_policy_threshold=self.off_policy_mask_threshold,
            )
        if entropy_mask is not None:
            yield entropy_mask
        corrected = self.use_vllm and self.vllm_importance_sampling_correction
        if corrected and not self.objective.corrects_sampler:
            yield tensors["importance_sampling_ratio"]

    # Micro-batches.

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs = super()._prepare_inputs(generation_batch)
        fresh = self._buffered_inputs is not None and self._buffered_inputs is not self._arranged
        if self.model.training and fresh and self._regroups:
            window = self.args.gradient_accumulation_steps
            self._buffered_inputs = micro_batches.regroup(self._buffered_inputs, window, self._skips)
            inputs = self._buffered_inputs[self._step % len(self._buffered_inputs)]
        self._arranged = self._buffered_inputs
        if self.model.training:
            self._denominators.count(self._buffered_inputs)
        return inputs

    @property
    def _regroups(self) -> bool:
        """Whether groups stay together and padding goes; stock TRL scatters rows and keeps the padding.

        Not where a micro-batch's part of the loss depends on which rows it holds.
        """
        text_only = not any(name in MULTIMODAL_INPUTS for name in self._buffered_inputs[0])
        additive = self.objective.aggregation in micro_batches.ADDITIVE and self.top_entropy_quantile == 1.0
        additive = additive and not self.aux_loss_enabled
        return self.sharing.possible and self.args.exact_denominators and text_only and additive

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """As TRL's, also above the 2^24 tokens at which `torch.quantile` gives up."""
        return high_entropy_mask(self.accelerator, entropies, mask, threshold)

    # Checkpoints carry what the objective was and what its estimator remembers.

    def save_objective(self, folder: str | Path) -> None:
        """Write the resolved loss beside a model."""
        if self.args.should_save:
            (Path(folder) / OBJECTIVE_FILE).write_text(json.dumps(self.objective.to_dict(), indent=2))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        self.save_objective(folder)
        if self._history.maxlen and self.args.should_save:
            (folder / HISTORY_FILE).write_text(json.dumps([h.tolist() for h in self._history]))
        if self._sampler is not None and self.args.should_save:
            (folder / SAMPLING_FILE).write_text(json.dumps({"drawn": self._sampler.prompts.drawn}))

    def _save_and_explain(self, error: Exception) -> None:
        """Before a run ends for want of a sound sampler, keep what it has learned."""
        folder = Path(self._get_output_dir(trial=None)) / f"checkpoint-{self.state.global_step}"
        saved = [folder.exists()]
        broadcast_object_list(saved, from_process=0)  # all processes save or none: one may be creating it already
        if self.state.global_step and not saved[0]:
            self._save_checkpoint(self.model, trial=None)
        kept = f"The run can be resumed from {folder}." if self.state.global_step else "No step had been made."
        error.args = (f"{error}\n{kept}",)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        path = Path(checkpoint or "") / HISTORY_FILE
        if checkpoint is not None and path.exists():
            self._history.extend(torch.tensor(h, dtype=torch.float64) for h in json.loads(path.read_text()))
        path = Path(checkpoint or "") / SAMPLING_FILE
        if checkpoint is not None and self._sampler is not None and path.exists():
            self._sampler.prompts.drawn = json.loads(path.read_text())["drawn"]
