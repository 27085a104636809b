"""An environment of your own: the same sum is asked again until the answer is right, three times at most.

Run it:              python examples/custom_environment.py [--max_steps 50]
Use it in a recipe:  environments:
                       - {path: "examples.custom_environment:AskAgain", kwargs: {attempts: 5}, max_turns: 5}
"""

import sys
from collections.abc import Mapping
from typing import Any

from grpo_ext import Conversation, Step
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.rewards.text import completion_text
from grpo_ext.train import train


class AskAgain(Conversation):
    """Reward the right answer with 1, and less in later turns; one object per episode."""

    needs = ("solution",)

    def __init__(self, attempts: int = 3) -> None:
        self.attempts, self.turns = attempts, 0

    def reset(self, row: Mapping[str, Any]) -> None:
        self.question, self.answer = row["prompt"][-1]["content"], row["solution"]

    def step(self, message: dict[str, Any]) -> Step:
        self.turns += 1
        right = f"<answer>\n{self.answer}\n</answer>" in completion_text([message])
        return Step(self.question, reward=right / self.turns, done=right or self.turns == self.attempts)


if __name__ == "__main__":
    own = ["--environments", "custom_environment:AskAgain", "--max_completion_length", "160"]
    run = ["--max_steps", "5", "--save_strategy", "no", "--output_dir", "outputs/custom_environment"]
    train(load_recipe(["--config", "quickstart/grpo", *own, *run, *sys.argv[1:]]))
