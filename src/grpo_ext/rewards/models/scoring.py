"""Chats for a reward model, and clipping and blending of its scores."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from grpo_ext.rewards.text import Completion, completion_text

Chat: TypeAlias = list[Mapping[str, Any]]
ChatScorer: TypeAlias = Callable[[list[Chat]], Sequence[float | None]]


def clipped_score(score: float | None, clip: float = 3.0) -> float | None:
    """Return the score clipped to [-clip, clip]; None if the scorer gave none or a value that is not finite."""
    if score is None or not math.isfinite(score):
        return None
    return max(-clip, min(clip, float(score)))


def blended_scores(
    score: ChatScorer, prompts: Sequence[Completion], completions: Sequence[Completion], answer_weight: float
) -> list[float | None]:
    """Return scores of prompt + completion, blended with those of the content of `<answer>...</answer>` if present.

    All chats go to `score` in one call, the answers' after the completions'; with weight 0 no answer is scored.
    """
    answers = [_first_answer(completion_text(c)) if answer_weight else None for c in completions]
    marked = {i: answer for i, answer in enumerate(answers) if answer is not None}
    chats = [chat_of(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
    scores = list(score(chats + [chat_of(prompts[i], answer) for i, answer in marked.items()]))
    parts, answer_scores = scores[: len(chats)], scores[len(chats) :]
    for i, answer_score in zip(marked, answer_scores, strict=True):
        if (full := parts[i]) is not None:
            parts[i] = None if answer_score is None else (1 - answer_weight) * full + answer_weight * answer_score
    return parts


def _first_answer(text: str) -> str | None:
    """Return the content of the first block (`accuracy` takes the last), stripped, or None without one."""
    answer, closed, _ = text.partition("<answer>")[2].partition("</answer>")
    return answer.strip() if closed else None


def chat_of(prompt: Completion, completion: Completion) -> Chat:
    """Return a chat: a text becomes the user's or the assistant's message, a reply without a role the assistant's."""
    opening: Chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if isinstance(completion, str):
        return [*opening, {"role": "assistant", "content": completion}]
    return [*opening, *({"role": "assistant", **message} for message in completion)]
