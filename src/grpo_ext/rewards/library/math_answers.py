r"""Which value a text gives as its final answer.

What math-verify leaves open is decided here, where a wrong answer could score by accident: which part of the text is
the answer, several values in one answer ("72 or 73"), what words and letters beside a number make of it.
"""

import re
from dataclasses import replace

from grpo_ext.rewards.library.math_equality import MAX_FORMULA, Value, equal, readable
from grpo_ext.rewards.library.math_equations import EQUALS, concluded
from grpo_ext.rewards.library.math_notation import FACTOR, PRODUCT, clean
from grpo_ext.rewards.text import answer_block, boxed

_TAIL = 2000  # characters: an unmarked answer is looked for at the end of the text, whatever its length

_UNSIGNED = r"(?:\d+\s+\d+/\d+|\d+(?:\.\d+)?(?:[eE][-+]?\d{1,3}\b)?|\.\d+)"
_TERM = rf"(?:{_UNSIGNED}|\([-+]?{_UNSIGNED}(?:\s*[-+*/]\s*{_UNSIGNED})*\))"
# A number with the arithmetic that goes on from it; none glued to a letter (m2), a decimal comma, a time; no exponent.
_VALUE = re.compile(
    rf"(?<![\w.^])(?<!\d[,:])(?<!\^\{{)(?:(?<![\d)])[-+])?{_TERM}(?:\s*[-+*/]\s*-?{_TERM})*(?!\d|[.,:]\d)(?P<percent>\s*%)?"
)
_SCALED_BEFORE = "twice|thrice|double|triple|half|third|quarter|root"
_SCALED_AFTER = "squared|cubed|factorial|halves|thirds|fifths|tenths|hundredths|thousandths"
# What shows that a number is only a piece of a larger formula (3 - 72, \log_2 72, f(72), 72 x, 72/x, twice 72).
_BEFORE_PIECE = re.compile(
    r"(?:[\d)}]|(?<![A-Za-z])[a-zA-Z])\s*[-+*/^]+\s*$|[{}\\<>√]\s*$|(?:\\[A-Za-z]+|_(?:\w|\d+))\s*$|[A-Za-z]\($"
    rf"|\b(?i:{_SCALED_BEFORE})\s+(?:of\s+)?$"
)
_AFTER_PIECE = re.compile(
    rf"\s*/?\s*(?:{FACTOR}|\((?:{PRODUCT}|(?![A-Za-z]{{2}})))|\s*[\\^{{*+<>_%]|\s*/\s*[{{\\]"
    rf"|\s*-\s*(?:[A-Za-z](?![A-Za-z])|{PRODUCT}|[(\\])|/?[A-KM-Z](?![A-Za-z])|\s+[kBDEGKMO-SUX-Z](?![A-Za-z'])"
    rf"|\s+(?:{_SCALED_AFTER})\b|\s+and (?:a|one) (?:half|third|quarter)\b"
    rf"|\s+(?:[a-z]+ than|times|plus|minus|of)\s+{FACTOR}"
)
# A bound, a negation, an alternative: not the value.
_BOUND = re.compile(
    r"\b(?:not|than|least|most|over|under|above|below|beyond|up to|but)\s+[-+$(\\]*\.?\d"
    r"|\d[^.\n]*\b(?:or\b(?!\s+so\b|[^,;]*=)|at (?:least|most)\b|(?:is|was) (?:not|wrong|incorrect)\b)",
    re.IGNORECASE,
)
_ALTERED = re.compile(rf"\b(?:not|no|minus|negative|{_SCALED_BEFORE}|{_SCALED_AFTER})\b", re.IGNORECASE)
_UNIT = re.compile(
    r"(?:\s*[A-Za-z'\"]{2}|\s+[A-JLN-Za-jl-z](?![A-Za-z])|[mgshLl](?![A-Za-z])|\s*/)?(?:[A-Za-z\s/.,;'\"()²³-]|(?<=[A-Za-z])(?:[23](?!\d)|\s*\^\s*\{?-?[1-3]\}?))*"
)
_ANCHOR = re.compile(r"\banswers?\b[^.\n:=\d]{0,60}?(?:\b(?:is|are|was|be|equals)\b|[:=])", re.IGNORECASE)
_CONTRAST = re.compile(r",\s*(?:and |but )?not\s+[-+$(\\.\d][^,]*\Z", re.IGNORECASE)  # "15, not 16"
_REASON = re.compile(r"(?<=\S),?\s+(?:because|since)\b.*", re.IGNORECASE)
_HASHED = re.compile(r"[-+$€£¥\\(.]*\d[^\n]*")
_MATH = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|\$([^$\n]*[\\^][^$\n]*)\$", re.DOTALL)
_JOINED = re.compile(r"^[^.\n]*\b(?:or|maybe|possibly|perhaps|not)\s+(?:\w+\s+)?$", re.IGNORECASE)
_LISTED = re.compile(
    r"\s*(?:[A-Za-z]{3,}\s*)??(?:[,;]\s*|(?:or|and|to|maybe)\s+)+(?:[A-Za-z]{2,}\s+)?[-+($.\\]*\d", re.IGNORECASE
)
_STEP = re.compile(r"[,;\n]|\.\s|\b(?:and|or|so|then|thus)\b")
_BASE = re.compile(r"(\d+)\s*_\s*\{?\s*(\d+)\s*\}?")
_LETTERS = rf"(?!{PRODUCT})[A-Za-z]{{2,}}"
_WORD = re.compile(rf"(?<![\\A-Za-z]){_LETTERS}")
_WORDS_AROUND = re.compile(rf"^(?:{_LETTERS}[:,]?\s+)+|(?:\s+{_LETTERS}(?:\s*\^\s*\{{?\d\}}?)?)+$")
# A unit of one letter after a formula in which no letter stands for a number.
_UNIT_LETTER = re.compile(r"\A((?:[^A-Za-z\\]|\\[A-Za-z]+)*[\d})])\s*[mgshlL](?:\s*\^\s*\{?[23]\}?)?\Z")
# Several numbers side by side, percent in the middle, or powers and factorials in which sympy would hang.
_UNFIT = re.compile(r"(?<![_\d])\d+\s+\d|\d:\s*\d|\^\s*\{?\s*-?\s*\d{4,}|\^[^-+*/=\sA-Za-z]*\^|\*\*|!|%(?!\Z)")


