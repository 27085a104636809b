"""Judge whether a completion gives the reference's answer."""

import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from grpo_ext.rewards.library.math_copies import copied, question_of
from grpo_ext.rewards.library.math_equality import MathValue, OutOfTime, equal, readable, same_formula
from grpo_ext.rewards.library.math_marks import Found, answer_of, answer_part, find
from grpo_ext.rewards.library.math_notation import in_point_notation, tidy
from grpo_ext.rewards.library.math_values import after_phrase, is_formula, read, stated
from grpo_ext.rewards.text import Completion

OUT_OF_TIME = "[time limit]"
NO_ANSWER = "[no answer]"
_MOST_VALUES = 8
_TRIES = 3
_unread: Counter[str] = Counter()


class _Unread(Exception):
    """A reference without a value now, but perhaps when the machine is less busy: reading has a time limit."""


@dataclass(frozen=True)
class Reference:
    """A reference answer: its text, and its value where that can be read."""

    text: str
    value: MathValue | None

    def __str__(self) -> str:
        """Return it for people."""
        return str(self.value or self.text)


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
    part = answer_part(text)
    found = find(part, where)
    if cut and (found is None or not found.marked):
        return Judgement(None, str(reference), "[cut off]")
    question = question_of(prompt)
    try:
        if found and any(_same_text(content, reference.text) for content in _only(found)):
            answer = _read(found, question, decimal_comma)
            copy = (
                answer and reference.value and copied(reference.value, answer, question, formulas=not copied_formulas)
            )
            return Judgement(float(not copy), str(reference), str(answer or reference.text))
        answer = _read(found, question, decimal_comma) if found else None
        if reference.value is None:
            return Judgement(None, str(reference), str(answer or NO_ANSWER))
        right = answer is not None and equal(reference.value, answer)
        if not right and answer and found and found.marked:
            right = any(_same_formula(reference, only) for only in _only(found))
        if answer is None:
            return Judgement(0.0, str(reference), NO_ANSWER)
        right = right and not copied(reference.value, answer, question, formulas=not copied_formulas)
        return Judgement(float(right), str(reference), str(answer))
    except OutOfTime:
        return Judgement(0.0, str(reference), OUT_OF_TIME)
    except Exception as error:  # sympy raises many things on strange answers; an answer must not avoid its 0 that way
        return Judgement(0.0, str(reference), f"[{type(error).__name__}]")


def _only(found: Found) -> tuple[str, ...]:
    """Return the one text that marks have, or the list that they form."""
    return found.contents if len(found.contents) == 1 else (", ".join(found.contents),) * found.joined


def _same_formula(reference: Reference, answer: str) -> bool:
    """Return math-verify's own verdict where one of the texts is more than a number."""
    texts = (reference.text, answer)
    is_symbolic = re.search(r"[A-Za-z]", "".join(texts)) and reference.value and not reference.value.word
    return bool(is_symbolic) and all(map(is_formula, texts)) and same_formula(*texts)


def _same_text(answer: str, reference: str) -> bool:
    return len(answer) <= 2 * len(reference) + 200 and tidy(answer) == tidy(reference) != ""


def _read(found: Found, question: str, decimal_comma: bool) -> MathValue | None:
    """Return the one value of all marks, or of the list that they form; None for several."""
    contents = tuple(map(in_point_notation, found.contents)) if decimal_comma else found.contents
    if len(contents) > _MOST_VALUES:
        return None
    if not found.marked:
        return stated(contents[0], question)
    one = after_phrase if found.sentence else read
    values = [one(content, question) for content in contents]
    first = values[0] if values else None
    if first and all(value and (value == first or _alike(first, value)) for value in values[1:]):
        return first
    return read(", ".join(contents), question) if found.joined and all(values) else None


def reference_of(gold: Any, decimal_comma: bool = False) -> Reference | None:
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
    except _Unread as error:
        return Reference(str(error), None)


@lru_cache(maxsize=1024)  # the completions of a group share one
def _reference(gold: str, decimal_comma: bool) -> Reference:
    part = answer_part(gold)
    found = find(part)
    if found is None or not found.marked:
        found = Found((part.strip(),))
    text = ", ".join(found.contents)
    value = _read(found, "", decimal_comma)
    try:
        if value is None or readable(value):
            return Reference(text, value)
    except OutOfTime:
        pass
    _unread[gold] += 1
    if _unread[gold] < _TRIES:
        raise _Unread(text)
    return Reference(text, None)


def by_value(answers: Iterable[Hashable]) -> dict[Hashable, Hashable]:
    r"""Return for each answer, as a `Judgement` has it, the first one of its value: \frac12 and 0.5 are one."""
    first: dict[Hashable, Hashable] = {}
    kept: list[tuple[Hashable, MathValue]] = []
    for answer in sorted(answers, key=str):
        value = read(str(answer))
        first[answer] = next((other for other, known in kept if value and _alike(known, value)), answer)
        if value and first[answer] == answer:
            kept.append((answer, value))
    return first


def _alike(first: MathValue, second: MathValue) -> bool:
    try:
        return equal(first, second)
    except Exception:  # what sympy cannot compare are two answers
        return False
