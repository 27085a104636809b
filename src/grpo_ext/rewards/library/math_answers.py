r"""Read the final answer of a text.

Math-verify leaves cases open in which a wrong answer could score by accident. They are decided here: which part of
the text is the answer, several values in one answer ("72 or 73"), words and letters beside a number.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from grpo_ext.rewards.library.math_equality import MAX_FORMULA, MAX_MATRIX, RATIO, MathValue, OutOfTime, readable
from grpo_ext.rewards.library.math_equations import EQUALS, concluded, items_of
from grpo_ext.rewards.library.math_languages import WORD, in_english
from grpo_ext.rewards.library.math_marks import answer_of, answer_part, marked
from grpo_ext.rewards.library.math_notation import FACTOR, PRODUCT, clean
from grpo_ext.rewards.library.math_numerals import spelled
from grpo_ext.rewards.library.math_units import unit_after

_TAIL = 2000  # characters: an unmarked answer is searched only at the end of the text

_UNSIGNED = r"(?:\d+\s+\d+/\d+|\d+(?:\.\d+)?(?:[eE][-+]?\d{1,3}\b)?|\.\d+)"
_TERM = rf"(?:{_UNSIGNED}|\([-+]?{_UNSIGNED}(?:\s*[-+*/]\s*{_UNSIGNED})*\))"
# A number and the arithmetic after it; not part of a word (m2), a decimal comma, a time or an exponent.
_VALUE = re.compile(
    rf"(?<![\w.^])(?<!\d[,:])(?<!\^\{{)(?:(?<![\d)])[-+])?{_TERM}(?:\s*[-+*/]\s*-?{_TERM})*(?!\d|[.,:]\d)(?P<percent>\s*%)?"
)
_SCALED_BEFORE = "twice|thrice|double|triple|half|third|quarter|root"
_SCALED_AFTER = "squared|cubed|factorial|halves|thirds|fifths|tenths|hundredths|thousandths"
# Context of a number that is only a piece of a larger formula (3 - 72, \log_2 72, f(72), 72 x, 72/x, twice 72).
_BEFORE_PIECE = re.compile(
    r"(?:[\d)}]|(?<![A-Za-z])[a-zA-Z])\s*[-+*/^]+\s*$|[{}\\<>√]\s*$|(?:\\[A-Za-z]+|_(?:\w|\d+))\s*$|[A-Za-z]\($"
    rf"|\b(?i:{_SCALED_BEFORE})\s+(?:of\s+)?$"
)
_AFTER_PIECE = re.compile(
    rf"\s*/?\s*(?:{FACTOR}|\((?:{PRODUCT}|(?![A-Za-z]{{2}})))|\s*[\\^{{*+<>_%]|\s*/\s*[{{\\]"
    rf"|\s*-\s*(?:[A-Za-z](?![A-Za-z])|{PRODUCT}|[(\\])|/?[A-KM-Z](?![A-Za-z])|\s+[kBDEGKMO-SUX-Z](?![A-Za-z'])"
    rf"|\s+(?:{_SCALED_AFTER})\b|\s+and (?:a|one) (?:half|third|quarter)\b"
    rf"|\s+(?:[a-z]+ than|times|plus|minus|of|and|per)\s+{FACTOR}|\s+(?:times|plus|minus|of)\s+\d"
)
# A bound, a negation or an alternative is not a value.
_BOUND = re.compile(
    r"\bnone\b|\b(?:not|than|least|most|over|under|above|below|beyond|up to|but|or)\s+[-+$(\\]*\.?\d"
    r"|\d[^.\n]*\b(?:or\b(?!\s+so\b|[^,;]*=)|at (?:least|most)\b|(?:is|was) (?:not|wrong|incorrect)\b|not\W*\Z)",
    re.IGNORECASE,
)
_DENIED = (
    r"\b(?:not|never|none|neither|nor|except\w*|exclud\w*|without|besides|at (?:most|least)|(?:less|more) than"
    r"|up to)\b"
)
_NEGATED = re.compile(rf"{_DENIED}|\b(?:{_SCALED_BEFORE})\b", re.IGNORECASE)
_UNIT = re.compile(
    r"(?:\s*[A-Za-z'\"]{2}|\s+[A-JLN-Za-jl-z](?![A-Za-z])|[mgshLl](?![A-Za-z])|\s*/)?(?:[A-Za-z\s/.,;'\"()²³-]|(?<=[A-Za-z])(?:[23](?!\d)|\s*\^\s*\{?-?[1-3]\}?))*"
)
# Words that change the value of the number that they are beside, or make it one of several.
_CHANGED = re.compile(
    rf"{_DENIED}|\b(?:no|but|other|under|over|above|below|beyond|minus|negative|plus|times(?!\Z)|divided|multipl\w*"
    r"|divisible|modulo|mod|choose|powers?|root|score|dozens?|gross|pairs?|couples?|factor|log|fails?|wrong|incorrect"
    rf"|false|impossible|{_SCALED_BEFORE}|{_SCALED_AFTER})\b"
    r"|\|\s*\w+ than\b|\| (?:(?:ish|fold)\b|\(|\s*-\s*[A-Za-z])",
    re.IGNORECASE,
)
# The last word before the number in a plain sentence: "Janet makes 18", "a total of 18", "It is about 18".
_STATED = re.compile(
    r"(?:\A|[\s(])(?:is|are|was|were|be|has|have|had|get|got|gave|make|made|need|pay|paid|spend|spent|take|took|left|sold|bought"
    r"|ate|cost|earn|save|answer|total|result|sum|ratio|about|around|approximately|roughly|exactly|only|so|then|thus|hence|therefore|and|it"
    r"|(?:total|answer|sum|result) of|equal to|[a-z]{2,}(?:s|ed))\Z",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r"[,;:.=!?\n⇒]")
_PER = re.compile(r"\s*/\s*([A-Za-z]+)")
# The label of an option before its value: \textbf{(B)}\ 12, "B) 12", "B. 12", "(b) 12".
_OPTION = re.compile(
    r"\A[\s$*]*(?:(?:\(([A-J])\)|([A-J])[).:])(?:\\[ ,;:~]|\\q?quad|[\s$~:.*])*(?=[-+\d\\.(])"
    r"|\(([a-j])\)[\s$]+(?=[\d\\]))"
)
_NAMED_OPTION = re.compile(r"\A[\s$*]*(?:option|choice)\s+(?=\(?[A-J]\b)", re.IGNORECASE)
_IN_TEXT = re.compile(r"\\(?:text(?!color)|math)\w*\s*\{([^{}]*)\}")
# An amount of money that is the whole answer: the sign is its unit.
_MONEY = re.compile(r"-?\s*\\?([$€£])\s*-?[\d.,]+|-?[\d.,]+\s*\\?([$€£])")
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "sterling"}
_ANCHOR = re.compile(r"\banswers?\b[^.\n:=—\d]{0,60}?(?:\b(?:is|are|was|be|equals)\b|[:=—])", re.IGNORECASE)
_CONTRAST = re.compile(r",\s*(?:and |but )?not\s+[-+$(\\.\d][^,]*\Z", re.IGNORECASE)  # "15, not 16"
_REASON = re.compile(r"(?<=\S),?\s+(?:because|since)\b.*", re.IGNORECASE)
_MATH = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$((?:\\[^\n]|[^$\n\\])*?(?:\\[^\n]|\^)(?:\\[^\n]|[^$\n\\])*|\s*[(\[][^$()\n]*,[^$()\n]*[)\]]\s*)\$",
    re.DOTALL,
)
_JOINED = re.compile(r"^[^.\n]*\b(?:or|maybe|possibly|perhaps|not|never)\s+(?:\w+\s+)?$", re.IGNORECASE)
_NOT_BEFORE = re.compile(r"\b(?:not|never)\s+(?:\w+\s+)?\Z", re.IGNORECASE)
_LISTED = re.compile(
    r"\s*(?:[A-Za-z]{3,}\s*)??(?:[,;]\s*|(?:or|and|to|maybe)\s+)+(?:[A-Za-z]{2,}\s+)?[-+($.\\]*\d", re.IGNORECASE
)
_STEP = re.compile(r"[,;\n]|\.\s|\b(?:and|or|so|then|thus)\b")
_BASE = re.compile(r"(\d+)\s*_\s*\{?\s*(\d+)\s*\}?")
_LETTERS = rf"(?!{PRODUCT})[A-Za-z]{{2,}}"
_WORD = re.compile(rf"(?<![\\A-Za-z]){_LETTERS}")
_WORDS_BEFORE = re.compile(rf"^(?:{_LETTERS}[:,]?\s+)+")
_WORDS_AROUND = re.compile(rf"{_WORDS_BEFORE.pattern}|(?:\s+{_LETTERS}(?:\s*\^\s*\{{?\d\}}?)?)+$")
# A unit of one letter after a formula in which no letter denotes a number.
_UNIT_LETTER = re.compile(r"\A((?:[^A-Za-z\\]|\\[A-Za-z]+)*[\d})])\s*[mgshlL](?:\s*\^\s*\{?[23]\}?)?\Z")
_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?")  # the common case, which needs no cleaning
_PHRASE = re.compile(r"(?=[^\W\d_]{2}|[^\x00-\u03ff])[^\W\d_](?:[^\W\d_]|[' -]){0,59}")
_CHOICE = re.compile(r"[A-Za-z]")
"""A letter behind "answer is": elsewhere "a" and "I" are words."""
_ARTICLE = re.compile(r"\Athe\s+", re.IGNORECASE)
_SET = re.compile(r"\A\{([^{}]*)\}\Z")
_SPACED = re.compile(r"[-+]?[1-9]\d{0,2}(?: \d{3})+(?:[.,]\d+)?")
_SPACES = re.compile(r"\s+|\\(?:left|right)(?![A-Za-z])")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{(?:[pbBvV]?matrix|smallmatrix|array)\}(?:\{[clr| ]+\})?")
_ROWS = re.compile(r"\A\$?\[\s*\[[^\[\]]+\](?:\s*,\s*\[[^\[\]]+\])*\s*\]\$?\Z")  # [[1, 2], [3, 4]]
_NAMED = re.compile(r"(\\?[A-Za-z]+(?:_\{?\w\}?)?|\\(?:vec|mathbf)\s*\{?\s*[A-Za-z]\s*\}?)\s*=\s*(?=\\)")
_LENGTH = re.compile(r"(?<![A-Za-z])[A-Z]{2}(?=\s*=)")  # of the segment AB
_MOST_ITEMS = 20
_BRACKET, _DEEPEST = re.compile(r"[()\[\]{}]"), 12
# Several numbers side by side, percent in the middle, or powers and factorials in which sympy would hang.
_UNFIT = re.compile(r"(?<![_\d])\d+\s+\d|\d:\s*\d|\^\s*\{?\s*-?\s*\d{4,}|\^[^-+*/=\sA-Za-z]*\^|\*\*|!|%(?!\Z)")


class _Unread(Exception):
    """A reference that cannot be read now, but perhaps when the machine is less busy: reading has a time limit."""


_TRIES = 3
_unread: Counter[str] = Counter()


def reference_of(gold: Any) -> MathValue | None:
    """Return the value of a reference answer, or None if it cannot be read; without a mark all of it is the answer.

    An object, itself or as JSON, is its "ground_truth" or "answer", a list of one its item.
    """
    if isinstance(gold, str) and re.match(r'\s*(?:\{\s*"|\[\s*")', gold):
        try:
            gold = json.loads(gold)
        except (ValueError, RecursionError):
            return None
    try:
        answer = answer_of(gold)
        return None if answer is None else _reference(answer)
    except _Unread:
        return None


@lru_cache(maxsize=1024)  # the completions of a group share one
def _reference(gold: str) -> MathValue | None:
    text = answer_part(gold)
    span = marked(text)
    span = text if span is None else span
    value = _word(span) or _only_value(span)
    try:
        if value is None or readable(value):
            return value
    except OutOfTime:
        pass
    _unread[gold] += 1
    if _unread[gold] < _TRIES:
        raise _Unread
    return None


def read_answer(text: str, where: str = "auto", *, word: bool = False) -> MathValue | None:
    r"""Return the final answer of a text, or None if there is none or if several differ.

    In this order: the last `<answer>` block, the last \boxed{} (with those that it is joined to by "and" or a comma),
    `#### N` on the last line, the sentence after the last "answer is", the last number or formula. `where` admits only
    one of them (`math_marks.PLACES`). Text up to the last `</think>` or after an end token never counts; in an open
    `<think>` only marks do. Where the reference is a `word`, a word is read: the whole of a mark, of the
    sentence after "answer is", or of the text.
    """
    text = answer_part(text)
    span = marked(text, where)
    if span is not None:
        return _word(span) if word else _only_value(span)
    if "<think>" in text or where not in ("auto", "last"):
        return None
    text = in_english(text[-_TAIL:], "" if word else WORD)
    anchors = list(_ANCHOR.finditer(text)) if where == "auto" else []
    if number := spelled(clean(text[anchors[-1].end() :] if anchors else text)):
        return MathValue(number)
    if anchors:
        rest = text[anchors[-1].end() :].strip().lstrip(": \n")
        sentence = _CONTRAST.sub("", re.split(r"\n|[.?!](?:\s|$)", rest, maxsplit=1)[0])
        sentence = _REASON.sub("", sentence)
        if word:
            return _word(sentence)
        if _VALUE.search(clean(sentence)) or re.search(r"\d,\d", sentence) or _MATH.search(sentence):
            return _labelled(sentence, _first_value)
        if _CHOICE.fullmatch(clean(sentence)):
            return _formula(clean(sentence))
    return _word(text) if word else _labelled(text, _last_value)


def _word(span: str) -> MathValue | None:
    """Return a phrase of letters, such as "odd" or "Monday", that is not a product of variables."""
    if len(span) > _TAIL or re.search(r"\d", span):
        return None
    text = _ARTICLE.sub("", clean(_ANCHOR.split(in_english(span, ""))[-1]).strip("{} "))
    if spelled(text) or not _PHRASE.fullmatch(text) or not _WORD.search(in_english(text)):
        return None
    phrase = " ".join(text.split())
    return MathValue("", word=phrase.casefold())


def _only_value(span: str) -> MathValue | None:
    """Return the value of a marked answer: a formula, or the one number among words; None for several numbers."""
    if _NUMBER.fullmatch(span):
        return MathValue(span)
    if len(span) > _TAIL:
        return None
    if number := spelled(_IN_TEXT.sub(r"\1", span)):
        return MathValue(number)
    return _labelled(span, _unlabelled)


def _unlabelled(span: str) -> MathValue | None:
    money = _MONEY.fullmatch(re.sub(r"\A\$(.+)(?<!\\)\$\Z", r"\1", span))
    if money and (amount := _formula(clean(span))):
        return replace(amount, unit=_CURRENCIES[money[1] or money[2]])
    span = _ROWS.sub(_matrix_of, in_english(span))
    if _ENVIRONMENT.search(span):
        return _matrix(span)
    text = clean(_CONTRAST.sub("", _exact(span)))
    anchors = list(_ANCHOR.finditer(text))
    text = text[anchors[-1].end() :] if anchors else text
    lead, *equation = EQUALS.split(text, maxsplit=1)
    if equation and _NEGATED.search(lead):
        return None
    symbol, text = concluded(text)
    text = _SET.sub(r"\1", text)
    value = _ratio(text) or _list(text)
    if value is None and _BOUND.search(text):
        return None
    value = value or _formula(text) or (None if EQUALS.search(text) else _number_in_words(text))
    return value and replace(value, symbol=symbol)


def _labelled(span: str, read: Callable[[str], MathValue | None]) -> MathValue | None:
    """Return the value that `read` finds after the label of an option, with its letter: 12 and B for "(B) 12"."""
    span = _IN_TEXT.sub(r" \1 ", span) if _IN_TEXT.match(span.lstrip(" $")) else span
    span = _NAMED_OPTION.sub("", span)
    if (label := _OPTION.match(span)) is None:
        return read(span)
    value = read(span[label.end() :])
    return value and replace(value, option=next(filter(None, label.groups())).upper())


def _exact(span: str) -> str:
    r"""Remove the rounding after an exact value: \frac{1}{3} \approx 0.33 becomes \frac{1}{3}."""
    exact, _, rounded = re.split(r"(≈|\\approx(?![A-Za-z])|\Z)", span, maxsplit=1)
    side = exact.rpartition("=")[2]
    return exact if rounded.strip() and re.search(r"\d|\\pi|\\sqrt", side) and not re.search(r"\.\d", side) else span


def _matrix(span: str) -> MathValue | None:
    """Return a matrix, or a formula of matrices, after at most its name; None if it contains words."""
    named = _NAMED.match(text := _SPACES.sub(" ", span.replace("$", " ")).strip().rstrip(".").strip())
    formula = text[named.end() :] if named else text
    if (
        len(formula) > MAX_MATRIX
        or _is_deep(formula)
        or _WORD.search(_ENVIRONMENT.sub(" ", formula))
        or _UNFIT.search(formula)
    ):
        return None
    return MathValue(f"${formula}$", symbol=named[1] if named else "")


def _matrix_of(match: re.Match[str]) -> str:
    rows = re.findall(r"\[([^\[\]]+)\]", match[0])
    return r"\begin{pmatrix}" + r"\\".join(row.replace(",", "&") for row in rows) + r"\end{pmatrix}"


def _ratio(text: str) -> MathValue | None:
    lead = _WORDS_BEFORE.match(text)
    ratio = text[lead.end() :] if lead else text
    plain = RATIO.fullmatch(ratio) and (lead is None or _is_plain(lead[0], ""))
    return MathValue(re.sub(r"\s", "", ratio)) if plain else None


def _list(text: str) -> MathValue | None:
    """Return a list of formulas with "and" or "or" between some of them as one with commas."""
    items = [] if EQUALS.search(text) else items_of(text)
    if not 1 < len(items) <= _MOST_ITEMS or not re.search(r"(?<![A-Za-z])(?:and|or)(?![A-Za-z])", text):
        return None
    values = [None if _WORD.search(item) else _formula(item) for item in items]
    if any(value is None or value.percent or value.base for value in values):
        return None
    return MathValue(f"${', '.join(value.formula.strip('$') for value in values if value)}$")


def _first_value(sentence: str) -> MathValue | None:
    """Return the first value of the sentence after "answer is", unless it opens a list such as "72 or 73"."""
    segments = list(_MATH.finditer(sentence))
    if segments:
        values = [_only_value(next(filter(None, match.groups()))) for match in segments]
        several = any(_LISTED.match(sentence, match.end()) for match in segments) or _BOUND.search(clean(sentence))
        return None if several or any(value != values[0] for value in values) else values[0]
    symbol, text = concluded(clean(sentence))
    if _BOUND.search(text):
        return None
    value, match = _ratio(text) or _list(text) or _formula(text), _VALUE.search(text)
    if value is None and match and not EQUALS.search(text) and not _LISTED.match(text, match.end()):
        value = _value(text, match)
    return value and replace(value, symbol=symbol)


def _last_value(text: str) -> MathValue | None:
    """Return the last number or formula of running text, unless it is the second of two joined by "or"."""
    segments = list(_MATH.finditer(text))
    if segments and not _VALUE.search(clean(text[segments[-1].end() :])):
        second = _JOINED.match(text[segments[-2].end() if len(segments) > 1 else 0 : segments[-1].start()])
        return None if second else _only_value(next(filter(None, segments[-1].groups())))
    cleaned = clean(text)
    symbol, stated = ("", "") if "\n" in cleaned else concluded(cleaned)
    whole = _ratio(stated) or _list(stated) or (None if _BOUND.search(stated) else _formula(stated))
    if whole is not None:
        return replace(whole, symbol=symbol)
    matches = list(_VALUE.finditer(cleaned))
    if not matches:
        return None
    between = cleaned[matches[-2].end() : matches[-1].start()] if len(matches) > 1 else "."
    step = next((step for step in reversed(_STEP.split(cleaned)) if _VALUE.search(step)), "")
    before = cleaned[max(0, matches[-1].start() - 40) : matches[-1].start()]
    if _JOINED.match(between) or _NOT_BEFORE.search(before):
        return None
    if EQUALS.search(concluded(step)[1]):  # the 0 of 5x + 7y = 0
        return None
    return _value(cleaned, matches[-1])


def _number_in_words(text: str) -> MathValue | None:
    matches = list(_VALUE.finditer(text))
    if len(matches) > _MOST_ITEMS or re.search(
        r"\d!|-\s*\(|\)\s*\^", text
    ):  # a factorial; a sign or power of the whole
        return None
    values = [
        _value(text, match) if _is_plain(text[: match.start()], text[match.end() :]) else None for match in matches
    ]
    units = {value.unit for value in values if value} - {""}
    return values[0] if len(set(values)) == 1 and len(units) < 2 else None


def _is_plain(before: str, after: str) -> bool:
    """Return whether the clause around a number states it, as in "she makes 18 dollars", and does not change it."""
    before = _CLAUSE.split(before)[-1].strip(" $*(-+'\"“”")
    after = _CLAUSE.split(after)[0]
    rate = _PER.match(after)
    return (
        not (before and not _STATED.search(before) and not unit_after(before, 0))
        and not _CHANGED.search(f"{before} | {after}")
        and (rate is None or unit_after(rate[1], 0) != "")
    )


def _value(text: str, match: re.Match[str]) -> MathValue | None:
    """Return the number of a match, or None where it is part of a larger formula, such as the 3 of 3x."""
    if _BEFORE_PIECE.search(text[: match.start()]) or _AFTER_PIECE.match(text, match.end()):
        return None
    number = match[0].removesuffix(match["percent"] or "").strip()
    if mixed := re.fullmatch(r"([-+]?)(\d+)\s+(\d+)/(\d+)", number):  # an improper fraction: 3/2 for 1 1/2
        number = f"{mixed[1]}{int(mixed[2]) * int(mixed[4]) + int(mixed[3])}/{mixed[4]}"
    return MathValue(number, bool(match["percent"]), unit=unit_after(text, match.end()))


def _formula(text: str) -> MathValue | None:
    """Return the whole text as one value: a number with its unit, or a formula with at most words around it."""
    based = _BASE.fullmatch(text)
    if based:
        return MathValue(based[1], base=based[2])
    if _SPACED.fullmatch(text):
        text = text.replace(" ", "")
    match = _VALUE.match(text)
    rest = match and _UNIT.fullmatch(text, match.end())
    number = _value(text, match) if match and rest and _is_plain("", rest[0]) else None
    if number is not None:
        return number
    formula = _WORDS_AROUND.sub("", text).strip()
    start = text.find(formula)
    if not _is_plain(text[:start], text[start + len(formula) :]):
        return None
    formula = _UNIT_LETTER.sub(r"\1", formula)
    if (
        not formula
        or len(formula) > MAX_FORMULA
        or _is_deep(formula)
        or _WORD.search(_LENGTH.sub("x", formula))
        or _UNFIT.search(formula)
    ):
        return None
    if formula in ("a", "A", "I") and formula != text:  # the article left over from a sentence
        return None
    unit = unit_after(text, text.rfind(formula) + len(formula))
    return MathValue(f"${formula.removesuffix('%').rstrip()}$", formula.endswith("%"), unit=unit)


def _is_deep(formula: str) -> bool:
    """Return whether brackets are nested so deeply that the parser would not finish."""
    depth = deepest = 0
    for bracket in _BRACKET.findall(formula):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    return deepest > _DEEPEST
