"""Judge whether a completion gives the reference's answer."""

from dataclasses import dataclass

from grpo_ext.rewards.library.math_answers import read_answer, reference_of
from grpo_ext.rewards.library.math_copies import copied
from grpo_ext.rewards.library.math_equality import equal
from grpo_ext.rewards.library.math_marks import answer_part, marked
from grpo_ext.rewards.text import Completion


@dataclass(frozen=True)
class Judgement:
    """A score, and the answers read on both sides, for people."""

    score: float | None
    gold_parsed: str
    answer_parsed: str


def judge(
    text: str,
    gold: str | None,
    where: str = "auto",
    prompt: Completion = "",
    *,
    cut: bool = False,
    copied_formulas: bool = False,
) -> Judgement:
    """Return 1.0 if the final answer of `text` equals that of `gold`, otherwise 0.0; None if `gold` is unreadable.

    Also None for a text that was `cut` off before any mark; 0.0 if the answer repeats a calculation of the `prompt`,
    or, without `copied_formulas`, a formula.
    """
    reference = None if gold is None else reference_of(str(gold))
    if reference is None:
        return Judgement(None, "[unreadable]", "[not read]")
    if cut and marked(answer_part(text), where) is None:
        return Judgement(None, str(reference), "[cut off]")
    try:
        answer = read_answer(text, where, word=bool(reference.word))
        if answer is None:
            return Judgement(0.0, str(reference), "[no answer]")
        right = equal(reference, answer) and not copied(reference, answer, prompt, formulas=not copied_formulas)
        return Judgement(float(right), str(reference), str(answer))
    except Exception as error:  # sympy raises many things on strange answers; an answer must not avoid its 0 that way
        return Judgement(0.0, str(reference), f"[{type(error).__name__}]")
