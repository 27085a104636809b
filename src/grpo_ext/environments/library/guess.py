"""Guess the number: the environment answers higher or lower."""

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_ext.environments.protocol import Conversation, Message, Step, environments
from grpo_ext.errors import Problem
from grpo_ext.objective.options import Count
from grpo_ext.rewards.text import completion_text

_NUMBER = re.compile(r"-?\d+")
_DIGITS = 1000  # Python reads no longer numbers than 4300 digits


@environments.register("guess")
class Guess(Conversation):
    """Guess a whole number from `low` to `high`: reward 1 when it is found, minus `cost` for each wrong guess.

    The number is the row's `solution` if that is a number, else drawn by the prompt's seed. The last number of a
    message counts. The game ends when the number is found, or after `guesses` messages.
    """

    in_process = True

    def __init__(self, low: int = 1, high: int = 100, guesses: Count = 10, cost: float = 0.0) -> None:
        self.low, self.high, self.left, self.cost = low, high, guesses, cost
        self.secret = low

    @staticmethod
    def option_problems(low: int = 1, high: int = 100, **_: object) -> Iterator[Problem]:
        """Yield the problem of an empty range."""
        if not low < high:
            yield Problem("low", low, "it must be below high", "Correct one of them.", {"high": high})

    def reset(self, row: Mapping[str, Any]) -> None:
        """Choose the number."""
        match = _NUMBER.fullmatch(str(row.get("solution") or "").strip())
        self.secret = int(match[0]) if match else random.Random(self.seed).randint(self.low, self.high)

    def step(self, message: Message) -> Step:
        """Answer with where the number is."""
        self.left -= 1
        numbers = _NUMBER.findall(completion_text([message]))
        guess = int(numbers[-1][:_DIGITS]) if numbers else None
        if guess == self.secret:
            return Step(None, 1.0, True)
        hint = "no number" if guess is None else "higher" if guess < self.secret else "lower"
        return Step(hint, 0.0 - self.cost, self.left < 1)
