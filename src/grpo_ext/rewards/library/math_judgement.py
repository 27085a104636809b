"""Judge whether a completion gives the reference's answer."""

import json
import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from grpo_ext.rewards.library.math_copies import copied, question_of
from grpo_ext.rewards.library.math_equality import MathValue, equal, readable
from grpo_ext.rewards.library.math_marks import Found, answer_of, answer_part, find
from grpo_ext.rewards.library.math_notation import in_point_notation, tidy
from grpo_ext.rewards.library.math_values import closing, read, stated
from grpo_ext.rewards.text import Completion

OUT_OF_TIME = "[time limit]"
NO_ANSWER = "[no answer]"
_MOST_VALUES = 8
_PAIR = re.compile(r"\A([\s$]*-?\d+)\{?,\}?(-?\d+[\s$]*)\Z")


class Reference(NamedTuple):
    """A reference answer: its text, and its value where that can be read."""

    text: str
    value: MathValue | None


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
    decimal_comma: bool = False,
) -> Judgement:
    """Return 1.0 if the final answer of `text` is that of `gold`, otherwise 0.0; None where `gold` cannot tell.

    The answer is right if it repeats the reference's text, or has its value. None: `gold` has no value that can be
    read, and the answer another text; or the text was `cut` off before any mark. 0.0 if the answer repeats a
    calculation of the `prompt`, or, without `copied_formulas`, a formula. `decimal_comma`: numbers on both sides are
    written 1.234,5.
    """
    reference = None if gold is None else reference_of(gold, decimal_comma)
    if reference is None:
        return Judgement(None, "[unreadable]", "[not read]")
    expected = str(reference.value or reference.text)
    marks = find(answer_part(text), where)
    if cut and (marks is None or not marks.marked):
        return Judgement(None, expected, "[cut off]")
    question = question_of(prompt)
    try:
        same = marks is not None and any(_same_text(content, reference.text) for content in _only(marks))
        answer = _read(marks, question, decimal_comma, reference) if marks else None
        shown = str(answer or (reference.text if same else NO_ANSWER))
        if reference.value is None or answer is None:
            return Judgement(1.0 if same else None if reference.value is None else 0.0, expected, shown)
        right = same or equal(reference.value, answer)
        right = right and not copied(reference.value, answer, question, formulas=not copied_formulas)
        return Judgement(float(right), expected, shown)
    except TimeoutError:
        return Judgement(0.0, expected, OUT_OF_TIME)
    except Exception as error:  # sympy raises many things on strange answers; an answer must not avoid its 0 that way
        return Judgement(0.0, expected, f"[{type(error).__name__}]")


def _only(marks: Found) -> tuple[str, ...]:
    """Return the one text that marks have, or the list that they form."""
    return marks.contents if len(marks.contents) == 1 else (", ".join(marks.contents),) * marks.joined


def _same_text(answer: str, reference: str) -> bool:
    return len(answer) <= 2 * len(reference) + 200 and tidy(answer) == tidy(reference) != ""


def _read(marks: Found, question: str, decimal_comma: bool, reference: Reference | None = None) -> MathValue | None:
    """Return the one value of all marks, or of the list that they form; None for several."""
    contents = tuple(map(in_point_notation, marks.contents)) if decimal_comma else marks.contents
    if reference and reference.value and "," in reference.value.formula:  # 2,1 is a list where the reference is one
        contents = tuple(_PAIR.sub(r"\1, \2", content) for content in contents)
    if len(contents) > _MOST_VALUES:
        return None
    if not marks.marked:
        return stated(contents[0], question)
    values = [read(content, question) or closing(content, question) for content in contents]
    first = values[0] if values else None
    if first and all(value and (value == first or _alike(first, value)) for value in values[1:]):
        return first
    return read(", ".join(contents), question) if marks.joined and all(values) else None


def reference_of(gold: Any, decimal_comma: bool) -> Reference | None:
    """Return a reference answer, or None if there is none; without a mark all of it is the answer.

    An object, itself or as JSON, is its "ground_truth" or "answer", a list of one its item.
    """
    if isinstance(gold, str) and re.match(r'\s*(?:\{\s*"|\[\s*")', gold):
        try:
            gold = json.loads(gold)
        except (ValueError, RecursionError):
            return None
    answer = answer_of(gold)
    if not answer or not answer.strip():
        return None
    try:
        return _reference(answer, decimal_comma)
    except TimeoutError:  # perhaps readable when the machine is less busy
        return Reference(answer, None)


@lru_cache(maxsize=1024)  # the completions of a group share one
def _reference(gold: str, decimal_comma: bool) -> Reference:
    part = answer_part(gold)
    marks = find(part)
    if marks is None or not marks.marked:
        marks = Found((part.strip(),))
    value = _read(marks, "", decimal_comma)
    return Reference(", ".join(marks.contents), value if value and readable(value) else None)


def by_value(answers: Iterable[Hashable]) -> dict[Hashable, Hashable]:
    r"""Return for each answer, as a `Judgement` has it, the first one of its value: \frac12 and 0.5 are one."""
    first: dict[Hashable, Hashable] = {}
    kept: dict[Hashable, MathValue | None] = {}
    for answer in sorted(answers, key=str):
        value = read(str(answer))
        first[answer] = next((other for other, twin in kept.items() if value and twin and _alike(twin, value)), answer)
        kept.setdefault(first[answer], value)
    return first


def _alike(first: MathValue, second: MathValue) -> bool:
    try:
        return equal(first, second)
    except Exception:  # what sympy cannot compare are two answers
        return False
