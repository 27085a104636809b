"""Judge whether a completion gives the reference's answer."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from grpo_ext.rewards.library.math_answers import read_answer, reference_of
from grpo_ext.rewards.library.math_copies import copied
from grpo_ext.rewards.library.math_equality import MathValue, OutOfTime, equal
from grpo_ext.rewards.library.math_marks import answer_part, marked
from grpo_ext.rewards.text import Completion

OUT_OF_TIME = "[time limit]"


@dataclass(frozen=True)
class Judgement:
    """A score, and the answers read on both sides, for people."""

    score: float | None
    gold_parsed: str
    answer_parsed: str


def judge(
    text: str,
    gold: Any,
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
    reference = None if gold is None else reference_of(gold)
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
    except OutOfTime:
        return Judgement(0.0, str(reference), OUT_OF_TIME)
    except Exception as error:  # sympy raises many things on strange answers; an answer must not avoid its 0 that way
        return Judgement(0.0, str(reference), f"[{type(error).__name__}]")


def by_value(answers: Iterable[Hashable]) -> dict[Hashable, Hashable]:
    r"""Return for each answer, as a `Judgement` has it, the first one of its value: \frac12 and 0.5 are one."""
    first: dict[Hashable, Hashable] = {}
    kept: list[tuple[Hashable, MathValue]] = []
    for answer in sorted(answers, key=str):
        value = reference_of(rf"\boxed{{{answer}}}")
        first[answer] = next((other for other, known in kept if value and _alike(known, value)), answer)
        if value and first[answer] == answer:
            kept.append((answer, value))
    return first


def _alike(first: MathValue, second: MathValue) -> bool:
    try:
        return equal(first, second)
    except Exception:  # what sympy cannot compare are two answers
        return False
