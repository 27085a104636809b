"""MiniMind's composite rewards (github.com/jingyaogong/minimind): the widely read version and the current one.

A scorer is a callable from chats (lists of messages) to one float per chat, None or NaN for a chat that it cannot
score. A recipe names one as `reward_model: {model: ..., ...}`, the options of
`grpo_ext.rewards.models.reward_model.RewardModelScorer`, or as `scorer: package.module:function`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from grpo_ext.registry import import_path
from grpo_ext.rewards.library.functions import matches_format, tags
from grpo_ext.rewards.models.scoring import Chat, blended_scores, chat_of, clipped_score
from grpo_ext.rewards.protocol import OptionError, rewards
from grpo_ext.rewards.text import Completion, completion_text, content_text

# Both of MiniMind's expressions in one. The atomic group does not change the outcome, since the first opening of an
# answer leaves the most room for its end; it avoids quadratic time on a text of only tags.
_LAYOUT = re.compile(r"(?><think>\n.*?\n</think>\n\n?<answer>\n).*?\n</answer>$", re.DOTALL)


def minimind_format(text: str, strict: bool = False) -> float:
    r"""Return 0.5 for `<think>\n...\n</think>\n<answer>\n...\n</answer>`, with or without a blank line inside, else 0.

    Tags may repeat inside and a newline may follow, as in MiniMind; `strict`: each tag once, and no newline.
    """
    return 0.5 * (matches_format(text, "think_answer") if strict else _LAYOUT.match(text) is not None)


def minimind_lengths(text: str) -> float:
    """Return the length and `</think>` terms of the current version, in characters after stripping: -1.25 to 1.75.

    0.5 if the text has 20 to 800, else -0.5; with a `</think>`: 1.0 if the thinking before the first has 20 to 300,
    else -0.5, and 0.25 if it is the only one, else -0.25.
    """
    reward = 0.5 if 20 <= len(text.strip()) <= 800 else -0.5
    if "</think>" in text:
        thinking = text.split("</think>", 1)[0]
        reward += 1.0 if 20 <= len(thinking.strip()) <= 300 else -0.5
        reward += 0.25 if text.count("</think>") == 1 else -0.25
    return reward


def one_question(prompt: Completion) -> str:
    """Return the prompt as the current version gives it to the reward model: one user message, others quoted."""
    *history, last = chat_of(prompt, [])
    question = content_text(last.get("content")).strip()
    earlier = "\n".join(f"{message['role']}: {content_text(message.get('content')).strip()}" for message in history)
    return f"{earlier}\n以上是对话历史。我的新问题是：\n{question}" if earlier else question  # noqa: RUF001


def minimind_repetition(text: str, n: int = 3, cap: float = 0.5) -> float:
    """Return the penalty to subtract, min(cap, 2 cap repeated / total), over n-grams of words and punctuation."""
    tokens = re.findall(r"\w+|[^\w\s]", text.lower())
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return min(cap, 2 * cap * (len(grams) - len(set(grams))) / len(grams)) if grams else 0.0


@rewards.register("minimind", independent=True)
def minimind(
    prompts: list[Completion],
    completions: list[Completion],
    *,
    scorer: Callable[..., Any] | str | None = None,
    reward_model: Mapping[str, Any] | None = None,
    reasoning: bool = True,
    strict: bool = False,
    score_clip: float = 3.0,
    answer_weight: float = 0.6,
    **_: object,
) -> list[float | None]:
    """format + tags + reward-model score, the widely read version: in [-3, 4.5] with the defaults.

    The score is that of prompt + completion, clipped; in reasoning mode a completion with `<answer>...</answer>` gets
    (1 - answer_weight) of it and answer_weight of the clipped score of the content of its answer. Format and tags
    count in reasoning mode only, and with `strict` the format requires each tag once and no text after the last.
    Without a scorer (a callable or "package.module:function") or a reward_model the score part is 0. A completion
    that the scorer cannot score, in full or in its answer, is None.

    Raises:
        ValueError: score_clip <= 0, answer_weight outside [0, 1], strict without reasoning, a scorer and a
            reward_model, an option of the reward_model out of range, or the scorer does not give one value per chat.
    """
    if not 0 <= answer_weight <= 1:
        raise OptionError("answer_weight", answer_weight, "it is a share of the score", "Set it in [0, 1].")
    if strict and not reasoning:
        cure = "Set reasoning=True or remove strict."
        raise OptionError("strict", True, "no format is scored", cure, reasoning=False)
    score = _clipped_scores(scorer, reward_model, score_clip)
    texts = [completion_text(c) for c in completions]
    parts = blended_scores(score, prompts, completions, answer_weight if reasoning else 0.0)
    if not reasoning:
        return parts
    bonuses = [minimind_format(text, strict) + share for text, share in zip(texts, tags(completions), strict=True)]
    return [None if part is None else part + bonus for part, bonus in zip(parts, bonuses, strict=True)]


@rewards.register("minimind_current", independent=True)
def minimind_current(
    prompts: list[Completion],
    completions: list[Completion],
    *,
    scorer: Callable[..., Any] | str | None = None,
    reward_model: Mapping[str, Any] | None = None,
    score_clip: float = 3.0,
    n: int = 3,
    repetition_cap: float = 0.5,
    **_: object,
) -> list[float | None]:
    """Lengths - repetition of the answer + reward-model score of the answer, the current version: in [-4.75, 4.75].

    The answer is what follows the first `</think>`, stripped, or the whole text without one; only it is scored and
    checked for repeated n-grams. Terms: `minimind_lengths`, `minimind_repetition`; the scorer gets the prompt as
    `one_question`. Without a scorer or a reward_model the score part is 0; a completion that the scorer cannot
    score is None.

    Raises:
        ValueError: score_clip <= 0, n < 1, repetition_cap < 0, a scorer and a reward_model, an option of the
            reward_model out of range, or the scorer does not give one value per chat.
    """
    if n < 1:
        raise OptionError("n", n, "an n-gram has at least one word", "Set n >= 1.")
    if repetition_cap < 0:
        raise OptionError("repetition_cap", repetition_cap, "it would reward repetition", "Set repetition_cap >= 0.")
    score = _clipped_scores(scorer, reward_model, score_clip)
    texts = [completion_text(c) for c in completions]
    answers = [text.split("</think>", 1)[1].strip() if "</think>" in text else text for text in texts]
    scores = score([chat_of(one_question(prompt), answer) for prompt, answer in zip(prompts, answers, strict=True)])
    return [
        None if s is None else minimind_lengths(text) - minimind_repetition(answer, n, repetition_cap) + s
        for text, answer, s in zip(texts, answers, scores, strict=True)
    ]


for _version in (minimind, minimind_current):
    _version.in_process = ("reward_model",)  # type: ignore[attr-defined]  # where it is set: one copy of the model
    _version.paths = ("scorer",)  # type: ignore[attr-defined]  # options that name a function


def _clipped_scores(
    scorer: Callable[..., Any] | str | None, reward_model: Mapping[str, Any] | None, clip: float
) -> Callable[[list[Chat]], list[float | None]]:
    if not clip > 0:
        raise OptionError("score_clip", clip, "the score would vanish or flip", "Set score_clip > 0.")
    function = import_path(scorer) if isinstance(scorer, str) else scorer
    if reward_model is not None:
        if scorer is not None:
            raise OptionError("scorer", scorer, "two scorers", "Keep one.", reward_model=dict(reward_model))
        from grpo_ext.rewards.models.reward_model import scorer_from

        function = scorer_from(reward_model)

    def score(chats: list[Chat]) -> list[float | None]:
        if function is None or not chats:
            return [0.0] * len(chats)
        scores = list(function(chats))
        if len(scores) != len(chats):
            raise ValueError(
                f"scorer={scorer!r} gave {len(scores)} scores for {len(chats)} chats: return one per chat."
            )
        return [clipped_score(s, clip) for s in scores]

    return score
