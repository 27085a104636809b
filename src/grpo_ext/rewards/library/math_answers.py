r"""Which value a text gives as its final answer, and whether two values are equal.

math-verify parses and compares. What it leaves open is decided here, where a wrong answer could score by accident:
which part of the text is the answer, several values in one answer ("72 or 73"), percent signs, mixed numbers, times.
"""

import logging
import re
import threading
from dataclasses import dataclass
from typing import Any

from grpo_ext.rewards.library.text import answer_block, boxed

_TAIL = 2000  # characters: an unmarked answer is looked for at the end of the text, whatever its length
_MAX_FORMULA = 200  # characters: a longer formula is prose or an attempt to stall the parser

_UNSIGNED = r"(?:\d+\s+\d+/\d+|\d+(?:\.\d+)?(?:[eE][-+]?\d{1,3}\b)?|\.\d+)"
_TERM = rf"(?:{_UNSIGNED}|\([-+]?{_UNSIGNED}(?:\s*[-+*/]\s*{_UNSIGNED})*\))"
# A number with the arithmetic that goes on from it; none glued to a letter (m2), a decimal comma, a time; no exponent.
_VALUE = re.compile(
    rf"(?<![\w.^])(?<!\d[,:])(?<!\^\{{)(?:(?<![\d)])[-+])?{_TERM}(?:\s*[-+*/]\s*-?{_TERM})*(?!\d|[.,:]\d)(?P<percent>\s*%)?"
)
# What shows that a number is only a piece of a larger formula (3 - 72, \log_2 72, f(72)), or a bound, not the value.
_BEFORE_PIECE = re.compile(
    r"(?:[\d)}]|(?<![A-Za-z])[a-zA-Z])\s*[-+*/^]+\s*$|[{}\\<>√]\s*$|(?:\\[A-Za-z]+|_(?:\w|\d+))\s*$|[A-Za-z]\($"
)
_AFTER_PIECE = re.compile(r"[b-fi-kn-rt-zA-KM-Z](?![A-Za-z])|\s+[kKM]\b|\s*[\\^{*+<>]|\s*\((?![A-Za-z]{2})")
_BOUND = re.compile(r"\b(?:not|than|least|most)\s+[-+$(\\]*\.?\d|\d[^.\n]*\bor\s+(?:more|less|fewer)\b", re.IGNORECASE)
_UNIT = re.compile(
    r"(?:\s*[A-Za-z'\"]{2}|\s+[A-JLN-Za-jl-z](?![A-Za-z])|[mgshLl](?![A-Za-z])|\s*/)?(?:[A-Za-z\s/.,;'\"()²³-]|(?<=[A-Za-z])(?:[23](?!\d)|\s*\^\s*\{?-?[1-3]\}?))*"
)
_ANCHOR = re.compile(r"\banswers?\b[^.\n:=\d]{0,60}?(?:\b(?:is|are|was|be|equals)\b|[:=])", re.IGNORECASE)
_CONTRAST = re.compile(r",\s*(?:and |but )?not\s+[-+$(\\.\d][^,]*\Z", re.IGNORECASE)  # "15, not 16"
_EQUALS = re.compile(r"(?<![<>!:])=")
_LEAD = re.compile(
    r"\A(?:[\s:;,!?*_#\"'“”„«»\u2018\u2019—]|[A-Za-z]+:)*"
)  # marks and a label; no value begins like that
_HASHED = re.compile(r"[-+$€£¥\\(.]*\d[^\n]*")
_MATH = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|\$([^$\n]*[\\^][^$\n]*)\$", re.DOTALL)
_JOINED = re.compile(r"^[^.\n]*\b(?:or|maybe|possibly|perhaps|not)\s+(?:\w+\s+)?$", re.IGNORECASE)
_LISTED = re.compile(r"\s*(?:[A-Za-z]{3,}\s+)??(?:or|and|to|maybe)\s+(?:[A-Za-z]{2,}\s+)?[-+(.]*\d", re.IGNORECASE)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
# Several numbers side by side, or powers and factorials in which sympy would hang.
_UNFIT = re.compile(r"(?<![_\d])\d+\s+\d|\d:\s*\d|\^\s*\{?\s*-?\s*\d{4,}|\^[^-+*/=\s]*\^|\*\*|!")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_REWRITES: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"<<[^<>]*>>", ""),  # GSM8K's calculator annotations
        (r"[\u2212\u2013\ufe63](?=\s*[\d.$\\(])", "-"),  # minus signs
        (r"(?<=\d)(?:,?\\!|\\,|[\u2009\u202f])(?=\d{3}(?!\d))", ","),  # thousands
        (r"[\u00a0\u2009\u202f]|\\[,!;: ]|~|\\(?:q?quad|therefore|displaystyle|boxed)(?![A-Za-z])", " "),
        (r"<?[-=]>|[→⇒⟹≈]|\\(?:approx|implies|(?:[Ll]ong)?[Rr]ightarrow)(?![A-Za-z])", "="),
        (r"\u00d7|\\times\b|\\cdot\b", "*"),
        (r"\u00f7|\\div\b", "/"),
        (r"\{,\}", ","),
        (r"\\[$]|[$€£¥]|\\[()\[\]]", ""),
        (r"\s+", lambda m: "\n" if "\n" in m[0] else " "),  # runs of it would take what follows cubic time
        (r"\\%|\bper ?cent\b|\bpct\b", "%"),
        (r"\^? ?\{? ?(?:\\circ|°) ?\}?|\bdegrees?\b", " "),
        (r"\\[dt]frac", r"\\frac"),
        (r"\\(?:text|mathrm|textbf|mathbf|operatorname|mbox)\s*\{([^{}]*)\}", r" \1 "),
        (r"^\s*[*\u2022]\s+", ""),  # the bullet of a list
        (r"(?<![\d)}])(\*\*|__|`)(?=\S)(.+?)(?<=\S)\1", r"\2"),
        (r"(?<![\w)}])([*_])(?=\S)([^*_\n]+)(?<=\S)\1(?![\w({])", r"\2"),
        (r"(?<![\\A-Za-z])(sqrt|log|ln|sin|cos|tan)(?![A-Za-z])", r"\\\1"),
        (r"\\sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)", lambda m: m[0].replace(",", "")),
        (r"(?<![\w}^/])(\d+)\s*\\frac\s*\{(\d+)\}\s*\{(\d+)\}", r"\1 \2/\3"),
        (r"(?<![\w}^])\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}(?![\w(\\^{])", r"\1/\2"),
        (rf"(?<=\d)\s+({'|'.join(_SCALES)})\b", lambda m: f"*{10 ** _SCALES[m[1]]}"),
    )
]


