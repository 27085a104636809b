"""Guess the number: the environment says higher or lower."""

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_ext.environments.protocol import Conversation, Message, Step, environments
from grpo_ext.rewards.text import completion_text

_NUMBER = re.compile(r"-?\d+")


@environments.register("guess")
class Guess(Conversation):
    """Guess a whole number within `low` and `high`: reward 1 when it is found, less `cost` for each wrong guess.

    The number is the row's `solution`, or where that is none drawn from the prompt's seed; of a message the last
    number counts. It is over when the number is found, or after `guesses` messages.
    """

    in_process = True

    def __init__(self, low: int = 1, high: int = 100, guesses: int = 10, cost: float = 0.0) -> None:
        """Nothing is drawn yet."""
        self.low, self.high, self.left, self.cost = low, high, guesses, cost
        self.secret = low

    @staticmethod
    def option_problems(low: int = 1, high: int = 100, guesses: int = 10, cost: float = 0.0) -> Iterator[str]:
        """What is wrong with its options."""
        if not low < high:
            yield f"low={low!r}, high={high!r}: there is nothing to guess. Give two rising whole numbers."
        if guesses < 1:
            yield f"guesses={guesses!r}: nobody could guess. Set 1 or more."

    def reset(self, row: Mapping[str, Any]) -> None:
        """Think of a number."""
        given = _NUMBER.fullmatch(str(row.get("solution") or "").strip())
        self.secret = int(given[0]) if given else random.Random(self.seed).randint(self.low, self.high)

    def step(self, message: Message) -> Step:
        """Say where the number is."""
        self.left -= 1
        numbers = _NUMBER.findall(completion_text([message]))
        guess = int(numbers[-1]) if numbers else None
        if guess == self.secret:
            return Step(None, 1.0, True)
        said = "no number" if guess is None else "higher" if guess < self.secret else "lower"
        return Step(said, 0.0 - self.cost, self.left < 1)
