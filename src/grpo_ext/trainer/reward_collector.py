"""Collects what the reward functions of a generation returned, and checks it on all processes together."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
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


class RewardCollector:
    """The rewards of a trainer.

    No reward may raise on one process only: the others would wait for it until their collective times out.

    Args:
        rewards: functions, components and models, in TRL's order.
        names: their names in the log, which differ.
        guard: decides what happens to NaN and inf.
        accelerator: exchanges failures between processes.
    """

    def __init__(
        self, rewards: Sequence[Any], names: list[str], guard: NonFiniteGuard, accelerator: Accelerator
    ) -> None:
        self.names, self.guard, self.accelerator = names, guard, accelerator
        self.scorers: dict[str, Scorer] = {
            name: reward if isinstance(reward, Scorer) else OwnFunction(reward)
            for name, reward in zip(names, rewards, strict=True)
            if not isinstance(reward, torch.nn.Module)
        }
        """What scores by each function, by its name; a reward without one is a model, which TRL's code scores."""
        self.runtime = next((s.runtime for s in self.scorers.values() if s.runtime is not None), None)

    def schedule_weights(self, weights: Tensor, state: TrainerState) -> None:
        """Set the weights of the current step in place."""
        for i, name in enumerate(self.names):
            if name in self.scorers and self.scorers[name].spec.weight_schedule is not None:
                weights[i] = self.scorers[name].weight(state.global_step, state.max_steps)

    def values(
        self, scored: Mapping[str, Scores], by_model: Callable[[int], Tensor], rows: int
    ) -> Float[Tensor, "rows functions"]:
        """Return this process's rewards, NaN where a completion was not scored.

        Args:
            scored: by the functions, by name.
            by_model: returns the scores of the model at a place among the rewards.
            rows: completions.
        """
        found = torch.zeros(rows, len(self.names), device=self.accelerator.device)
        for i, name in enumerate(self.names):
            if name in self.scorers:
                values = [math.nan if value is None else value for value in scored[name].values]
                found[:, i] = torch.tensor(values, dtype=torch.float32, device=found.device)
            else:
                found[:, i] = by_model(i)
        return found

    def turn_rewards(self, scored: Mapping[str, Scores], rows: int) -> list[TurnRewards]:
        """Return the per-turn rewards of each row."""
        by_function = [scored[name].turns if name in scored else [None] * rows for name in self.names]
        return [list(row) for row in zip(*by_function, strict=True)]

    def checked(
        self, rewards: Tensor, errors: Sequence[str], prompts: Sequence[Any], completions: Sequence[Any]
    ) -> Tensor:
        """Return the rewards [completions, functions] of all processes, NaN where a completion was not scored.

        Args:
            rewards: of all processes, as TRL gathered them.
            errors: messages of this process's rewards whose failure ends the run, or that a signal does.
            prompts: of this process.
            completions: of this process.

        Raises:
            RewardError: a reward failed, on any process.
            SamplerLost: a signal ends the run, and a reward did not end.
            NonFiniteError: a reward returned NaN or inf, and the run is to stop.
        """
        self._warn_of_unscored(rewards, prompts, completions)
        found, problem = self._nonfinite(rewards, prompts, completions)
        mine = (list(errors), found, problem)
        every = gather_object([mine]) if self.accelerator.num_processes > 1 else [mine]
        if messages := [message for errors, _, _ in every for message in errors]:
            raise SamplerLost(f"rewards: {SIGNALLED}") if SIGNALLED in messages else RewardError("\n".join(messages))
        if findings := [BadTensor(**finding) for _, found, _ in every for finding in found]:
            self.guard.rewards(findings, next((problem for _, _, problem in every if problem), ""))
        return rewards.masked_fill(rewards.isinf(), torch.nan)

    def _mine(self, rewards: Tensor, rows: int) -> Tensor:
        """Return this process's rows of all processes' rewards."""
        return rewards[self.accelerator.process_index * rows :][:rows].cpu()

    def _warn_of_unscored(self, rewards: Tensor, prompts: Sequence[Any], completions: Sequence[Any]) -> None:
        """Show this process's first completion that no reward has scored, in TRL's words."""
        unscored = self._mine(rewards, len(completions)).isnan().all(dim=1)
        if unscored.any():
            i = int(unscored.int().argmax())
            shown = without_secrets([f"prompt {prompts[i]!r:.300}, completion {completions[i]!r:.300}"])[0]
            logger.warning(f"All reward functions returned None for the following kwargs: {shown}.")

    def _nonfinite(
        self, rewards: Tensor, prompts: Sequence[Any], completions: Sequence[Any]
    ) -> tuple[list[dict[str, Any]], str]:
        """Find NaN and inf in this process's rewards; return the findings and why the batch could not be saved."""
        mine, rows = self._mine(rewards, len(completions)), {}
        for i, name in enumerate(self.names):
            bad = mine[:, i].isinf() if name in self.scorers else ~mine[:, i].isfinite()  # NaN of a function is None
            rows[name] = bad.nonzero().flatten().tolist()
        if not any(rows.values()):
            return [], ""
        return self.guard.of_rewards(mine, rows, self.names, list(prompts), list(completions))
