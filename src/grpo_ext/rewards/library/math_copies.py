r"""Find answers that repeat the question's own calculation or formula: `876+530` where 1406 is expected."""

import re

from grpo_ext.rewards.library.math_equality import MathValue
from grpo_ext.rewards.library.math_notation import clean
from grpo_ext.rewards.library.math_units import NUMERALS
from grpo_ext.rewards.text import Completion, content_text

_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:(?:\s*\*\s*10\s*\^|[eE])\s*\{?\s*([-+]?\d{1,2})(?!\d)\}?)?(\s*\\?%)?")
_MIXED = re.compile(r"\b(?:(\d{1,9}) )?(\d{1,9})/(0*[1-9]\d{0,9})")
_FRACTION = re.compile(r"\\frac\s*\{([\d.]+)\}\s*\{([\d.]+)\}")
_DRESS = re.compile(r"\\(?:left|right|[,;:! ])|[\s${}]")


def question_of(prompt: Completion) -> str:
    """Return the text of the question: the whole prompt, or its last message that is not the assistant's."""
    if isinstance(prompt, str):
        return prompt
    messages = [message for message in prompt if message.get("role") != "assistant"]
    return content_text(messages[-1].get("content")) if messages else ""


def copied(reference: MathValue, answer: MathValue, prompt: Completion, *, formulas: bool = True) -> bool:
    """Return whether the answer leaves undone what the question asks for.

    Where the reference is one number, a fraction, a ratio or a list of these, a calculation is copied if it has two
    numbers of the question. With `formulas`, so is a formula that stands in the question, and not in the reference.
    """
    if _shape(answer.formula) == "" or _numbers(answer.formula) == _numbers(reference.formula):
        return False
    question = clean(question_of(prompt))
    numbers = {*_numbers(question), *_numbers(question.replace("%", ""))}
    numbers |= {int(whole or 0) + int(top) / int(bottom) for whole, top, bottom in _MIXED.findall(question)}
    if _shape(answer.formula) != "/":  # 1/2 may be worked out where the question says "one of two"
        numbers |= {float(NUMERALS[word]) for word in re.findall("[a-z]+", question.lower()) if word in NUMERALS}
    if not _shape(reference.formula).strip("/:") and sum(n in numbers for n in _numbers(answer.formula)) >= 2:
        return True
    written, expected, asked_text = (_DRESS.sub("", text) for text in (answer.formula, reference.formula, question))
    return formulas and written != expected and written.strip("()[]") in asked_text


def _numbers(formula: str) -> list[float]:
    values = [
        float(digits) * 10.0 ** int(power or 0) / (100 if percent else 1)
        for digits, power, percent in _NUMBER.findall(formula)
    ]
    return sorted(round(value, 9) for value in values)


def _shape(formula: str) -> str:
    """Return what joins the numbers of a formula: "" for a number or a list, "/" for a fraction, "+^" for 2+3^2."""
    joined = re.sub(r" +(?=[-+])", "", _NUMBER.sub("1", _FRACTION.sub(r"\1/\2", formula)))
    return re.sub(r"(?:^|(?<=[(\[{,;$\s]))[-+](?=1)|[\s${}(\[\])\\,;]|1", "", joined)
