"""The quickstart's game as an agent, a loop of its own over OpenAI's client; for `quickstart/agent`."""

import re
from collections.abc import Mapping
from typing import Any

from grpo_ext.quickstart.game import GUESSES

_NUMBER = re.compile(r"-?\d+")


async def play(row: Mapping[str, Any], client: Any) -> float:
    """Guess the row's number with hints. Return 1 if a guess is right, else 0."""
    messages, secret = list(row["prompt"]), int(row["solution"])
    for _ in range(GUESSES):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content or ""
        guess = int(numbers[-1]) if (numbers := _NUMBER.findall(text)) else None
        if guess == secret:
            return 1.0
        hint = "no number" if guess is None else "higher" if guess < secret else "lower"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
    return 0.0
