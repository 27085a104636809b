"""Collects what the reward functions of a generation returned, and checks it on all processes together."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Float
from torch import Tensor
from transformers import TrainerState

from grpo_ext.errors import RewardError, SamplerLost, without_secrets
from grpo_ext.rewards.containment import Scored, scorer_of
from grpo_ext.rewards.runtime import Component, Runtime
from grpo_ext.rollout.rollout_batch import TurnRewards
from grpo_ext.trainer.nan_report import BadTensor
from grpo_ext.trainer.nonfinite import NonFiniteGuard
from grpo_ext.waiting import SIGNALLED

logger = logging.getLogger(__name__)


@dataclass
class RewardCollector:
    """The rewards of a trainer.

    No reward may raise on one process only: the others would wait for it until their collective times out.

    Attributes:
        rewards: functions, components and models, in TRL's order.
        names: their names in the log.
        weights: their weights, which a schedule changes in place.
        by_model: returns the scores of the model at a place among the rewards, for prompts and completions.
        guard: decides what happens to NaN and inf.
        accelerator: exchanges failures between processes.
    """

    rewards: Sequence[Any]
    names: list[str]
    weights: Tensor
    by_model: Callable[[int, list[Any], list[Any]], Tensor]
    guard: NonFiniteGuard
    accelerator: Accelerator

    def __post_init__(self) -> None:
        self.scorers = [scorer_of(reward) for reward in self.rewards]
        self.runtime: Runtime | None = next((f.runtime for f in self.rewards if isinstance(f, Component)), None)

    def schedule_weights(self, state: TrainerState) -> None:
        """Set the weights of the current step in place."""
        for i, reward in enumerate(self.rewards):
            if isinstance(reward, Component) and reward.spec.weight_schedule is not None:
                self.weights[i] = reward.weight(state.global_step, state.max_steps)

    def values(
        self, scored: Mapping[str, Scored], prompts: list[Any], completions: list[Any]
    ) -> Float[Tensor, "rows functions"]:
        """Return this process's rewards, NaN where a completion was not scored."""
        rewards = torch.zeros(len(completions), len(self.scorers), device=self.accelerator.device)
        for i, scorer in enumerate(self.scorers):
            if isinstance(scorer, torch.nn.Module):
                rewards[:, i] = self.by_model(i, prompts, completions)
            else:
                values = [math.nan if value is None else value for value in scored[scorer.__name__].scores.values]
                rewards[:, i] = torch.tensor(values, dtype=torch.float32, device=rewards.device)
        return rewards

    def turn_rewards(self, scored: Mapping[str, Scored], rows: int) -> list[TurnRewards]:
        """Return the per-turn rewards of each row."""
        names = [getattr(scorer, "__name__", "") for scorer in self.scorers]
        by_function = [scored[name].scores.turns if name in scored else [None] * rows for name in names]
        return [list(row) for row in zip(*by_function, strict=True)]

    def checked(
        self, rewards: Tensor, errors: Sequence[str], prompts: Sequence[Any], completions: Sequence[Any]
    ) -> Tensor:
        """Return the rewards [completions, functions] of all processes, NaN where a completion was not scored.

        Raises:
            RewardError: a reward failed, on any process.
            SamplerLost: a signal ends the run, and a reward did not end.
            NonFiniteError: a reward returned NaN or inf, and the run is to stop.
        """
        count, rows = len(completions), dict[str, list[int]]()
        own = rewards[self.accelerator.process_index * count :][:count].cpu()
        if (unscored := own.isnan().all(dim=1)).any():
            i = int(unscored.int().argmax())
            shown = without_secrets([f"prompt {prompts[i]!r:.300}, completion {completions[i]!r:.300}"])[0]
            logger.warning(f"All reward functions returned None for the following kwargs: {shown}.")
        for i, (name, reward) in enumerate(zip(self.names, self.rewards, strict=True)):
            is_model = isinstance(reward, torch.nn.Module)  # NaN of a function is None
            rows[name] = (~own[:, i].isfinite() if is_model else own[:, i].isinf()).nonzero().flatten().tolist()
        findings, problem = list[dict[str, Any]](), ""
        if any(rows.values()):
            findings, problem = self.guard.of_rewards(own, rows, self.names, list(prompts), list(completions))
        mine = (list(errors), findings, problem)
        every = gather_object([mine]) if self.accelerator.num_processes > 1 else [mine]
        if messages := [message for errors, _, _ in every for message in errors]:
            raise SamplerLost(f"rewards: {SIGNALLED}") if SIGNALLED in messages else RewardError("\n".join(messages))
        if bad := [BadTensor(**finding) for _, theirs, _ in every for finding in theirs]:
            self.guard.rewards(bad, next((problem for _, _, problem in every if problem), ""))
        return rewards.masked_fill(rewards.isinf(), torch.nan)
