"""Repeated attempts at a row, judged by any reward function."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_ext.environments.protocol import Conversation, Message, Step, environments
from grpo_ext.errors import Problem, UnknownNameError
from grpo_ext.objective.options import Count


@environments.register("retry")
class Retry(Conversation):
    """Let the model try again until a reward reaches `threshold`. The last attempt's reward counts.

    Args:
        reward: a packaged reward, such as accuracy or reasoning_gym, or a path; it gets the row's columns.
        kwargs: options of the reward.
        attempts: most attempts.
        feedback: what the model reads after an attempt below the threshold.
        threshold: reward that ends the attempts.
        discount: factor of the reward for each further attempt.
    """

    paths = ("reward",)

    def __init__(
        self,
        reward: str = "accuracy",
        kwargs: Mapping[str, Any] | None = None,
        attempts: Count = 3,
        feedback: str = "That is not right. Try again.",
        threshold: float = 1.0,
        discount: float = 1.0,
    ) -> None:
        self.function, self.options = self._reward(reward), dict(kwargs or {})
        self.left, self.feedback, self.threshold, self.discount = attempts, feedback, threshold, discount
        self.factor = 1.0
        self.row: Mapping[str, Any] = {}

    @staticmethod
    def _reward(name: str) -> Any:
        from grpo_ext.rewards.catalogue import rewards

        return rewards[name]

    @classmethod
    def preload(cls, reward: str = "accuracy", **_: object) -> None:
        """Import the reward once for all attempts."""
        cls._reward(reward)

    @classmethod
    def option_problems(cls, reward: str = "accuracy", **_: object) -> Iterator[Problem]:
        """Yield the problem of an unknown reward."""
        try:
            function = cls._reward(reward)
        except UnknownNameError as error:
            yield Problem("reward", reward, error.reason, error.cure)
            return
        ids = inspect.signature(function).parameters.get("completion_ids")
        if ids is not None and ids.default is ids.empty:
            reason = "it counts tokens, and an environment sees text only"
            yield Problem("reward", reward, reason, "List it under reward_funcs.")

    def reset(self, row: Mapping[str, Any]) -> None:
        """Keep the row."""
        self.row = row

    def step(self, message: Message) -> Step:
        """Judge the attempt."""
        columns = {name: [value] for name, value in self.row.items()}
        attempt = {"prompts": [self.row.get("prompt")], "completions": [[message]], "completion_ids": [[]]}
        [value] = self.function(**{**columns, **attempt, **self.options})
        self.left -= 1
        if value is None:
            raise ValueError("the reward could not score the attempt")
        over = value >= self.threshold or self.left < 1
        reward, self.factor = value * self.factor, self.factor * self.discount
        return Step(None if over else self.feedback, reward if over else None, over)
