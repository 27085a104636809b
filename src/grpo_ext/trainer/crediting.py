"""CreditingTrainer: from the rewards of a generation to its advantages, and their figures."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from grpo_ext.objective.advantages import zero_variance
from grpo_ext.objective.ratios import masked
from grpo_ext.packing.micro_batches import MicroBatch, live_mask
from grpo_ext.packing.scorer import Scorer
from grpo_ext.rollout.collected import Collected
from grpo_ext.rollout.seeing import described
from grpo_ext.trainer.acting import Acting
from grpo_ext.trainer.batches import forward_only
from grpo_ext.trainer.credit import Credit, TRLAdvantages, group_shares, reward_figures
from grpo_ext.trainer.diagnosis.recording import ROWS, row_record
from grpo_ext.trainer.lifecycle import Lifecycle
from grpo_ext.trainer.recording import with_rewards


class CreditingTrainer(Lifecycle):
    """`trl.GRPOTrainer` whose advantages are the objective's."""

    acting: Acting | None
    _credit: Credit
    _logs: dict[str, Any]
    _pending_metrics: Any
    ref_model: Any
    _scorer: Scorer

    def _assign_credit(
        self, collected: Collected, batch: dict[str, Any], policy: Tensor | None, mode: str
    ) -> list[float]:
        """Log the rewards and add the objective's advantages.

        Args:
            collected: the generation.
            batch: its columns, this process's rows.
            policy: the policy's log-probabilities, if they are known.
            mode: "train" or "eval".

        Returns the advantages of all processes' completions.
        """
        assert collected.rewards is not None
        group = self.num_generations if mode == "train" else self.num_generations_eval
        rank, rows = self.accelerator.process_index, len(batch["completion_ids"])
        rewards = collected.rewards.double().view(-1, group, collected.rewards.shape[1])
        weights = self.reward_weights.double().to(self.accelerator.device)
        total = self._credit.total(rewards, weights)
        stock = TRLAdvantages.of(collected.rewards, self.reward_weights, group, self.objective)
        self._log_rewards(rewards, stock, total, mode)
        if mode == "train":
            batch |= with_rewards(batch, rewards, rank)
            batch[ROWS] = self._row_record(collected, rewards, total)
        if self.objective.stock_advantages and self.args.loss_defaults == "trl":
            self._note_zero_advantages(rewards, zero_variance(total), mode)
            batch["advantages"] = stock.advantages[rank * rows :][:rows]
            return stock.advantages.tolist()
        tokens: dict[str, Tensor] = {}
        if self.objective.sees_tokens:
            mask = live_mask(batch)
            kl = self._reward_kl(batch, policy, mask, mode) if self.objective.kl_in_reward else None
            tokens = self._credit.tokens(collected, mask, group, kl)

        def log_metric(name: str, value: float) -> None:
            if mode == "train":  # an evaluation's figures would count the rows that fill up its last batch
                self._metrics[mode][name].append(value)

        dtype, remember = stock.advantages.dtype, mode == "train"
        credited = self._credit.advantages(rewards, weights, total, tokens, log_metric, dtype=dtype, remember=remember)
        self._note_zero_advantages(rewards, credited.silent, mode)
        batch["advantages"] = credited.local(rank, *batch["completion_ids"].shape)
        return credited.by_completion().tolist()

    def _row_record(self, collected: Collected, rewards: Tensor, total: Tensor) -> Tensor:
        """Figures that this process's rows carry for a diagnosis."""
        drawn, rank = collected.scored_ids, self.accelerator.process_index
        first = rank * len(drawn)
        mine = slice(first, first + len(drawn))
        return row_record(rewards.flatten(0, 1)[mine], total.flatten()[mine], drawn, first, self.num_generations)

    def _log_rewards(self, rewards: Tensor, stock: TRLAdvantages, total: Tensor, mode: str) -> None:
        """Log the rewards as TRL does, but for the total, which is the one that trains; and the kinds of groups."""
        names, counts_none = self.reward_func_names, self.objective.missing_rewards == "zero"
        total = stock.rewards if counts_none else total
        figures = reward_figures(rewards.flatten(0, 1).to(stock.rewards.dtype), total, names)
        figures["frac_reward_zero_std"] = stock.equal.float().mean().item()
        for name, value in (figures | group_shares(rewards, names)).items():
            self._metrics[mode][name].append(value)

    def _log_generation(self, collected: Collected, advantages: list[float]) -> None:
        """Add the completions of all processes to the table, and what rewards have logged."""
        made, logs, count = collected.generated, self._logs, len(collected.rows)
        assert made is not None
        assert collected.rewards is not None
        played = self.acting is not None and self.log_completions
        prompts = [t.opening for t in collected.trajectories] if played else map(described, collected.prompts)
        logs["prompt"].extend(gather_object(list(prompts)))
        logs["completion"].extend(gather_object(made.completions))
        for name, values in zip(self.reward_func_names, collected.rewards.T.tolist(), strict=True):
            logs["rewards"][name].extend(values)
        logs["advantages"].extend(advantages)
        for column in sorted(set(gather_object(list(collected.logged)))):  # in the same order on all processes
            logs["extra"][column].extend(gather_object(collected.logged.get(column, [None] * count)))
        mode = "train" if self.model.training else "eval"
        for name in sorted(set(gather_object(list(self._pending_metrics)))):
            mine = self._pending_metrics.get(name, [])
            pair = torch.tensor([sum(mine), len(mine)], dtype=torch.float32, device=self.accelerator.device)
            total, known = self.accelerator.gather(pair).view(-1, 2).sum(dim=0).tolist()
            self._metrics[mode][name].append(total / known)
        self._pending_metrics.clear()
        if made.images is not None and self.log_multimodal:
            logs["images"].extend(gather_object(made.images))

    def _note_zero_advantages(self, rewards: Tensor, silent: Tensor, mode: str) -> None:
        """Log and remember the groups, [groups], in which no completion has an advantage."""
        self._metrics[mode]["advantages/zero_variance_groups"].append(silent.double().mean().item())
        if mode == "train":
            self._advantage_monitor.add(rewards, bool(silent.all()))
        elif self._evaluated is not None:
            self._evaluated.add_silent(silent, self.num_generations_eval)

    @torch.no_grad()
    def _reward_kl(self, output: dict[str, Any], logps: Tensor | None, mask: Tensor, mode: str) -> Tensor:
        """KL estimate of each token of this process's completions, to lower the rewards by."""
        if logps is None:
            logps = self._policy_logps(output)
        log_ref_ratio = masked(output["ref_per_token_logps"] - logps, mask)
        per_token = self.objective.kl_penalty({"log_ref_ratio": log_ref_ratio, "mask": mask})
        by_row = torch.stack([per_token.sum(dim=1), mask.any(dim=1)], dim=1)
        total, known = self.accelerator.gather(by_row).double().sum(dim=0).tolist()
        self._metrics[mode]["kl"].append(total / max(known, 1.0))
        return per_token

    def _policy_logps(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the policy's log-probabilities of a generation."""
        return self._logps(self.model, batch)

    def _reference_logps(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the reference's log-probabilities of a generation."""
        policy = self.accelerator.unwrap_model(self.model)
        with nullcontext() if self._initial is None else self._initial.replacing(policy):
            return self._logps(self.ref_model or self.model, batch)

    def _logps(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        score, training = self._get_per_token_logps_and_entropies, self.model.training
        rows = self.args.per_device_train_batch_size if training else self.args.per_device_eval_batch_size
        with forward_only(self.model, self.args):
            return self._scorer.micro_batch(score, model, cast(MicroBatch, batch), entropy=False, batch_size=rows)[0]