@dataclass(frozen=True)
class Value:
    """A final answer: a formula that math-verify reads, and whether a percent sign followed it."""

    formula: str
    percent: bool = False


def score(text: str, gold: str | None) -> float | None:
    """1.0 if the final answer of `text` equals that of `gold`, otherwise 0.0; None if `gold` has no readable one."""
    gold_value = None if gold is None else read(str(gold), is_gold=True)
    if gold_value is None or not _readings(gold_value):
        return None
    answer = read(text)
    return float(answer is not None and equal(gold_value, answer))


def read(text: str, *, is_gold: bool = False) -> Value | None:
    r"""The final answer of a text, or None if it gives none, or several that differ.

    In this order: the last `<answer>` block, the last \boxed{}, `#### N` on the last line, the sentence after the last
    "answer is", the last number or formula. Text up to the last `</think>` never counts; in a `<think>` left open
    only the first three do. A gold answer without a mark is read as if the whole of it were marked.
    """
    text = text.rpartition("</think>")[2]
    marked = _marked(text)
    if marked is not None or is_gold:
        return _only_value(text if marked is None else marked)
    if "<think>" in text:
        return None
    text = text[-_TAIL:]
    anchors = list(_ANCHOR.finditer(text))
    if anchors:
        rest = text[anchors[-1].end() :].strip().lstrip(": \n")
        sentence = _CONTRAST.sub("", re.split(r"\n|[.?!](?:\s|$)", rest, maxsplit=1)[0])
        if _BOUND.search(sentence):
            return None
        if _VALUE.search(_clean(sentence)) or _MATH.search(sentence):
            return _first_value(sentence)
    return _last_value(text)


def equal(gold: Value, answer: Value) -> bool:
    """Whether two values are equal by math-verify, to 6 decimals where one is a decimal fraction.

    If only one has a percent sign, x% may stand for x / 100, and for x where |x| >= 1: "50%" answers 50 and 0.5, but
    "0.5%" does not answer 0.5.
    """
    from math_verify import verify

    if gold.percent == answer.percent:
        gold, answer = Value(gold.formula), Value(answer.formula)
    timeout = _timeout(5)
    return any(verify(g, a, timeout_seconds=timeout) for g in _readings(gold) for a in _readings(answer))


def _marked(text: str) -> str | None:
    block = answer_block(text)
    if block is not None:
        return boxed(block) or _hashes(block) or block
    return boxed(text) or _hashes(text)


def _hashes(text: str) -> str | None:
    match = _HASHED.fullmatch(text.rpartition("####")[2].strip()) if "####" in text else None
    return match[0] if match else None


