"""A reward of this project: partial credit for an answer that is nearly right."""

import re
from typing import Any


def digits(completions: list[Any], solution: list[str], *, tag: str = "answer", **_: Any) -> list[float | None]:
    """Return the share of right digits in <answer>, counted from the last; None without a solution.

    One value per completion. Parameters before the star are columns of the data, those after it options of the recipe.
    """
    return [_share(_text(completion), gold, tag) for completion, gold in zip(completions, solution, strict=True)]


def _text(completion: Any) -> str:
    """A completion is text, or, where the prompt is a conversation, a list of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _share(text: str, gold: str | None, tag: str) -> float | None:
    if not gold:
        return None
    found = re.search(rf"<{tag}>\s*(\d+)\s*</{tag}>", text)
    if found is None:
        return 0.0
    pairs = zip(reversed(found[1]), reversed(gold), strict=False)
    return sum(a == b for a, b in pairs) / max(len(gold), len(found[1]))
