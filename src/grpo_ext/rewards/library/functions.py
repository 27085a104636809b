"""Rewards computed from a text, its length or a gold answer: pure functions in TRL's protocol.

Columns come in by keyword; the options of a recipe follow the star. None means "cannot be scored".
"""

import re
from collections.abc import Callable
from typing import Any

from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.library.math_judgement import NO_ANSWER, OUT_OF_TIME, judge
from grpo_ext.rewards.library.math_marks import PLACES
from grpo_ext.rewards.protocol import OptionError, rewards
from grpo_ext.rewards.text import TAGS, Completion, boxed, boxes_are_whole, completion_text, has_content

FORMAT_STYLES = ("think_answer", "think_answer_inline", "think", "answer", "boxed")
# The tags with the newlines around them in the layout of think_answer; the outer edges of the text have none.
_TAGS_WITH_NEWLINES = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_STEP = re.compile(
    r"\bStep \d+[:.]|^[ \t]*\d+[.)]\s|^[ \t]*[-*•]\s|\b(?:First|Second|Third|Next|Then|Finally|Lastly),", re.MULTILINE
)


def matches_format(text: str, style: str) -> bool:
    r"""Return whether the whole text has the layout `style`, with each of the style's tags exactly once and filled.

    think_answer: `<think>\n...\n</think>\n<answer>\n...\n</answer>`, one blank line allowed before `<answer>`.
    think_answer_inline: the same with any white space, or none, around the tags. think: `<think>...</think>`, then an
    answer. answer: any text, then `<answer>...</answer>` at the end. boxed: every \boxed{...} of the text is closed
    and none is in another, and the last is filled.

    Raises:
        ValueError: unknown style.
    """
    if style == "boxed":
        return has_content(boxed(text) or "") and boxes_are_whole(text)
    if style not in FORMAT_STYLES:
        raise OptionError("style", style, "not a format", did_you_mean(str(style), FORMAT_STYLES))
    tags = {"think": TAGS[:2], "answer": TAGS[2:]}.get(style, TAGS)
    parts = re.split(f"({'|'.join(tags)})", text)
    outside, inside = parts[::4], parts[2::4]
    if tuple(parts[1::2]) != tags or not all(map(has_content, inside)):
        return False
    if style == "answer":
        return not outside[1].strip()
    if style == "think":
        return not outside[0].strip() and has_content(outside[1])
    if style == "think_answer_inline":
        return not "".join(outside).strip()
    lines = all(content[0] == content[-1] == "\n" for content in inside)
    return lines and outside in (["", "\n", ""], ["", "\n\n", ""])


@rewards.register("format", independent=True)
def format(completions: list[Completion], *, style: str = "think_answer", **_: object) -> list[float]:
    """1.0 for a completion whose whole text has the layout `style` (see `matches_format`), otherwise 0.0.

    Rule-based format rewards: DeepSeek-R1, arXiv:2501.12948.

    Raises:
        ValueError: unknown style.
    """
    matches_format("", style)  # an unknown style is an error even for an empty batch
    return [float(matches_format(completion_text(c), style)) for c in completions]


@rewards.register("tags", independent=True)
def tags(completions: list[Completion], *, newlines: bool = False, **_: object) -> list[float]:
    r"""0.25 for each of `<think>`, `</think>`, `<answer>`, `</answer>` that occurs exactly once: 0 to 1.

    With `newlines` a tag counts together with the newlines that think_answer has around it: `<think>\n`,
    `\n</think>\n`, `\n<answer>\n`, `\n</answer>`.
    """
    wanted = _TAGS_WITH_NEWLINES if newlines else TAGS
    return [0.25 * sum(completion_text(c).count(tag) == 1 for tag in wanted) for c in completions]


@rewards.register("code_format", independent=True)
def code_format(
    completions: list[Completion], language: list[str] | None = None, *, default_language: str = "python", **_: object
) -> list[float]:
    r"""1.0 for `<think>\n...\n</think>\n<answer>\n...\n</answer>` with a ```language block in the answer.

    Neither the thinking nor the block may be empty. The language is the row's (column `language`), else
    `default_language`. Text may follow. From Open-R1.
    """
    languages = language if language is not None else [default_language] * len(completions)
    return [
        float(_is_code_layout(completion_text(completion), named or default_language))
        for completion, named in zip(completions, languages, strict=True)
    ]


def _is_code_layout(text: str, language: str) -> bool:
    opening, _, text = text.partition("<think>\n")
    thinking, _, answer = text.partition("\n</think>\n<answer>\n")
    code, closed, after = answer.partition(f"```{language}")[2].partition("```")
    filled = thinking.strip() and code.strip() and closed
    return bool(not opening and filled) and "\n</answer>\n" in f"{after}\n"


