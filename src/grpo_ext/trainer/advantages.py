"""Advantages assignment: from the rewards of a generation and what is known of its tokens to advantages."""

import hashlib
import logging
import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.utils import nanstd

from grpo_ext.config.rules import IMAGE_COLUMNS
from grpo_ext.objective.advantages import LogMetric, estimators, extremes, group_means, zero_variance
from grpo_ext.objective.combinations import weighted_total, weighted_turns
from grpo_ext.objective.objective import FORWARD_INPUTS, Objective
from grpo_ext.objective.trajectory import Trajectory
from grpo_ext.rewards.protocol import RIGHT, deciding_reward
from grpo_ext.rollout.rollout_batch import RolloutBatch, TurnRewards
from grpo_ext.trainer.log import Log

PADDING = {"turns": -1, "states": -1, "turn_rewards": math.nan}
"""Padding of the tensors of turns; 0 for all others."""

logger = logging.getLogger(__name__)


class GroupMeans:
    """Group means of the last generation batches: a column for each reward and one for the total.

    Args:
        batches: how many batches are remembered.
    """

    def __init__(self, batches: int) -> None:
        self.batches: deque[Tensor] = deque(maxlen=batches)

    def remember(self, rewards: Tensor, total: Tensor) -> None:
        """Add a batch: rewards [groups, completions, functions], total [groups, completions]."""
        if self.batches.maxlen:
            columns = [group_means(column) for column in (*rewards.unbind(dim=-1), total)]
            self.batches.append(torch.stack(columns, dim=-1))

    def concatenated(self) -> Tensor | None:
        """Return all batches as [past groups, columns], or None where there are none."""
        return torch.cat(list(self.batches)) if self.batches else None

    def to_list(self) -> list[list[list[float]]]:
        """Return the batches in JSON's types."""
        return [batch.tolist() for batch in self.batches]

    def load(self, batches: list[list[list[float]]]) -> None:
        """Restore what `to_list` returned."""
        self.batches.clear()
        self.batches.extend(torch.tensor(batch, dtype=torch.float64) for batch in batches)


@dataclass(frozen=True)
class AssignedAdvantages:
    """Advantages of all processes' completions."""

    advantages: Float[Tensor, "groups completions *time"]
    total: Float[Tensor, "groups completions"]
    """Weighted totals of the rewards."""
    zero_variance: Bool[Tensor, " groups"]
    """Groups in which no token has an advantage."""
    mask: Tensor | None = None
    """Live tokens [groups, completions, time], where the estimator sees tokens."""
    marks: Tensor | None = None
    """Tokens [groups, completions, time] that the surrogate treats apart, where it does."""

    def local(self, rank: int, rows: int, width: int, device: torch.device) -> dict[str, Tensor]:
        """Return the columns of one process's rows: `advantages`, [rows] or [rows, width], and `marks`."""
        columns = {"advantages": self.advantages, "marks": self.marks}
        mine = {name: x.flatten(0, 1)[rank * rows :][:rows] for name, x in columns.items() if x is not None}
        return {name: (x if x.dim() == 1 else x[:, :width]).clone().to(device) for name, x in mine.items()}

    def by_completion(self) -> Float[Tensor, " completions"]:
        """Return the mean advantage over the active tokens of each completion."""
        mask = None if self.mask is None else self.mask.flatten(0, 1)
        return per_completion(self.advantages.flatten(0, 1), mask)


