r"""Find answers that repeat the question's own calculation: `876+530` where 1406 is expected."""

import re

from grpo_ext.rewards.library.math_marks import answer_part, marked
from grpo_ext.rewards.text import Completion, content_text

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_SIGNS = (
    (re.compile("\\\\times|\\\\cdot|[\u00d7\u00b7\u2219]"), "*"),
    (re.compile("\\\\div|\u00f7"), "/"),
    (re.compile("[\u2212\u2013]"), "-"),
)
_LONGEST = 200
"""Characters of a calculation that are read."""
_DRESS = re.compile(r"\\left|\\right|\\[()\[\],;:! ]|[${}]")
_RUN = re.compile(r"[\d.()+*/^ -]+")
_CALCULATION = re.compile(r"[\d.()+*/^-]*\d[)]*(?:\*\*|[+*/^-])[(+-]*\d[\d.()+*/^-]*")


def question_of(prompt: Completion) -> str:
    """Return the text of the question: the whole prompt, or its last message that is not the assistant's."""
    if isinstance(prompt, str):
        return prompt
    asked = [message for message in prompt if message.get("role") != "assistant"]
    return content_text(asked[-1].get("content")) if asked else ""


def only_copied(text: str, gold: str, prompt: Completion, where: str = "auto") -> bool:
    """Return whether the answer of `text` is a calculation with numbers of the question, where `gold` is one number.

    At least two of its numbers occur in the question.
    """
    part = answer_part(text)
    answer = marked(part, where)
    plain = _plain((part.strip().rpartition("\n")[2] if answer is None else answer)[-_LONGEST:])
    if answer is None:  # read from a sentence: its end
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
