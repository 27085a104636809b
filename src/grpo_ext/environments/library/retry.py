"""Another attempt: any reward judges, and what it does not pay is tried again."""

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_ext.environments.protocol import Conversation, Message, Step, environments


@environments.register("retry")
class Retry(Conversation):
    """Let the model try again until a reward is content: the reward of the last attempt, times `discount` for each.

    Args:
        reward: a packaged one, such as accuracy or reasoning_gym, or a path; it gets the row's columns.
        kwargs: the reward's own options.
        attempts: at most.
        feedback: what the model reads after an attempt that was not paid in full.
        threshold: from which reward on it is content.
        discount: what each further attempt makes of the reward.
    """

    def __init__(
        self,
        reward: str = "accuracy",
        kwargs: Mapping[str, Any] | None = None,
        attempts: int = 3,
        feedback: str = "That is not right. Try again.",
        threshold: float = 1.0,
        discount: float = 1.0,
    ) -> None:
        """Nothing is judged yet."""
        self.function, self.options = self._reward(reward), dict(kwargs or {})
        self.left, self.feedback, self.threshold, self.discount = attempts, feedback, threshold, discount
        self.worth = 1.0
        self.row: Mapping[str, Any] = {}

    @staticmethod
    def _reward(name: str) -> Any:
        from grpo_ext.rewards.catalogue import rewards

        return rewards[name]

    @classmethod
    def preload(cls, reward: str = "accuracy", **_: Any) -> None:
        """Import the reward once for all attempts."""
        cls._reward(reward)

    @classmethod
    def option_problems(cls, reward: str = "accuracy", attempts: int = 3, **_: Any) -> Iterator[str]:
        """What is wrong with its options."""
        if attempts < 1:
            yield f"attempts={attempts!r}: nobody could try. Set 1 or more."
        try:
            cls._reward(reward)
        except ValueError as error:
            yield f"reward={reward!r}: {error}"

    def reset(self, row: Mapping[str, Any]) -> None:
        """Remember the row."""
        self.row = row

    def step(self, message: Message) -> Step:
        """Judge the attempt."""
        columns = {name: [value] for name, value in self.row.items()}
        given = {"prompts": [self.row.get("prompt")], "completions": [[message]], "completion_ids": [[]]}
        [value] = self.function(**{**columns, **given, **self.options})
        self.left -= 1
        if value is None:
            raise ValueError("the reward could not score the attempt")
        over = value >= self.threshold or self.left < 1
        reward, self.worth = value * self.worth, self.worth * self.discount
        return Step(None if over else self.feedback, reward if over else None, over)
