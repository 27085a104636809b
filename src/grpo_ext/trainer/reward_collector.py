"""Collects what the reward functions of a generation returned, and checks it on all processes together."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Float
from torch import Tensor
from transformers import TrainerState

from grpo_ext.errors import RewardError, SamplerLost, without_secrets
from grpo_ext.rewards.outcomes import Scores
from grpo_ext.rewards.scorers import OwnFunction, Scorer
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
        names: their names in the log, which differ.
        weights: their weights, which a schedule changes in place.
        by_model: returns the scores of the model at a place among the rewards, for prompts and completions.
        guard: decides what happens to NaN and inf.
        accelerator: exchanges failures between processes.
    """

    rewards: InitVar[Sequence[Any]]
    names: list[str]
    weights: Tensor
    by_model: Callable[[int, list[Any], list[Any]], Tensor]
    guard: NonFiniteGuard
    accelerator: Accelerator

    def __post_init__(self, rewards: Sequence[Any]) -> None:
        self.scorers: dict[str, Scorer] = {
            name: reward if isinstance(reward, Scorer) else OwnFunction(reward)
            for name, reward in zip(self.names, rewards, strict=True)
            if not isinstance(reward, torch.nn.Module)
        }
        """The scorer of each function, by its name; a reward without one is a model, which TRL's code scores."""
        self.runtime = next((s.runtime for s in self.scorers.values() if s.runtime is not None), None)

    def schedule_weights(self, state: TrainerState) -> None:
        """Set the weights of the current step in place."""
        for i, name in enumerate(self.names):
            if name in self.scorers and self.scorers[name].spec.weight_schedule is not None:
                self.weights[i] = self.scorers[name].weight(state.global_step, state.max_steps)

    def values(
        self, scored: Mapping[str, Scores], prompts: list[Any], completions: list[Any]
    ) -> Float[Tensor, "rows functions"]:
        """Return this process's rewards, NaN where a completion was not scored."""
        rewards = torch.zeros(len(completions), len(self.names), device=self.accelerator.device)
        for i, name in enumerate(self.names):
            if name in self.scorers:
                values = [math.nan if value is None else value for value in scored[name].values]
                rewards[:, i] = torch.tensor(values, dtype=torch.float32, device=rewards.device)
            else:
                rewards[:, i] = self.by_model(i, prompts, completions)
        return rewards

    def turn_rewards(self, scored: Mapping[str, Scores], rows: int) -> list[TurnRewards]:
        """Return the per-turn rewards of each row."""
        by_function = [scored[name].turns if name in scored else [None] * rows for name in self.names]
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
        for i, name in enumerate(self.names):
            is_bad = own[:, i].isinf() if name in self.scorers else ~own[:, i].isfinite()  # NaN of a function is None
            rows[name] = is_bad.nonzero().flatten().tolist()
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
