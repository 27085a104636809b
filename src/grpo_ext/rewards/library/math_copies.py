r"""Answers that are the question's own calculation, still to be worked out: `876+530` where 1406 is asked for."""

import re
from typing import Any

from grpo_ext.rewards.library.math_marks import answer_part, marked
from grpo_ext.rewards.text import content_text

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_SIGNS = (
    (re.compile("\\\\times|\\\\cdot|[\u00d7\u00b7\u2219]"), "*"),
    (re.compile("\\\\div|\u00f7"), "/"),
    (re.compile("[\u2212\u2013]"), "-"),
)
_LONGEST = 200
"""Characters of a calculation that is looked at."""
_DRESS = re.compile(r"\\left|\\right|\\[()\[\],;:! ]|[${}]")
_RUN = re.compile(r"[\d.()+*/^ -]+")
_CALCULATION = re.compile(r"[\d.()+*/^-]*\d[)]*(?:\*\*|[+*/^-])[(+-]*\d[\d.()+*/^-]*")


def question_of(prompt: Any) -> str:
    """Text that a prompt asks by: the whole of it, or the last message that is not the assistant's."""
    if isinstance(prompt, str):
        return prompt
    asked = [message for message in prompt if message.get("role") != "assistant"]
    return content_text(asked[-1].get("content")) if asked else ""


def only_copied(text: str, gold: str, prompt: Any, where: str = "auto") -> bool:
    """Whether the answer of `text` is a calculation with numbers of the question, where `gold` is one number.

    At least two of its numbers stand in the question. An answer that is written as the reference is no copy.
    """
    part = answer_part(text)
    answer = marked(part, where)
    plain = _plain((part.strip().rpartition("\n")[2] if answer is None else answer)[-_LONGEST:])
    if answer is None:  # read from a sentence: what it ends in
        plain = next((run for run in reversed(_RUN.findall(plain)) if any(map(str.isdigit, run))), "")
    calculation = "".join(plain.split()).rstrip(".")
    if not _CALCULATION.fullmatch(calculation) or not _NUMBER.fullmatch(gold.strip().lstrip("-").replace(",", "")):
        return False
    asked = _NUMBER.findall(question_of(prompt).replace(",", ""))
    return sum(number in asked for number in _NUMBER.findall(calculation)) >= 2


def _plain(answer: str) -> str:
    answer = _FRACTION.sub(r"(\1)/(\2)", answer)
    for sign, plain in _SIGNS:
        answer = sign.sub(plain, answer)
    return _DRESS.sub("", answer).replace(",", "")
