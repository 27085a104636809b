"""GRPOExtTrainer: TRL's GRPOTrainer with the loss and the advantages of `grpo_ext.objective.losses`."""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object
from peft import PeftConfig, PeftModel
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from trl.trainer.utils import nanstd

from grpo_ext.config.adapters import make_portable
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.machine import machine_problems
from grpo_ext.data.given import as_dataset
from grpo_ext.environments.composition import EnvironmentSpec
from grpo_ext.environments.composition import parse as parse_environments
from grpo_ext.environments.fit import beside_problems, setting_problems
from grpo_ext.environments.fit import data_problems as environment_data_problems
from grpo_ext.errors import ConfigError, RewardError
from grpo_ext.objective.advantages import estimators, zero_variance
from grpo_ext.objective.aggregation import StepTotals
from grpo_ext.objective.combinations import weighted_total, weighted_turns
from grpo_ext.objective.ratios import masked
from grpo_ext.objective.trajectory import COLUMN, Trajectory
from grpo_ext.packing import micro_batches
from grpo_ext.packing.dropout import active_dropout, switch_dropout_off
from grpo_ext.packing.forward import log_probs
from grpo_ext.packing.layout import Layout
from grpo_ext.packing.micro_batches import PARENTS
from grpo_ext.packing.obstacles import causal_lm, forward_obstacle
from grpo_ext.packing.policy import CURE, PrefixSharing
from grpo_ext.rewards.containment import contained
from grpo_ext.rewards.runtime import Component
from grpo_ext.rollout.dynamic_sampling import DynamicSampler, Settled
from grpo_ext.rollout.empty_completions import fill_empty, without_empty_completions
from grpo_ext.rollout.seeds import AttemptId
from grpo_ext.rollout.trajectories import completions_seen, parents_of, with_trajectories
from grpo_ext.rollout.transformers_engine import grouped_engine
from grpo_ext.rollout.vllm.drift import DriftCheck
from grpo_ext.rollout.vllm.lazy_import import GRPOTrainer, with_our_generation
from grpo_ext.trainer import groups, old_policy
from grpo_ext.trainer.acting import Acting, earned_by
from grpo_ext.trainer.advantages import GroupMeans, gathered, per_completion, replace_tail, without_signal
from grpo_ext.trainer.arguments import (
    EnvironmentFactory,
    Reward,
    RolloutFunc,
    Rows,
    check_reward_names,
    data_problems,
    named_arguments,
    policy,
    quantized_problems,
)
from grpo_ext.trainer.callbacks import MetricsFile, StepTimes, install_progress
from grpo_ext.trainer.checkpoints.state import accept_numbered_cpu
from grpo_ext.trainer.diagnosis.recording import DRAWN, ROWS, add_ess, log_rows, row_record
from grpo_ext.trainer.diagnosis.watching import Watching
from grpo_ext.trainer.entropy import entropy_bonus, high_entropy_mask
from grpo_ext.trainer.evaluating import batch_weight
from grpo_ext.trainer.findings import BadTensor
from grpo_ext.trainer.generation import Generation, counted, counted_alone, live_mask, stock
from grpo_ext.trainer.lifecycle import Lifecycle
from grpo_ext.trainer.metrics import Figures, loss_figures
from grpo_ext.trainer.recording import with_rewards
from grpo_ext.trainer.reference import reference_copied_from
from grpo_ext.trainer.replaying import RecordedBatches, rollouts_set_aside
from grpo_ext.trainer.rewards import ready
from grpo_ext.trainer.turns import Earned, earned_by_turn, tokens_of, turn_tensors
from grpo_ext.trainer.zero_advantages import AdvantageMonitor

logger = logging.getLogger(__name__)

_FORWARD = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
MULTIMODAL_INPUTS = _FORWARD[_FORWARD.index("compute_aux_loss") + 1 :]
"""What TRL's forward takes beside tokens: images and all that belongs to them."""