def _clean(text: str) -> str:
    """Text with one spelling of minus, percent and fractions, without currency signs and thousands separators."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text.strip().rstrip('.,;:?*"”»').strip()


def _right_side(text: str) -> str:
    """What follows the last equals sign, without the marks in front of it."""
    return _LEAD.sub("", _EQUALS.split(text)[-1], count=1).strip()


def _only_value(span: str) -> Value | None:
    """Value of a marked answer: a formula, or the one number in the words around it; None for several numbers."""
    if len(span) > _TAIL or _BOUND.search(span := _CONTRAST.sub("", span)):
        return None
    text = _clean(span)
    anchors = list(_ANCHOR.finditer(text))
    text = _right_side(text[anchors[-1].end() :] if anchors else text)
    return _formula(text) or _number_in_words(text)


def _first_value(sentence: str) -> Value | None:
    """First value of the sentence after "answer is", unless it opens a list such as "72 or 73"."""
    segments = [next(filter(None, match.groups())) for match in _MATH.finditer(sentence)]
    if segments:
        values = [_only_value(segment) for segment in segments]
        return values[0] if all(value == values[0] for value in values) else None
    text = _right_side(_clean(sentence))
    match = _VALUE.search(text)
    if match is None or _LISTED.match(text, match.end()):
        return None
    return _formula(text) or _value(text, match)


def _last_value(text: str) -> Value | None:
    """Last number or formula of running text, unless it is the second of two joined by "or"."""
    segments = list(_MATH.finditer(text))
    if segments and not _VALUE.search(_clean(text[segments[-1].end() :])):
        return _only_value(next(filter(None, segments[-1].groups())))
    cleaned = _clean(text)
    whole = None if "\n" in cleaned else _formula(_right_side(cleaned))
    if whole is not None:
        return whole
    matches = list(_VALUE.finditer(cleaned))
    if not matches:
        return None
    between = cleaned[matches[-2].end() : matches[-1].start()] if len(matches) > 1 else "."
    return None if _JOINED.match(between) else _value(cleaned, matches[-1])


def _number_in_words(text: str) -> Value | None:
    if re.search(r"\d!", text):  # a factorial, as far as one can tell
        return None
    values = {_value(text, match) for match in _VALUE.finditer(text)}
    return values.pop() if len(values) == 1 else None


def _value(text: str, match: re.Match[str]) -> Value | None:
    """The number of a match, or None where it is a piece of something larger, such as the 3 of 3x."""
    if _BEFORE_PIECE.search(text[: match.start()]) or _AFTER_PIECE.match(text, match.end()):
        return None
    number = match[0].removesuffix(match["percent"] or "").strip()
    mixed = re.fullmatch(r"([-+]?)(\d+)\s+(\d+/\d+)", number)
    return Value(f"{mixed[1]}({mixed[2]}+{mixed[3]})" if mixed else number, bool(match["percent"]))


def _formula(text: str) -> Value | None:
    """The whole text as one value: a number with its unit, or a formula with at most words around it."""
    match = _VALUE.match(text)
    number = _value(text, match) if match and _UNIT.fullmatch(text, match.end()) else None
    if number is not None:
        return number
    text = re.sub(r"^(?:[A-Za-z]{2,}[:,]?\s+)+|(?:\s+[A-Za-z]{2,}(?:\s*\^\s*\{?\d\}?)?)+$", "", text).strip()
    if not text or len(text) > _MAX_FORMULA or _WORD.search(text) or _UNFIT.search(text):
        return None
    return Value(f"${text.rstrip('% ')}$", text.endswith("%"))


def _readings(value: Value) -> list[Any]:
    """Sympy objects that the value may stand for; none if it cannot be parsed."""
    parsed = _parse(value.formula)
    if parsed is None or not (value.percent and getattr(parsed, "is_number", False)):
        return [] if parsed is None else [parsed]
    return [parsed / 100, parsed] if abs(parsed) >= 1 else [parsed / 100]


def _parse(formula: str) -> Any:
    import sympy
    from math_verify import LatexExtractionConfig, parse

    number = re.fullmatch(r"\+?(-?(?:\d{1,300}(?:\.\d{1,300})?|\.\d{1,300})(?:[eE][-+]?\d{1,3})?)", formula)
    if number:  # the common case, without LaTeX's parser
        return (sympy.Float if re.search(r"[.eE]", formula) else sympy.Integer)(number[1])
    if len(formula) > _MAX_FORMULA:
        return None
    latex = formula if formula.startswith("$") else f"${formula}$"
    found = parse(latex, [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=_timeout(5))
    return found[0] if found else None


def _timeout(seconds: int) -> int | None:
    """math-verify's time limit, or None off the main thread, where its alarm signal cannot be set."""
    if threading.current_thread() is threading.main_thread():
        return seconds
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it warns of the missing limit
    return None
