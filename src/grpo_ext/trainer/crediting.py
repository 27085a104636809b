"""CreditingTrainer: from the rewards of a generation to its advantages, and their figures."""

from collections import deque
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from trl.trainer.utils import nanstd

from grpo_ext.objective.advantages import zero_variance
from grpo_ext.objective.ratios import masked
from grpo_ext.packing.micro_batches import MicroBatch, live_mask
from grpo_ext.packing.scorer import Scorer
from grpo_ext.rollout.collected import Collected
from grpo_ext.trainer.batches import forward_only
from grpo_ext.trainer.credit import Credit, group_shares
from grpo_ext.trainer.diagnosis.recording import ROWS, row_record
from grpo_ext.trainer.lifecycle import Lifecycle
from grpo_ext.trainer.recording import with_rewards


class CreditingTrainer(Lifecycle):
    """`trl.GRPOTrainer` whose advantages are the objective's."""

    _credit: Credit
    _logs: dict[str, Any]
    _scorer: Scorer

    def _assign_credit(self, collected: Collected, output: dict[str, Any], early: Tensor | None, mode: str) -> None:
        """Log the rewards and replace TRL's advantages by the objective's.

        Args:
            collected: the generation.
            output: of TRL, this process's rows.
            early: the policy's log-probabilities, if TRL has computed them.
            mode: "train" or "eval".
        """
        assert collected.rewards is not None
        group = self.num_generations if mode == "train" else self.num_generations_eval
        rank = self.accelerator.process_index
        rewards = collected.rewards.double().view(-1, group, collected.rewards.shape[1])
        weights = self.reward_weights.double().to(self.accelerator.device)
        total = self._credit.total(rewards, weights)
        self._log_rewards(rewards, total, mode)
        if mode == "train":
            output |= with_rewards(output, rewards, rank)
            output[ROWS] = self._row_record(collected, rewards, total)
        if self.objective.stock_advantages and self.args.loss_defaults == "trl":
            self._note_zero_advantages(rewards, zero_variance(total), mode)
            return
        tokens: dict[str, Tensor] = {}
        if self.objective.sees_tokens:
            mask = live_mask(output)
            kl = self._reward_kl(output, early, mask, mode) if self.objective.kl_in_reward else None
            tokens = self._credit.tokens(collected, mask, group, kl)

        def log_metric(name: str, value: float) -> None:
            if mode == "train":  # an evaluation's figures would count the rows that fill up its last batch
                self._metrics[mode][name].append(value)

        dtype, remember = output["advantages"].dtype, mode == "train"
        credited = self._credit.advantages(rewards, weights, total, tokens, log_metric, dtype=dtype, remember=remember)
        self._note_zero_advantages(rewards, credited.silent, mode)
        replace_tail(self._logs["advantages"], credited.by_completion().tolist())
        output["advantages"] = credited.local(rank, *output["completion_ids"].shape)

    def _row_record(self, collected: Collected, rewards: Tensor, total: Tensor) -> Tensor:
        """Figures that this process's rows carry for a diagnosis."""
        drawn, rank = collected.scored_ids, self.accelerator.process_index
        first = rank * len(drawn)
        mine = slice(first, first + len(drawn))
        return row_record(rewards.flatten(0, 1)[mine], total.flatten()[mine], drawn, first, self.num_generations)

    def _log_rewards(self, rewards: Tensor, total: Tensor, mode: str) -> None:
        """Log the total that trains, in place of TRL's, which counts a partial None as 0; and the kinds of groups."""
        metrics = self._metrics[mode]
        if self.objective.missing_rewards != "zero":
            metrics["reward"][-1] = total.nanmean().item()
            metrics["reward_std"][-1] = nanstd(total).item()
        for name, share in group_shares(rewards, self.reward_func_names).items():
            metrics[name].append(share)

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

    def _policy_logps(self, output: Mapping[str, Any]) -> Tensor:
        """Return the policy's log-probabilities of a generation."""
        score, inputs = self._get_per_token_logps_and_entropies, cast(MicroBatch, output)
        rows = self.args.per_device_train_batch_size
        with forward_only(self.model, self.args):
            return self._scorer.micro_batch(score, self.model, inputs, entropy=False, batch_size=rows)[0]


def replace_tail(logged: deque[Any], values: list[Any]) -> None:
    """Replace what TRL has just appended to a column of the table of completions."""
    for _ in range(min(len(values), len(logged))):
        logged.pop()
    logged.extend(values)