class GRPOExtTrainer(Lifecycle):
    """`trl.GRPOTrainer` whose `loss_type` names a row of `grpo_ext.objective.losses`; takes the same arguments.

    Raises:
        ConfigError: what is wrong with the arguments, before anything is loaded.
    """

    _tag_names = ["trl", "grpo", "grpo-ext"]  # noqa: RUF012 (TRL's own declaration)
    _logs: dict[str, Any]
    _pending_extra_logs: Any
    model_wrapped: Any
    _entropy_window_stats: Any
    num_generations: Any
    num_generations_eval: Any
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
        """As `trl.GRPOTrainer`; `args` may be left out, a plain `GRPOConfig` is refused.

        Args:
            model: hub id, folder or loaded model; also 'quickstart', the tiny model that grpo-ext builds itself.
            reward_funcs: also what a recipe may name: 'accuracy', 'my_module:my_function', {'name': 'format',
                'weight': 0.2, 'kwargs': {...}}, where 'func' may be a function.
            args: the settings; by default those of `GRPOExtConfig` with the model's name as `output_dir`.
            train_dataset: also a list of rows, a pandas frame, or a generator, which is read to its end.
            eval_dataset: the same, or several by name.
            processing_class: tokenizer or processor; by default the one in the model's folder.
            reward_processing_classes: tokenizers of the reward models among `reward_funcs`.
            callbacks: added to those of transformers.
            optimizers: optimizer and learning-rate schedule in place of those that `args` describe.
            quantization_config: how the model's weights are quantized when it is loaded.
            peft_config: a new adapter to train.
            tools: functions that the model may call.
            rollout_func: makes the completions in place of TRL; may return trajectories.
            environment_factory: makes TRL's environments, whose methods are tools.
            reward_workers: processes that score what is named; 0: this one. As in a recipe.
            environments: what completions are conversations with, as in a recipe; `path` may be a class.
            reward_memory_gib: memory that an environment's process may use.
        """
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = GRPOExtConfig(f"{name.split('/')[-1] or 'model'}-GRPO")
        if not isinstance(args, GRPOExtConfig):
            raise TypeError(
                f"args is a {type(args).__name__}: give a GRPOExtConfig, which has the same fields and more."
            )
        self.objective = args.objective
        train_dataset = as_dataset(train_dataset, "train_dataset")
        eval_dataset = as_dataset(eval_dataset, "eval_dataset")
        made = environment_factory is not None
        problems = [*machine_problems(args, None)]
        problems += data_problems(args, train_dataset, eval_dataset, prompts_made=made)
        specs, found = parse_environments(environments)
        rollouts = {"rollout_func": rollout_func, "environment_factory": environment_factory, "tools": tools}
        problems += [*found, *setting_problems(specs, args), *beside_problems(specs, rollouts)]
        evaluated = eval_dataset.values() if isinstance(eval_dataset, Mapping) else [eval_dataset]
        played = [environment_data_problems(specs, dataset) for dataset in (train_dataset, *evaluated)]
        problems += dict.fromkeys(problem for found in played for problem in found)
        problems += quantized_problems(args, model, quantization_config)
        earned = earned_by(specs)
        scored: Any = reward_funcs
        if reward_funcs or environment_factory is None:  # which may bring a reward along
            scored, args = ready(reward_funcs, args, reward_workers, train_dataset, earned, problems)
        if problems:
            raise ConfigError(problems)
        self.acting: Acting | None = None
        model = policy(model)
        accept_numbered_cpu()
        aside = rollouts_set_aside(args)
        with aside, reference_copied_from(model, args, peft_config), with_our_generation(args):
            super().__init__(
                model,
                scored,
                args,
                train_dataset,
                eval_dataset,
                processing_class,
                reward_processing_classes,
                callbacks,
                optimizers,
                quantization_config,
                peft_config,
                tools,
                rollout_func,
                environment_factory,
            )
        if problems := [*quantized_problems(args, self.model, None)]:  # of a model that is only known by its name
            raise ConfigError(problems)
        if specs:
            self.rollout_func = self.acting = Acting(self, specs, reward_memory_gib)
        self._look_on()
        make_portable(self.model)
        check_reward_names(self.reward_func_names)
        self._contain_rewards()
        if self.rollout_func is not None:
            ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
            self.rollout_func = with_trajectories(self.rollout_func, ends)
            self.rollout_func = without_empty_completions(self.rollout_func, self._tokenizer.eos_token_id)
        if args.dropout_disabled:
            switch_dropout_off(self.model)
        elif dropout := active_dropout(self.model):
            logger.warning(f"dropout is active in {', '.join(dropout)}: rollouts and the loss see different networks.")
        obstacle = forward_obstacle(args)
        self.sharing = PrefixSharing(args.prefix_setting, self.model, further=obstacle)
        if args.prefix_setting == "true" and not self.sharing.possible:
            raise ConfigError([f"shared_prefix=true is not exact here: {self.sharing.reason}. {CURE}"])
        if self.rollout_func is not None and self.accelerator.num_processes > 1:
            self.sharing.agreed = self._most
        self._name_objective()
        self._replayed: Callable[[Any], Generation] | None = (
            None if args.replay_batches is None else RecordedBatches(args.replay_batches)
        )
        drift = self.use_vllm and args.rollout_drift != 0
        self._drift = DriftCheck(args, self.vllm_generation) if drift else None
        self._engine = grouped_engine(args, sharded=self.is_fsdp_enabled)
        self._made: list[Trajectory] | None = None  # trajectories of the batch that TRL is making
        self._sampler = DynamicSampler(self) if args.dynamic_sampling is not None else None
        self._group_means = GroupMeans(self.objective.remembered_batches)
        self._rewards_per_func: Tensor | None = None
        self._earned: list[Earned] = []
        self._generation = Generation()
        self._figures = Figures()
        self._advantage_monitor = AdvantageMonitor(self.reward_func_names, warns=self.accelerator.is_main_process)
        self.use_vllm = args.use_vllm  # of which a replay has the corrections alone

    def _most(self, number: int) -> int:
        """Return the largest of all processes' numbers."""
        return int(self.accelerator.gather(torch.tensor([number], device=self.accelerator.device)).max())

    def _look_on(self) -> None:
        """What tells of a run while it trains: the line of a step, its clock, the file of metrics, the doctor."""
        metrics = self._metrics["train"]
        install_progress(self.callback_handler.callbacks, disable_tqdm=self.args.disable_tqdm)
        self._times = StepTimes(metrics, self.accelerator.device, ("rollout", "rewards"))
        if self.acting is not None:
            self._times.parts += ("environments",)
            self.acting.waiting = partial(self._times.during, "environments")
        if self.use_vllm:
            self._times.parts += ("weight_push",)
            self.vllm_generation.pushing = partial(self._times.during, "weight_push")
        for callback in (self._times, MetricsFile(), Watching(metrics)):
            self.add_callback(callback)

    def _name_objective(self) -> None:
        """Tell the user, the model card, and those attributes that stock TRL goes on to read."""
        objective = self.objective
        self.scale_rewards = objective.advantage if estimators.traits(objective.advantage).trl else "group"
        in_trl = ("sum_then_normalize", "normalize_then_sum")
        self.multi_objective_aggregation = objective.combination if objective.combination in in_trl else in_trl[0]
        self._name = f"GRPO ({objective.loss_type})"
        title, _, arxiv = objective.row.paper.partition(", arXiv:")
        self._paper = {"title": title, "id": arxiv.split(",")[0]} if arxiv else {}
        departures = objective.departures()
        paper = f"{objective.row.paper}, but for the {', '.join(departures)}" if departures else objective.row.paper
        self.accelerator.print(f"{objective.describe()} | {objective.row.formula} | {paper}")
        self.accelerator.print(self.sharing.describe())

    # Rollouts: stock TRL's, guarded where it would crash or reuse what is stale.

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple[list[list[int]], Any]:
        model = self.accelerator.unwrap_model(self.model_wrapped)
        with nullcontext() if self._engine is None else self._engine.generating(model) as drawn:
            completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        if drawn and self.model.training:
            logprobs = [row[: len(ids)].tolist() for row, ids in zip(drawn[-1], completion_ids, strict=True)]
        fill_empty(completion_ids, logprobs, self._tokenizer.eos_token_id)
        return completion_ids, logprobs

    def _generate(self, prompts: list) -> tuple[Any, ...]:
        if (settled := self._settled) is not None:
            generated = settled.generation
        else:
            with self._times.during("rollout"), self._sampling():
                generated = super()._generate(prompts)
            if self._evaluated is not None:
                ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
                self._evaluated.add_completions(generated[1], generated[2], ends, self.accelerator)
        ids, completion_ids, tool_mask, completions, logprobs, extra, *images = generated
        trajectories = extra.get(COLUMN)
        if trajectories is not None:
            completions = completions_seen(trajectories, completions)
        if self._made is not None:
            self._made = trajectories or []
        return ids, completion_ids, tool_mask, completions, logprobs, extra, *images

    def rollouts(
        self, rows: list[dict[str, Any]], attempts: list[AttemptId]
    ) -> tuple[list[dict[str, Any]], tuple[Any, ...]]:
        """What `_generate` makes of rows, and the rows with what a rollout function said of each, as TRL has them.

        Environments and their turns are seeded by `attempts`, one for each row.
        """
        if self.acting is not None:
            self.acting.rows, self.acting.attempts = rows, attempts
        generated = self._generate([row["prompt"] for row in rows])
        extra = generated[5]
        said = [{k: v[i] if isinstance(v, list) else v for k, v in extra.items()} for i in range(len(rows))]
        return [{**row, **more} for row, more in zip(rows, said, strict=True)], generated

    def silent_groups(self, settled: Settled) -> Tensor:
        """Groups of all processes, [groups], in which no completion would have an advantage."""
        rewards = settled.rewards.double().view(-1, self.num_generations, settled.rewards.shape[1])
        weights, tokens = self.reward_weights.double().to(rewards.device), {}
        if self.objective.sees_tokens:
            tokens = tokens_of(settled.rows, sees_turns=self.objective.sees_turns)
            tokens = {name: tensor.to(self.accelerator.device) for name, tensor in tokens.items()}
            tokens = gathered(tokens, self.num_generations, self.accelerator)
        history = self._group_means.on(rewards.device)
        return without_signal(self.objective.advantages(rewards, weights, history, lambda *_: None, **tokens))

    @property
    def _settled(self) -> Settled | None:
        """The batch that dynamic sampling has settled and TRL is being handed, if any."""
        return None if self._sampler is None else self._sampler.settled

    # Advantages: from the rewards that TRL gathers, by the objective's estimator.

    def _contain_rewards(self) -> None:
        """No reward may raise on one process alone: the others would wait for it until their collective times out."""
        self._reward_errors: list[str] = []
        self.reward_runtime = next((f.runtime for f in self.reward_funcs if isinstance(f, Component)), None)
        if self.reward_runtime is not None:
            self.reward_runtime.deferred = True
            self._reward_errors = self.reward_runtime.errors
        self._nonfinite_rewards: dict[str, list[int]] = {}
        self.reward_funcs = [contained(f, self._reward_errors, self._nonfinite_rewards) for f in self.reward_funcs]

    def close_rewards(self) -> None:
        """End the processes that score rewards and run environments; they would otherwise wait for the next batch."""
        if self.acting is not None:
            self.acting.close()
        if self.reward_runtime is not None:
            self.reward_runtime.close()

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self._drawn = args[3]
        if (settled := self._settled) is not None:
            self._pending_extra_logs.update(settled.logged)
            self._rewards_per_func, self._earned = settled.rewards, settled.earned
            return settled.rewards
        for i, function in enumerate(self.reward_funcs):
            if isinstance(function, Component) and function.spec.weight_schedule is not None:
                self.reward_weights[i] = function.weight(self.state.global_step, self.state.max_steps)
        with self._times.during("rewards"):
            rewards = super()._calculate_rewards(*args, **kwargs)
        self._earned = earned_by_turn(self.reward_funcs, len(args[2]))
        found, problem = self._no_numbers(rewards, *args[1:3])
        said = [(self._reward_errors.copy(), found, problem)]
        said = gather_object(said) if self.accelerator.num_processes > 1 else said
        self._reward_errors.clear()  # told once: a later call of train starts without them
        if errors := [error for errors, _, _ in said for error in errors]:
            raise RewardError("\n".join(errors))
        if findings := [BadTensor(**finding) for _, found, _ in said for finding in found]:
            self._guard.rewards(findings, next((problem for _, _, problem in said if problem), ""))
        unscored = rewards.isinf()
        if self.acting is not None:
            attempts = [row[COLUMN] for row in args[0]]
            unscored |= self.accelerator.gather(self.acting.unscored(attempts, rewards.shape[1]).to(rewards.device))
            for name, values in self.acting.columns(attempts).items():
                self._pending_extra_logs[name].extend(values)
        self._rewards_per_func = rewards.masked_fill(unscored, torch.nan)
        return self._rewards_per_func

    def _no_numbers(self, rewards: Tensor, prompts: list, completions: list) -> tuple[list[dict[str, Any]], str]:
        """What this process's rewards returned that is NaN or inf, and why it could not be saved if it could not."""
        rank, names = self.accelerator.process_index, self.reward_func_names
        mine = rewards[rank * len(completions) :][: len(completions)]
        rows = {n: self._nonfinite_rewards.get(n, []) for n in names}
        for i, function in enumerate(self.reward_funcs):
            if isinstance(function, Component | torch.nn.Module):  # of which a Component says None by NaN
                bad = mine[:, i].isinf() if isinstance(function, Component) else ~mine[:, i].isfinite()
                rows[names[i]] = bad.nonzero().flatten().tolist()
        return self._guard.of_rewards(mine, rows, names, prompts, completions) if any(rows.values()) else ([], "")

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        mode = "train" if self.model.training else "eval"
        settling: AbstractContextManager[list[dict[str, Any]]] = nullcontext(inputs)
        if self._sampler is not None and mode == "train":
            settling = self._sampler.settling(inputs, self.attempt_ids(len(inputs)))
        self._made = []
        try:
            with settling as inputs, old_policy.no_early_pass(self.args):
                if self.acting is not None:
                    self.acting.rows, self.acting.attempts = inputs, self.attempt_ids(len(inputs))
                output = super()._generate_and_score_completions(inputs)
        finally:
            made, self._made = self._made, None
        if made and (parents := parents_of(made, output["completion_ids"].shape[1])) is not None:
            output[PARENTS] = parents.to(self.accelerator.device)
        if self.acting is not None and self.log_completions:
            replace_tail(self._logs["prompt"], gather_object([attempt.opening for attempt in made]))
        if self._evaluated is not None and self._rewards_per_func is not None:
            rank, rewards_per_func = self.accelerator.process_index, self._rewards_per_func
            mask = self._evaluated.mask_fillers(output["completion_mask"], rewards_per_func, rank)
            output["completion_mask"] = mask
        draws_itself = not self.use_vllm and (self.rollout_func is None or self.acting is not None)
        if draws_itself and "sampling_per_token_logps" in output:
            output[DRAWN] = output.pop("sampling_per_token_logps")  # which no mask of the loss is to be made of
        early = output.pop("old_per_token_logps", None)  # over other micro-batches than the loss: not for its ratio
        if mode == "train" and self._drift is not None and "sampling_per_token_logps" in output:
            self._drift.due = True
            if early is not None:
                self._check_drift(early, output)
        rewards, weights = self._grouped_rewards(mode), self.reward_weights.double().to(self.accelerator.device)
        total = weighted_total(rewards, weights, missing=self.objective.missing_rewards)
        self._log_rewards(rewards, total, mode)
        if mode == "train":
            output |= with_rewards(output, rewards, self.accelerator.process_index)
            output[ROWS] = self._row_record(output, rewards, total)
        if self.objective.stock_advantages and self.args.loss_defaults == "trl":
            self._note_zero_advantages(rewards, zero_variance(total), mode)
            return output
        scored = rewards
        tokens = self._tokens(output, early, made, rewards.shape[1], mode) if self.objective.sees_tokens else {}
        if self.objective.kl_in_reward:
            if "turn_rewards" in tokens:
                missing = self.objective.missing_rewards
                earned = weighted_turns(tokens["turn_rewards"], rewards, weights, missing=missing)
                tokens["turn_rewards"] = earned.unsqueeze(-2)
            rewards = self.objective.less_kl(rewards, weights, tokens["mask"], tokens["kl"])
            weights = weights.new_ones(1)
            total = rewards.squeeze(-1)
        values = self._advantages(rewards, weights, total, mode, tokens).to(output["advantages"].dtype)
        self._note_zero_advantages(scored, without_signal(values), mode)
        values = values.flatten(0, 1)
        replace_tail(self._logs["advantages"], per_completion(values, tokens.get("mask")).tolist())
        local, width = output["completion_ids"].shape
        mine = values[self.accelerator.process_index * local :][:local]
        output["advantages"] = (mine if mine.dim() == 1 else mine[:, :width]).clone()
        return output

    def _grouped_rewards(self, mode: str) -> Tensor:
        """Rewards [groups, completions, functions] of all processes."""
        assert self._rewards_per_func is not None
        g = self.num_generations if mode == "train" else self.num_generations_eval
        return self._rewards_per_func.double().view(-1, g, self._rewards_per_func.shape[1])

    def _row_record(self, output: dict[str, Any], rewards: Tensor, total: Tensor) -> Tensor:
        """What this process's rows carry along for a diagnosis."""
        local = len(output["completion_ids"])
        first = self.accelerator.process_index * local
        mine = slice(first, first + local)
        rewards, total = rewards.flatten(0, 1)[mine], total.flatten()[mine]
        return row_record(rewards, total, self._drawn, first, self.num_generations)

    def _log_rewards(self, rewards: Tensor, total: Tensor, mode: str) -> None:
        """The total that trains, in place of TRL's, which counts a partial None as 0; and the kinds of groups."""
        metrics = self._metrics[mode]
        if self.objective.missing_rewards != "zero":
            metrics["reward"][-1] = total.nanmean().item()
            metrics["reward_std"][-1] = nanstd(total).item()
        for name, share in groups.shares(rewards, self.reward_func_names).items():
            metrics[name].append(share)

    def _note_zero_advantages(self, rewards: Tensor, silent: Tensor, mode: str) -> None:
        """Log and remember the groups, [groups], in which no completion has an advantage."""
        self._metrics[mode]["advantages/zero_variance_groups"].append(silent.double().mean().item())
        if mode == "train":
            self._advantage_monitor.add(rewards, bool(silent.all()))
        elif self._evaluated is not None:
            self._evaluated.add_silent(silent, self.num_generations_eval)

    def _advantages(
        self, rewards: Tensor, weights: Tensor, total: Tensor, mode: str, tokens: dict[str, Tensor]
    ) -> Tensor:
        def log_metric(name: str, value: float) -> None:
            if mode == "train":  # of an evaluation these would count the rows that fill up its last batch
                self._metrics[mode][name].append(value)

        history = self._group_means.on(rewards.device)
        values = self.objective.advantages(rewards, weights, history, log_metric, **tokens)
        if mode == "train":
            self._group_means.remember(rewards, total)
        return values

    def _tokens(
        self, output: dict[str, Any], logps: Tensor | None, made: list[Trajectory] | None, group: int, mode: str
    ) -> dict[str, Tensor]:
        """Mask and, where the reward is lowered by it, KL [groups, completions, time] of all processes' tokens.

        `logps` are the policy's log-probabilities where they are known; of trajectories also what turns have earned.
        """
        tokens = {"mask": live_mask(output)}
        if self.objective.kl_in_reward:
            tokens["kl"] = self._reward_kl(output, logps, tokens["mask"], mode)
        if made and self.objective.sees_turns:
            turns = turn_tensors(made, self._earned, output["completion_ids"].shape[1])
            tokens |= {name: tensor.to(self.accelerator.device) for name, tensor in turns.items()}
        return gathered(tokens, group, self.accelerator)

    @torch.no_grad()
    def _reward_kl(self, output: dict[str, Any], logps: Tensor | None, mask: Tensor, mode: str) -> Tensor:
        """KL estimate of each token of this process's completions."""
        if logps is None:
            logps, _, _ = self._forward(self.model, output, batch_size=self.args.per_device_train_batch_size)
        log_ref_ratio = masked(output["ref_per_token_logps"] - logps, mask)
        per_token = self.objective.kl_penalty({"log_ref_ratio": log_ref_ratio, "mask": mask})
        of_each = torch.stack([per_token.sum(dim=1), mask.any(dim=1)], dim=1)
        total, known = self.accelerator.gather(of_each).double().sum(dim=0).tolist()
        self._metrics[mode]["kl"].append(total / max(known, 1.0))
        return per_token

    # The loss.

    def _forward(self, model: Any, inputs: dict[str, Any], **kwargs: Any) -> tuple[Tensor, Any, Any]:
        """Log-probabilities of the completion's tokens, entropies, auxiliary loss."""
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            **{name: inputs[name] for name in (PARENTS, *MULTIMODAL_INPUTS) if name in inputs},
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
        parents = multimodal.pop(PARENTS, None)  # ours alone
        options: dict[str, Any] = {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss}
        stock = super()._get_per_token_logps_and_entropies
        if self._made:  # TRL is making a batch of them, and does not know how their tokens hang together
            parents = parents_of(self._made, logits_to_keep)
        has_images = any(value is not None for value in multimodal.values())
        if parents is not None and has_images:
            raise ValueError("a trajectory whose context was rewritten cannot hold images yet. Leave one of them out.")
        if has_images or (parents is None and not self.sharing.possible and self.sharing.agreed is None):
            return stock(model, input_ids, attention_mask, logits_to_keep, batch_size, **options, **multimodal)

        def plain(ids: Tensor, mask: Tensor, completion: int) -> Any:
            return stock(model, ids, mask, completion, **options)

        base = causal_lm(self.accelerator.unwrap_model(model))

        def packed(ids: Tensor, layout: Layout, completion: int, **extra: Any) -> Any:
            with self.accelerator.autocast():
                return log_probs(model, base, ids, layout, completion, **extra)

        if self.sharing.possible and not self.sharing.checked:
            with old_policy.forward_only(self):
                self.sharing.check(plain, packed, base, input_ids.device)
        rows = batch_size or len(input_ids)
        return self.sharing.scores(
            plain, packed, input_ids, attention_mask, logits_to_keep, rows, **options, parents=parents
        )

    def _scores(self, model: Any, inputs: dict[str, Any], live: Tensor | None) -> tuple[Tensor, Any, Any]:
        """Log-probabilities, entropies, auxiliary loss: one forward for the loss and for old log-probabilities."""
        if live is None:
            return self._forward(model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled)
        forward = partial(self._forward, model, compute_entropy=True)
        return *micro_batches.of_live_rows(forward, inputs, live), None

    def _live_rows(self, inputs: dict[str, Any], mode: str) -> Tensor | None:
        """Rows that have a gradient, or None where all are to be computed."""
        if mode != "train" or not self._skips or any(name in inputs for name in MULTIMODAL_INPUTS):
            return None
        if self._shows_drift(inputs):
            return None
        live = ~micro_batches.silent(inputs["advantages"])
        return None if live.all() else live

    def _check_drift(self, logps: Tensor, inputs: dict[str, Any]) -> None:
        """Compare the sampler with the policy and log the figures."""
        assert self._drift is not None
        for name, value in self._drift.check(logps, inputs, self.accelerator).items():
            self._metrics["train"][name].append(value)

    def _shows_drift(self, inputs: dict[str, Any]) -> bool:
        """Whether the drift check reads all rows of this micro-batch, no pass having come before it."""
        unread = self._drift is not None and "sampling_per_token_logps" in inputs and not self._sampler_corrected
        return unread and inputs is self._buffered_inputs[0]

    @property
    def _sampler_corrected(self) -> bool:
        return self.use_vllm and self.vllm_importance_sampling_correction

    @property
    def _skips(self) -> bool:
        """Whether a completion without an advantage has no part in the loss, nor in what steers the run."""
        terms = self.objective.kl_in_loss or self._entropy_bonus_enabled or self.aux_loss_enabled
        coupled = self.top_entropy_quantile < 1.0 or self.off_policy_mask_threshold is not None
        return self.args.zero_advantages_skipped and self.objective.row.silent_at_zero and not terms and not coupled

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        objective, mode = self.objective, "train" if self.model.training else "eval"
        live = self._live_rows(inputs, mode)
        logps, entropies, aux_loss = self._scores(model, inputs, live)
        if inputs in self._generation:
            inputs.setdefault("old_per_token_logps", logps.detach())
        mask = live_mask(inputs)
        if mode == "train" and self._drift is not None and self._drift.due:
            self._check_drift(logps.detach(), inputs)
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

        seen = entropies if live is None else entropies.detach().masked_fill(~live[:, None], torch.nan)
        self._guard.note(per_token_logps=logps, per_token_loss=per_token_loss, entropies=seen)
        world = self.accelerator.num_processes  # processes average their gradients; the shares are to be added
        totals = self._totals(inputs, mask, mode)
        loss = policy_loss = objective.aggregate(per_token_loss, mask, totals) * world
        accumulation = self.current_gradient_accumulation_steps if mode == "train" else 1.0
        stock = self.args.loss_defaults == "trl"
        figures, regions = loss_figures(objective, tensors, entropies, inputs, live, as_stock=stock)
        weight = loss.new_ones(()) if mode == "train" else batch_weight(objective, totals)
        if self._entropy_bonus_enabled:
            as_trl = stock and objective.aggregation == "token-mean"  # whose shares TRL logs as they are
            figures["policy_loss"] = policy_loss.detach() * (1.0 if as_trl else accumulation), weight
            loss = loss - entropy_bonus(self, entropies, mask, entropy_mask, totals, mode)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss / accumulation
            self._metrics[mode]["aux_loss"].append(self.accelerator.gather_for_metrics(aux_loss).mean().item())
        if self._evaluated is not None:
            figures["loss"] = loss.detach(), weight
        self._figures.add(figures, regions, mask)
        if self._evaluated is None and (mode == "eval" or stock or self.accelerator.sync_gradients):
            self._figures.log(self._metrics[mode], self.accelerator)
            add_ess(self._metrics[mode])
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
        if self._sampler_corrected and not self.objective.corrects_sampler:
            yield tensors["importance_sampling_ratio"]

    # Micro-batches.

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        if self._replayed is not None and self.model.training:
            place = self._step % self.args.gradient_accumulation_steps
            if place == 0:
                self._generation = self._replayed(self)
                self._buffered_inputs = self._generation.micro_batches
            return self._buffered_inputs[place]
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        if self._buffered_inputs is not self._generation.micro_batches:  # TRL has just generated
            self._generation = self._arranged(self._buffered_inputs)
            names, metrics, by_turn = self.reward_func_names, self._metrics["train"], self.objective.sees_turns
            log_rows(self._buffered_inputs, names, metrics, self.accelerator, by_turn=by_turn)
            self._buffered_inputs = self._generation.micro_batches
            inputs = self._buffered_inputs[self._step % len(self._buffered_inputs)]
        if self.accelerator.sync_gradients:  # the policy is about to move
            old_policy.remember(self, [batch for batch in self._buffered_inputs if batch is not inputs])
        return inputs

    def _arranged(self, batches: list[dict[str, Any]]) -> Generation:
        window = self.args.gradient_accumulation_steps
        if self._regroups:
            batches = micro_batches.regroup(batches, window, self._skips)
        return Generation(batches, counted(batches, window, self.accelerator) if self.args.exact_denominators else ())

    def _totals(self, inputs: dict[str, Any], mask: Tensor, mode: str) -> StepTotals:
        """Denominators of the optimizer step that a micro-batch belongs to."""
        steps = self.current_gradient_accumulation_steps if mode == "train" else 1
        if self.args.exact_denominators:
            return self._generation.totals_of(inputs) or counted_alone(mask, steps, self.accelerator)
        share = steps / int(self.args.steps_per_generation or 1) if mode == "train" else 1.0
        return stock(inputs, steps, share, self.accelerator.num_processes)

    @property
    def _regroups(self) -> bool:
        """Whether groups stay together and padding goes; stock TRL scatters rows and keeps the padding.

        Not where a micro-batch's part of the loss depends on which rows it holds.
        """
        text_only = not any(name in MULTIMODAL_INPUTS for name in self._buffered_inputs[0])
        additive = self.objective.additive and self.top_entropy_quantile == 1.0
        additive = additive and not self.aux_loss_enabled
        return self.sharing.possible and self.args.exact_denominators and text_only and additive

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """As TRL's, also above the 2^24 tokens at which `torch.quantile` gives up."""
        return high_entropy_mask(self.accelerator, entropies, mask, threshold)