@rewards.register("accuracy", independent=True)
def accuracy(
    completions: list[Completion],
    solution: list[str | None],
    completion_ids: list[list[int]] | None = None,
    prompts: list[Any] | None = None,
    log_extra: Callable[[str, list], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    *,
    read: str = "auto",
    max_length: int | None = None,
    copied_formulas: bool = False,
    decimal_comma: bool = False,
    **_: object,
) -> list[float | None]:
    r"""1.0 where the final answer equals `solution` by math-verify, else 0.0; None where `solution` cannot tell.

    The final answer is what a mark holds: `<answer>...</answer>`, then \boxed{...}, then a line `#### N`, then what
    follows "answer is"; or else the whole text, or a last sentence of one clause: "So the total is N.", "x = N.".
    `read` (tag, boxed, hash, last) admits only one of them. A mark is read whole or not at all, and several values, a
    denial and answers inside the reasoning are no answer. An equation matches an equation that it is a multiple of, `x
    = 5` matches 5, and a list is compared as a whole. An answer that repeats the text of `solution` is right; where
    its value cannot be read, any other is None. Details: `math_marks.find`, `math_values.read`, `math_equality.equal`.

    A completion of `max_length` tokens, which was cut off, is None where it has no mark. One that repeats the
    question's own calculation is 0, and so is one that repeats its formula, unless `copied_formulas` (see
    `math_copies.copied`). `decimal_comma`: numbers in `solution` and answers are written 7.629,5. Logs `solution`,
    `gold_parsed` and `answer_parsed` beside the completions, and the share without an answer that could be read.

    Raises:
        ValueError: unknown `read`, or max_length < 1.
    """
    if read not in PLACES:
        raise OptionError("read", read, "not a place of an answer", did_you_mean(str(read), PLACES))
    if max_length is not None and max_length < 1:
        raise OptionError("max_length", max_length, "completions are longer", "Set it to max_completion_length.")
    lengths = [len(ids) for ids in completion_ids or []] or [0] * len(completions)
    judged = [
        judge(
            completion_text(text),
            gold,
            read,
            prompt,
            cut=max_length is not None and length >= max_length,
            copied_formulas=copied_formulas,
            decimal_comma=decimal_comma,
        )
        for text, gold, length, prompt in zip(
            completions, solution, lengths, prompts or [""] * len(completions), strict=True
        )
    ]
    if log_extra:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [judgement.gold_parsed for judgement in judged])
        log_extra("answer_parsed", [judgement.answer_parsed for judgement in judged])
    if log_metric and judged:
        log_metric("accuracy/unread", sum(judgement.answer_parsed == NO_ANSWER for judgement in judged) / len(judged))
    if log_metric and (late := sum(judgement.answer_parsed == OUT_OF_TIME for judgement in judged)):
        log_metric("accuracy/out_of_time", late)
    return [judgement.score for judgement in judged]


@rewards.register("reasoning_steps", independent=True)
def reasoning_steps(completions: list[Completion], **_: object) -> list[float]:
    """min(1, count / 3) of "Step 1:", "1.", bullets, "First," to "Third,", "Next,", "Then,", "Finally,", "Lastly,"."""
    return [min(1.0, len(_STEP.findall(completion_text(c))) / 3) for c in completions]


@rewards.register("soft_overlong", independent=True)
def soft_overlong(completion_ids: list[list[int]], *, max_length: int, buffer: int, **_: object) -> list[float]:
    """0 up to max_length - buffer tokens, then linear down to -1. DAPO, arXiv:2503.14476.

    Raises:
        ValueError: buffer is not in 1..max_length.
    """
    if not 0 < buffer <= max_length:
        cure = f"Set 1 <= buffer <= {max_length}."
        raise OptionError("buffer", buffer, "the penalty needs a zone inside max_length", cure)
    return [max(-1.0, min(0.0, (max_length - buffer - len(ids)) / buffer)) for ids in completion_ids]


@rewards.register("repetition", independent=True)
def repetition(completions: list[Completion], *, n: int = 3, max_penalty: float = -1.0, **_: object) -> list[float]:
    """max_penalty (1 - unique / total) over the n-grams of lower-cased words; 0 for fewer than n words.

    After "Demystifying Long Chain-of-Thought Reasoning", arXiv:2502.03373, which counts tokens instead of words.

    Raises:
        ValueError: n < 1 or max_penalty > 0.
    """
    if n < 1:
        raise OptionError("n", n, "an n-gram has at least one word", "Set n >= 1.")
    if max_penalty > 0:
        raise OptionError("max_penalty", max_penalty, "it would reward repetition", "Set max_penalty <= 0.")
    return [max_penalty * _repeated(completion_text(c).lower().split(), n) for c in completions]


def _repeated(words: list[str], n: int) -> float:
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
