"""From the rewards of a generation to its advantages, and what is logged of it."""

from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from grpo_ext.errors import without_secrets
from grpo_ext.objective.advantages import zero_variance
from grpo_ext.objective.ratios import masked, widest
from grpo_ext.packing.micro_batches import live_mask
from grpo_ext.rollout.collected import Collected
from grpo_ext.rollout.seeing import described
from grpo_ext.trainer.credit import TRLAdvantages, group_shares, reward_figures
from grpo_ext.trainer.diagnosis.recording import ROWS, row_record


def assign_credit(
    trainer: Any, collected: Collected, batch: dict[str, Any], policy: Tensor | None, mode: str
) -> list[float]:
    """Log the rewards and add the objective's advantages.

    Args:
        trainer: the trainer.
        collected: the generation.
        batch: its columns, this process's rows.
        policy: the policy's log-probabilities, if they are known.
        mode: "train" or "eval".

    Returns the advantages of all processes' completions.
    """
    assert collected.rewards is not None
    group = trainer.num_generations if mode == "train" else trainer.num_generations_eval
    rank, rows, device = trainer.accelerator.process_index, len(batch["completion_ids"]), trainer.accelerator.device
    rewards = collected.rewards.double().view(-1, group, collected.rewards.shape[1])
    weights = trainer.reward_weights.double()
    total = trainer._credit.total(rewards, weights)
    stock = TRLAdvantages.of(collected.rewards, trainer.reward_weights, group, trainer.objective)
    _log_rewards(trainer, rewards, stock, total, mode)
    if mode == "train":
        batch[ROWS] = _row_record(trainer, collected, rewards, total).to(widest(device)).to(device)
    if trainer.objective.stock_advantages and trainer.args.loss_defaults == "trl":
        _note_zero_advantages(trainer, rewards, zero_variance(total), mode)
        batch["advantages"] = stock.advantages[rank * rows :][:rows].to(device)
        return stock.advantages.tolist()
    tokens: dict[str, Tensor] = {}
    if trainer.objective.sees_tokens:
        mask = live_mask(batch)
        kl = _reward_kl(trainer, batch, policy, mask, mode) if trainer.objective.kl_in_reward else None
        tokens = trainer._credit.tokens(collected, mask, group, kl)

    def log_metric(name: str, value: float) -> None:
        if mode == "train":  # an evaluation's figures would count the rows that fill up its last batch
            trainer._metrics[mode][name].append(value)

    dtype, remember = stock.advantages.dtype, mode == "train"
    credited = trainer._credit.advantages(rewards, weights, total, tokens, log_metric, dtype=dtype, remember=remember)
    _note_zero_advantages(trainer, rewards, credited.silent, mode)
    local = credited.local(rank, *batch["completion_ids"].shape)
    batch["advantages"] = local.to(device)
    return credited.by_completion().tolist()


def _row_record(trainer: Any, collected: Collected, rewards: Tensor, total: Tensor) -> Tensor:
    """Figures that this process's rows carry for a diagnosis."""
    drawn, rank = collected.scored_ids, trainer.accelerator.process_index
    first = rank * len(drawn)
    mine = slice(first, first + len(drawn))
    return row_record(rewards.flatten(0, 1)[mine], total.flatten()[mine], drawn, first, trainer.num_generations)


def _log_rewards(trainer: Any, rewards: Tensor, stock: TRLAdvantages, total: Tensor, mode: str) -> None:
    """Log the rewards as TRL does, but for the total, which is the one that trains; and the kinds of groups."""
    names, counts_none = trainer.reward_func_names, trainer.objective.missing_rewards == "zero"
    total = stock.rewards if counts_none else total
    figures = reward_figures(rewards.flatten(0, 1).to(stock.rewards.dtype), total, names)
    figures["frac_reward_zero_std"] = stock.equal.float().mean().item()
    for name, value in (figures | group_shares(rewards, names)).items():
        trainer._metrics[mode][name].append(value)


def log_generation(trainer: Any, collected: Collected, advantages: list[float]) -> None:
    """Add the completions of all processes to the table, and what rewards have logged."""
    made, logs, count = collected.generated, trainer._logs, len(collected.rows)
    assert made is not None
    assert collected.rewards is not None
    played = trainer.acting is not None and trainer.log_completions
    prompts = [t.opening for t in collected.trajectories] if played else map(described, collected.prompts)
    logs["prompt"].extend(gather_object(without_secrets(list(prompts))))
    logs["completion"].extend(gather_object(without_secrets(made.completions)))
    for name, values in zip(trainer.reward_func_names, collected.rewards.T.tolist(), strict=True):
        logs["rewards"][name].extend(values)
    logs["advantages"].extend(advantages)
    for column in sorted(set(gather_object(list(collected.logged)))):  # in the same order on all processes
        logs["extra"][column].extend(gather_object(without_secrets(collected.logged.get(column, [None] * count))))
    mode = "train" if trainer.model.training else "eval"
    for name in sorted(set(gather_object(list(trainer._pending_metrics)))):
        mine = trainer._pending_metrics.get(name, [])
        pair = torch.tensor([sum(mine), len(mine)], dtype=torch.float32, device=trainer.accelerator.device)
        total, known = trainer.accelerator.gather(pair).view(-1, 2).sum(dim=0).tolist()
        trainer._metrics[mode][name].append(total / known)
    trainer._pending_metrics.clear()
    if made.images is not None and trainer.log_multimodal:
        logs["images"].extend(gather_object(made.images))


def _note_zero_advantages(trainer: Any, rewards: Tensor, silent: Tensor, mode: str) -> None:
    """Log and remember the groups, [groups], in which no completion has an advantage."""
    trainer._metrics[mode]["advantages/zero_variance_groups"].append(silent.double().mean().item())
    if mode == "train":
        trainer._advantage_monitor.add(rewards, bool(silent.all()))
    elif trainer._evaluated is not None:
        trainer._evaluated.add_silent(silent, trainer.num_generations_eval)


@torch.no_grad()
def _reward_kl(trainer: Any, output: dict[str, Any], logps: Tensor | None, mask: Tensor, mode: str) -> Tensor:
    """KL estimate of each token of this process's completions, to lower the rewards by."""
    if logps is None:
        logps = trainer._logps(trainer.model, output)
    log_ref_ratio = masked(output["ref_per_token_logps"] - logps, mask)
    per_token = trainer.objective.kl_penalty({"log_ref_ratio": log_ref_ratio, "mask": mask})
    by_row = torch.stack([per_token.sum(dim=1), mask.any(dim=1)], dim=1)
    total, known = trainer.accelerator.gather(by_row).cpu().double().sum(dim=0).tolist()
    trainer._metrics[mode]["kl"].append(total / max(known, 1.0))
    return per_token