def score(text: str, gold: str | None) -> float | None:
    """1.0 if the final answer of `text` equals that of `gold`, otherwise 0.0; None if `gold` has no readable one."""
    gold_value = None if gold is None else read(str(gold), is_gold=True)
    if gold_value is None or not readable(gold_value):
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
        sentence = _REASON.sub("", sentence)
        if _VALUE.search(clean(sentence)) or _MATH.search(sentence):
            return _first_value(sentence)
    return _last_value(text)


def _marked(text: str) -> str | None:
    block = answer_block(text)
    if block is not None:
        return boxed(block) or _hashes(block) or block
    return boxed(text) or _hashes(text)


def _hashes(text: str) -> str | None:
    match = _HASHED.fullmatch(text.rpartition("####")[2].strip()) if "####" in text else None
    return match[0] if match else None


def _only_value(span: str) -> Value | None:
    """Value of a marked answer: a formula, or the one number in the words around it; None for several numbers."""
    if len(span) > _TAIL:
        return None
    text = clean(_CONTRAST.sub("", span))
    anchors = list(_ANCHOR.finditer(text))
    symbol, text = concluded(text[anchors[-1].end() :] if anchors else text)
    if _BOUND.search(text):
        return None
    value = _formula(text) or (None if EQUALS.search(text) else _number_in_words(text))
    return value and replace(value, symbol=symbol)


def _first_value(sentence: str) -> Value | None:
    """First value of the sentence after "answer is", unless it opens a list such as "72 or 73"."""
    segments = list(_MATH.finditer(sentence))
    if segments:
        values = [_only_value(next(filter(None, match.groups()))) for match in segments]
        several = any(_LISTED.match(sentence, match.end()) for match in segments) or _BOUND.search(clean(sentence))
        return None if several or any(value != values[0] for value in values) else values[0]
    symbol, text = concluded(clean(sentence))
    if _BOUND.search(text):
        return None
    value, match = _formula(text), _VALUE.search(text)
    if value is None and match and not EQUALS.search(text) and not _LISTED.match(text, match.end()):
        value = _value(text, match)
    return value and replace(value, symbol=symbol)


def _last_value(text: str) -> Value | None:
    """Last number or formula of running text, unless it is the second of two joined by "or"."""
    segments = list(_MATH.finditer(text))
    if segments and not _VALUE.search(clean(text[segments[-1].end() :])):
        second = _JOINED.match(text[segments[-2].end() if len(segments) > 1 else 0 : segments[-1].start()])
        return None if second else _only_value(next(filter(None, segments[-1].groups())))
    cleaned = clean(text)
    symbol, stated = ("", "") if "\n" in cleaned else concluded(cleaned)
    whole = _formula(stated)
    if whole is not None:
        return replace(whole, symbol=symbol)
    matches = list(_VALUE.finditer(cleaned))
    if not matches:
        return None
    between = cleaned[matches[-2].end() : matches[-1].start()] if len(matches) > 1 else "."
    step = next((step for step in reversed(_STEP.split(cleaned)) if _VALUE.search(step)), "")
    if _JOINED.match(between) or EQUALS.search(concluded(step)[1]):  # the 0 of 5x + 7y = 0
        return None
    return _value(cleaned, matches[-1])


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
    based = _BASE.fullmatch(text)
    if based:
        return Value(based[1], base=based[2])
    match = _VALUE.match(text)
    number = _value(text, match) if match and _UNIT.fullmatch(text, match.end()) else None
    if number is not None:
        return number
    if _ALTERED.search(text):
        return None
    text = _UNIT_LETTER.sub(r"\1", _WORDS_AROUND.sub("", text).strip())
    if not text or len(text) > MAX_FORMULA or _WORD.search(text) or _UNFIT.search(text):
        return None
    return Value(f"${text.removesuffix('%').rstrip()}$", text.endswith("%"))