class Advantages:
    """Turns the rewards of a generation into advantages by the objective's estimator, and logs both.

    Args:
        objective: the estimator and where the KL penalty goes.
        accelerator: gathers what the estimator sees of tokens from all processes.
        log: of the trainer.
        names: of the reward functions.
        as_stock: whether advantages are computed in TRL's precision where TRL has the estimator.
        warns: whether a run without any advantage is warned of.

    Attributes:
        group_means: group means of past batches, which some estimators read.
        monitor: warns where all advantages are 0.
    """

    def __init__(
        self,
        objective: Objective,
        accelerator: Accelerator,
        log: Log,
        names: list[str],
        *,
        as_stock: bool,
        warns: bool,
    ) -> None:
        self.objective, self.accelerator, self.log, self.names = objective, accelerator, log, names
        self.stock = as_stock and objective.stock_advantages
        self.group_means = GroupMeans(objective.remembered_batches)
        self.monitor = AdvantageMonitor(names, warns=warns)

    def assign(
        self, rollouts: RolloutBatch, weights: Tensor, seen: Mapping[str, Tensor], group: int
    ) -> AssignedAdvantages:
        """Return the advantages of all processes' completions; in training they join what the next ones depend on.

        Args:
            rollouts: a generation, with the rewards of all processes.
            weights: of the reward functions.
            seen: [rows, time] of this process by name: `mask`, the active tokens; `kl`, the estimates to lower the
                rewards by, where the penalty is in them; what else the estimator requests.
            group: completions of a prompt.
        """
        assert rollouts.rewards is not None
        training, trl = self.log.mode == "train", TRLAdvantages.of(rollouts.rewards, weights, group, self.objective)
        rewards, wide = self._grouped(rollouts.rewards, group), weights.double()
        total = self._total(rewards, wide)
        self._log_rewards(rewards, trl, total)
        if self.stock:
            credited = AssignedAdvantages(trl.advantages.view(-1, group), total, zero_variance(total))
        else:
            tokens = self.tokens(rollouts, seen, group)
            # an evaluation's figures would count the rows that fill up its last batch
            log_metric = self.log.add if training else _ignore
            values = self._estimated(rewards, wide, total, tokens, log_metric, remember=training)
            values = values.to(trl.advantages.dtype)
            marks = self.objective.marks(values, tokens)
            credited = AssignedAdvantages(values, total, _zero_variance(values), tokens.get("mask"), marks)
        self.log.add("advantages/zero_variance_groups", credited.zero_variance.double().mean().item())
        if training:
            self.monitor.add(rewards, bool(credited.zero_variance.all()))
        return credited

    def zero_advantage_groups(self, rollouts: RolloutBatch, weights: Tensor, group: int) -> Bool[Tensor, " groups"]:
        """Return the groups of all processes in which no completion would have an advantage."""
        assert rollouts.rewards is not None
        rewards, weights = self._grouped(rollouts.rewards, group), weights.double()
        if not self.objective.estimator_inputs.isdisjoint(FORWARD_INPUTS):  # not computed yet
            return zero_variance(self._total(rewards, weights))
        tokens = self.tokens(rollouts, {"mask": token_mask(rollouts)}, group)
        history = self.group_means.concatenated()
        return _zero_variance(self.objective.advantages(rewards, weights, history, _ignore, **tokens))

    def tokens(self, rollouts: RolloutBatch, seen: Mapping[str, Tensor], group: int) -> dict[str, Any]:
        """Return what the estimator sees of all processes: of tokens, of the turns of trajectories, of rows."""
        inputs, columns = self.objective.estimator_inputs, dict[str, Any]()
        if "columns" in inputs:
            columns["columns"] = columns_of_groups(rollouts.rows, group, self.accelerator.num_processes)
        if not self.objective.sees_tokens:
            return columns
        tokens, width = {**seen}, seen["mask"].shape[1]
        if "completion_ids" in inputs and "completion_ids" not in seen:  # before they are padded
            assert rollouts.generated is not None
            ids = [torch.tensor(row) for row in rollouts.generated.completion_ids]
            tokens["completion_ids"] = pad_sequence(ids, batch_first=True)
        if (trajectories := rollouts.trajectories) and self.objective.sees_turns:
            tokens |= turn_tensors(trajectories, rollouts.turn_rewards, width)
        return columns | _gathered(tokens, group, self.accelerator)

    def state_dict(self) -> dict[str, Any]:
        """Return what later advantages and warnings depend on, for a checkpoint."""
        silence, warned = self.monitor.to_list(), self.monitor.warned
        return {"group_means": self.group_means.to_list(), "silence": silence, "silence_warned": warned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.group_means.load(state["group_means"])
        self.monitor.load(state["silence"], state["silence_warned"])

    def _grouped(self, rewards: Tensor, group: int) -> Float[Tensor, "groups completions functions"]:
        return rewards.double().view(-1, group, rewards.shape[1])

    def _total(self, rewards: Tensor, weights: Tensor) -> Float[Tensor, "groups completions"]:
        return weighted_total(rewards, weights, missing=self.objective.missing_rewards)

    def _estimated(
        self,
        rewards: Tensor,
        weights: Tensor,
        total: Tensor,
        tokens: dict[str, Any],
        log_metric: LogMetric,
        *,
        remember: bool,
    ) -> Float[Tensor, "groups completions *time"]:
        """Return the estimator's advantages of rewards [groups, completions, functions]."""
        objective = self.objective
        if objective.kl_in_reward:
            if "turn_rewards" in tokens:
                missing = objective.missing_rewards
                by_turn = weighted_turns(tokens["turn_rewards"], rewards, weights, missing=missing)
                tokens = {**tokens, "turn_rewards": by_turn.unsqueeze(-2)}
            rewards = objective.less_kl(rewards, weights, tokens["mask"], tokens["kl"])
            weights, total = weights.new_ones(1), rewards.squeeze(-1)
        values = objective.advantages(rewards, weights, self.group_means.concatenated(), log_metric, **tokens)
        if remember:
            self.group_means.remember(rewards, total)
        return values

    def _log_rewards(self, rewards: Tensor, trl: "TRLAdvantages", total: Tensor) -> None:
        """Log the rewards as TRL does, but for the total, which is the one that trains; and the kinds of groups."""
        total = trl.rewards if self.objective.missing_rewards == "zero" else total
        figures = reward_figures(rewards.flatten(0, 1).to(trl.rewards.dtype), total, self.names)
        figures["frac_reward_zero_std"] = trl.equal.float().mean().item()
        self.log.add_all(figures | group_shares(rewards, self.names))


def _zero_variance(advantages: Float[Tensor, "groups completions *time"]) -> Bool[Tensor, " groups"]:
    return ~advantages.flatten(1).any(dim=1)


def _ignore(name: str, value: float) -> None:
    """Log no figure."""


def columns_of_groups(rows: Sequence[Mapping[str, Any]], group: int, processes: int) -> dict[str, list[Any]]:
    """Return the columns of all processes' rows, one value for each group; images are left out."""
    plain = [{name: value for name, value in row.items() if name not in IMAGE_COLUMNS} for row in rows]
    every = gather_object(plain) if processes > 1 else plain
    return {name: [row[name] for row in every[::group]] for name in every[0]}


def token_mask(rollouts: RolloutBatch) -> Tensor:
    """Tokens [rows, time] that the policy wrote, before TRL pads them."""
    generated = rollouts.generated
    assert generated is not None
    masks = generated.tool_mask or [[1] * len(ids) for ids in generated.completion_ids]
    return pad_sequence([torch.tensor(mask) for mask in masks], batch_first=True)


def turn_tensors(
    trajectories: Sequence[Trajectory], turn_rewards: Sequence[TurnRewards], width: int
) -> dict[str, Tensor]:
    """`turns` [rows, width], `states` [rows, turns] and `turn_rewards` [rows, functions, turns] of this process."""
    turns = torch.full((len(trajectories), width), -1)
    states, rewards = [], []
    for row, trajectory, of_functions in zip(turns, trajectories, turn_rewards, strict=True):
        tree = trajectory.tree
        row[: len(tree.turns)] = torch.tensor(tree.turns, dtype=torch.long)
        states.append(torch.tensor([_number(state) for state in tree.states]))
        none = [0.0] * len(trajectory.turns)
        rewards.append(torch.tensor([of_function or none for of_function in of_functions], dtype=torch.float64).T)
    return {
        "turns": turns,
        "states": pad_sequence(states, batch_first=True, padding_value=-1),
        "turn_rewards": pad_sequence(rewards, batch_first=True, padding_value=math.nan).mT,
    }


def _number(state: Hashable) -> int:
    """Hash a state to a number that is the same on every process."""
    return int.from_bytes(hashlib.blake2b(repr(state).encode(), digest_size=7).digest())


def _gathered(values: Mapping[str, Tensor], group: int, accelerator: Accelerator) -> dict[str, Tensor]:
    """Gather tensors [rows, ..., time] of each process as [groups, completions, ..., time] of all, on the CPU."""
    gathered = {}
    for name, tensor in values.items():
        if accelerator.num_processes > 1:
            index = PADDING.get(name, 0)
            padded = accelerator.pad_across_processes(tensor.to(accelerator.device), dim=-1, pad_index=index)
            tensor = accelerator.gather(padded.contiguous())
        gathered[name] = tensor.cpu().unflatten(0, (-1, group))
    return gathered


def per_completion(advantages: Tensor, mask: Tensor | None) -> Float[Tensor, " completions"]:
    """Mean over the active tokens of each completion of advantages [completions (, time)]."""
    if advantages.dim() == 1 or mask is None:
        return advantages
    mask = mask.flatten(0, -2)
    return (advantages * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


@dataclass(frozen=True)
class TRLAdvantages:
    """TRL's advantages of all completions, in its precision."""

    rewards: Float[Tensor, " completions"]
    """Weighted totals, in which None counts as 0; NaN where no function scored."""
    advantages: Float[Tensor, " completions"]
    equal: Bool[Tensor, " completions"]
    """Where the standard deviation by which TRL divides is 0."""

    @classmethod
    def of(
        cls, rewards: Float[Tensor, "completions functions"], weights: Tensor, group: int, objective: Objective
    ) -> "TRLAdvantages":
        """Compute them as TRL does for the nearest of its estimators."""
        scale = objective.advantage if estimators.traits(objective.advantage).trl else "group"
        unscored = rewards.isnan().all(dim=1)
        total = (rewards * weights).nansum(dim=1).masked_fill(unscored, torch.nan)
        if objective.combination == "normalize_then_sum":
            grouped = rewards.view(-1, group, rewards.shape[1])
            spread = nanstd(grouped, dim=1, keepdim=True) if group > 1 else 0.0
            parts = (grouped - grouped.nanmean(dim=1, keepdim=True)) / (spread + 1e-4)
            summed = (parts.view(rewards.shape) * weights).nansum(dim=1).masked_fill(unscored, torch.nan)
            std = nanstd(summed).expand_as(summed) if summed.numel() > 1 else torch.zeros_like(summed)
            advantages = (summed - summed.nanmean()) / (std + 1e-4)
        else:
            of_groups = total.view(-1, group)
            if scale == "batch":
                std = nanstd(total).expand_as(total) if total.numel() > 1 else torch.zeros_like(total)
            else:
                spread = nanstd(of_groups, dim=1) if group > 1 else torch.zeros_like(of_groups[:, 0])
                std = spread.repeat_interleave(group)
            advantages = total - of_groups.nanmean(dim=1).repeat_interleave(group)
            advantages = advantages if scale == "none" else advantages / (std + 1e-4)
        return cls(total, advantages.nan_to_num(nan=0.0), torch.isclose(std, torch.zeros_like(std)))


def reward_figures(
    rewards: Float[Tensor, "completions functions"], total: Tensor, names: Sequence[str]
) -> dict[str, float]:
    """Return TRL's figures of each reward and of a total, over the completions that were scored."""
    columns = {f"rewards/{name}/": column for name, column in zip(names, rewards.unbind(dim=1), strict=True)}
    figures = {"reward": total.nanmean().item(), "reward_std": nanstd(total).item()}
    for name, column in columns.items():
        figures |= {f"{name}mean": column.nanmean().item(), f"{name}std": nanstd(column).item()}
    return figures


def group_shares(rewards: Float[Tensor, "groups completions functions"], names: Sequence[str]) -> dict[str, float]:
    """Shares of groups that are all right, all wrong or mixed, by the reward that judges; empty where none is scored.

    All right: each completion has a reward of 1 or more. All wrong: none has, and all scored ones have the same.
    Mixed: the rest, with groups below 1 that partial credit ranks. An unscored completion beside scored ones is not
    right, as in an evaluation. Groups without a scored completion are left out.
    """
    judged = rewards[..., list(names).index(deciding_reward(names))]
    judged = judged[~judged.isnan().all(dim=1)]
    if not len(judged):
        return {}
    highest, lowest = extremes(judged)
    all_right = (judged >= RIGHT).all(dim=1)
    all_wrong = (highest < RIGHT) & (highest == lowest)
    kinds = {"all_right": all_right, "all_wrong": all_wrong, "mixed": ~(all_right | all_wrong)}
    return {f"groups/{kind}": members.double().mean().item() for kind, members in kinds.items()}


# A warning where a run does not learn.

PATIENCE = 5
"""Consecutive generations without any advantage before the warning."""


class AdvantageMonitor:
    """Warns once after PATIENCE generations of training in which every advantage was zero."""

    def __init__(self, names: list[str], *, warns: bool = True) -> None:
        self.names = names
        self.warned = not warns
        self.rewards: list[Tensor] = []

    def add(self, rewards: Tensor, all_zero: bool) -> None:
        """Add a generation: rewards [groups, completions, functions], and whether all advantages were 0."""
        self.rewards = [*self.rewards, rewards] if all_zero and not self.warned else []
        if len(self.rewards) == PATIENCE:
            self.warned = True
            logger.warning(self.describe())
            self.rewards = []

    def to_list(self) -> list[list]:
        """Return the rewards of the counted generations, for a checkpoint."""
        return [rewards.tolist() for rewards in self.rewards]

    def load(self, rewards: list[list], warned: bool) -> None:
        """Restore `to_list` and `warned`."""
        self.rewards = [torch.tensor(values, dtype=torch.float64) for values in rewards]
        self.warned = self.warned or warned

    def describe(self) -> str:
        """Return the values of each reward, and what to do."""
        rewards = torch.cat(self.rewards)
        columns, equal = rewards.flatten(0, 1).T, bool(zero_variance(rewards.transpose(1, 2).flatten(0, 1)).all())
        shown = ", ".join(f"{name} {_values(column, equal)}" for name, column in zip(self.names, columns, strict=True))
        if columns.isnan().all():
            return (
                f"no signal in {PATIENCE} generations in a row: none of these {columns.shape[1]} completions was "
                "scored. Every reward has failed or returned None or NaN; `grpo-ext score` calls only the rewards."
            )
        why = "within every group all rewards were equal, so" if equal else "although rewards differ within groups,"
        differ = (
            "Rewards that cancel give no advantage, and advantage_estimator: pass_at_k gives none to a group with "
            "fewer than k wrong completions: lower k. "
        )
        return (
            f"no signal in {PATIENCE} generations in a row: {why} every advantage was zero and no gradient came of "
            f"them. Rewards of these {columns.shape[1]} completions: {shown}. {'' if equal else differ}Read some of "
            "them (log_completions: true). A reward that is always 0 asks for what the model never writes: describe "
            "it in system_prompt, or raise max_completion_length if completions are cut off. A reward that is always "
            "1 needs harder prompts."
        )


def _values(column: Tensor, equal: bool) -> str:
    values = sorted({value for value in column.tolist() if not math.isnan(value)})
    unscored = int(column.isnan().sum())
    if not values:
        return "None throughout (not scored)"
    several = f"{values[0]:g} to {values[-1]:g}{', equal in each group' if equal else ''}"
    text = f"{values[0]:g} throughout" if len(values) == 1 else several
    return f"{text} ({unscored} not scored)" if unscored else text
