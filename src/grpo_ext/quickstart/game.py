"""The quickstart's game: find a number in a few guesses, with the hints higher and lower; for `guess`."""

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

HIGH, GUESSES = 15, 5
"""Largest number, and number of guesses; bisection finds every number in time."""
_FORGETFULNESS = 0.4
WORDS = ("higher", "lower", *map(str, range(1, HIGH + 1)))


def game_row(secret: int) -> dict[str, Any]:
    """Return a dataset row: a constant `prompt`, and the secret number as `solution`."""
    return {"prompt": [_message("user", f"guess 1-{HIGH}")], "solution": str(secret)}


def clumsy_game(secret: int, draw: random.Random) -> list[dict[str, str]]:
    """Return a game of the teacher, who guesses a possible number or, with probability 0.4, any number."""
    messages: list[dict[str, str]] = []
    low, high, guess = 1, HIGH, 0
    while guess != secret and len(messages) < 2 * GUESSES:
        guess = draw.randint(1, HIGH) if draw.random() < _FORGETFULNESS else draw.randint(low, high)
        low, high = max(low, guess + 1) if guess < secret else low, min(high, guess - 1) if guess > secret else high
        messages += [_message("assistant", str(guess)), _message("user", "higher" if guess < secret else "lower")]
    return messages[:-1]


def game_demonstrations(seed: int, size: int) -> list[dict[str, Any]]:
    """Return `size` rows of prompt and completion: games for random numbers."""
    draw = random.Random(seed)
    secrets = [draw.randint(1, HIGH) for _ in range(size)]
    return [{"prompt": game_row(n)["prompt"], "completion": clumsy_game(n, draw)} for n in secrets]


def load_game() -> tuple["Dataset", "Dataset"]:
    """Return every number once, for training and for evaluation: a row does not reveal how a game goes."""
    from datasets import Dataset

    rows = [game_row(secret) for secret in range(1, HIGH + 1)]
    return Dataset.from_list(rows), Dataset.from_list(rows)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
