"""Whether a completion gives the reference's answer, and what was read on both sides."""

from dataclasses import dataclass
from typing import Any

from grpo_ext.rewards.library.math_answers import read, reference_of
from grpo_ext.rewards.library.math_copies import only_copied
from grpo_ext.rewards.library.math_equality import equal
from grpo_ext.rewards.library.math_marks import answer_part, marked


@dataclass(frozen=True)
class Judgement:
    """A score, and what was read on both sides, as a person is shown it."""

    score: float | None
    gold_parsed: str
    answer_parsed: str


def judge(text: str, gold: str | None, where: str = "auto", prompt: Any = "", *, cut: bool = False) -> Judgement:
    """1.0 if the final answer of `text` equals that of `gold`, otherwise 0.0; None if `gold` has no readable one.

    None too for a text that was `cut` off before any mark; 0 where it gives back a calculation of the `prompt`.
    """
    reference = None if gold is None else reference_of(str(gold))
    if reference is None:
        return Judgement(None, "[unreadable]", "[not read]")
    if cut and marked(answer_part(text), where) is None:
        return Judgement(None, str(reference), "[cut off]")
    try:
        answer = read(text, where, word=bool(reference.word))
        if answer is None:
            return Judgement(0.0, str(reference), "[no answer]")
        right = equal(reference, answer) and not only_copied(text, str(gold), prompt, where)
        return Judgement(float(right), str(reference), str(answer))
    except Exception as error:  # whatever sympy raises of a strange answer; none may escape its 0 by that
        return Judgement(0.0, str(reference), f"[{type(error).__name__}]")
