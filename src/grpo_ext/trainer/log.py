"""`Log`: what a trainer logs, in the containers that TRL writes out and empties at each log."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from grpo_ext.errors import without_secrets
from grpo_ext.rollout.collected import Collected


@dataclass(frozen=True)
class Log:
    """Figures of training and of evaluations, and the table of completions."""

    figures: Mapping[str, dict[str, list[float]]]
    """TRL's `_metrics`: by mode, the values since the last log, whose mean is logged."""
    table: Mapping[str, Any]
    """TRL's `_logs`."""
    of_rewards: dict[str, list[float]]
    """TRL's `_pending_metrics`: what this process's reward functions have logged of a generation."""
    is_training: Callable[[], bool]
    accelerator: Accelerator

    @property
    def mode(self) -> str:
        """The figures' key now: "train" or "eval"."""
        return "train" if self.is_training() else "eval"

    def add(self, name: str, value: float) -> None:
        """Log a figure."""
        self.figures[self.mode][name].append(value)

    def add_all(self, figures: Mapping[str, float]) -> None:
        """Log figures."""
        for name, value in figures.items():
            self.add(name, value)

    def add_figures_of_rewards(self) -> None:
        """Log what the reward functions of all processes have logged, each as a mean over its values; collective."""
        for name in sorted(set(gather_object(list(self.of_rewards)))):
            mine = self.of_rewards.get(name, [])
            pair = torch.tensor([sum(mine), len(mine)], dtype=torch.float32, device=self.accelerator.device)
            total, known = self.accelerator.gather(pair).view(-1, 2).sum(dim=0).tolist()
            self.add(name, total / known)
        self.of_rewards.clear()

    def add_completions(
        self,
        collected: Collected,
        prompts: Iterable[Any],
        advantages: Sequence[float],
        reward_names: Sequence[str],
        *,
        images: bool,
    ) -> None:
        """Add the completions of all processes to the table; collective.

        Args:
            collected: this process's, with the rewards of all.
            prompts: of the same rows, as they are shown.
            advantages: of all processes' completions.
            reward_names: of the columns of the rewards.
            images: whether images are shown.
        """
        made, table, count = collected.generated, self.table, len(collected.rows)
        assert made is not None
        assert collected.rewards is not None
        table["prompt"].extend(gather_object(without_secrets(list(prompts))))
        table["completion"].extend(gather_object(without_secrets(made.completions)))
        for name, values in zip(reward_names, collected.rewards.T.tolist(), strict=True):
            table["rewards"][name].extend(values)
        table["advantages"].extend(advantages)
        for column in sorted(set(gather_object(list(collected.logged)))):  # in the same order on all processes
            table["extra"][column].extend(gather_object(without_secrets(collected.logged.get(column, [None] * count))))
        if made.images is not None and images:
            table["images"].extend(gather_object(made.images))
