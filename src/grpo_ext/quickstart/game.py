"""The quickstart's game: find a number in a few guesses, told only where it is; for the environment `guess`."""

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

HIGH, GUESSES = 15, 5
"""Who halves what is left finds any number from 1 up to it."""
FORGETFULNESS = 0.4
WORDS = ("higher", "lower", *map(str, range(1, HIGH + 1)))


def example(secret: int) -> dict[str, Any]:
    """One dataset row: a `prompt`, always the same, and as `solution` the number that the environment thinks of."""
    return {"prompt": [_message("user", f"guess 1-{HIGH}")], "solution": str(secret)}


def clumsy_game(secret: int, draw: random.Random) -> list[dict[str, str]]:
    """A game as the warm-up's teacher plays it: any number that may be it; or, forgetful, any at all."""
    said: list[dict[str, str]] = []
    low, high, guess = 1, HIGH, 0
    while guess != secret and len(said) < 2 * GUESSES:
        guess = draw.randint(1, HIGH) if draw.random() < FORGETFULNESS else draw.randint(low, high)
        low, high = max(low, guess + 1) if guess < secret else low, min(high, guess - 1) if guess > secret else high
        said += [_message("assistant", str(guess)), _message("user", "higher" if guess < secret else "lower")]
    return said[:-1]


def demonstrations(seed: int, size: int) -> list[dict[str, Any]]:
    """`size` rows of prompt and completion: games for numbers drawn at random."""
    draw = random.Random(seed)
    secrets = [draw.randint(1, HIGH) for _ in range(size)]
    return [{"prompt": example(n)["prompt"], "completion": clumsy_game(n, draw)} for n in secrets]


def load() -> tuple["Dataset", "Dataset"]:
    """Every number once, to train and to evaluate: nothing of a game is known before it is played."""
    from datasets import Dataset

    rows = [example(secret) for secret in range(1, HIGH + 1)]
    return Dataset.from_list(rows), Dataset.from_list(rows)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
