r"""Read a marked answer as a whole: a number with a unit or noun, a list, an equation, a formula, a word."""

import re
from dataclasses import replace

from grpo_ext.rewards.library.math_equality import MAX_FORMULA, MAX_MATRIX, RATIO, MathValue
from grpo_ext.rewards.library.math_equations import EQUALS, concluded, items_of
from grpo_ext.rewards.library.math_marks import DENIAL
from grpo_ext.rewards.library.math_notation import PRODUCT, clean
from grpo_ext.rewards.library.math_numerals import spelled
from grpo_ext.rewards.library.math_units import unit_of

LONGEST = 600
"""Characters of a marked answer; a longer one is prose."""
_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?")  # the common case, which needs no cleaning
_UNSIGNED = r"(?:\d+\s+\d+/\d+|\d+(?:\.\d+)?(?:[eE][-+]?\d{1,3}\b)?|\.\d+)"
_TERM = rf"(?:{_UNSIGNED}|\([-+]?{_UNSIGNED}(?:\s*[-+*/]\s*{_UNSIGNED})*\))"
_VALUE = re.compile(rf"(?:[-+]\s?)?{_TERM}(?:\s*[-+*/]\s*-?{_TERM})*(?![\d.,:]*\d)(?P<percent>\s*%)?")
_MONEY = re.compile(r"-?\s*\\?([$€£])\s*-?[\d.,]+|-?[\d.,]+\s*\\?([$€£])|(USD|EUR|GBP|Rs)\.?\s*-?[\d.,]+")
_CURRENCIES = {
    "$": "dollar",
    "€": "euro",
    "£": "sterling",
    "USD": "dollar",
    "EUR": "euro",
    "GBP": "sterling",
    "Rs": "rupee",
}
# The label of an option before its value: \textbf{(B)}\ 12, "B) 12", "B. 12", "(b) 12", "D: 45".
_OPTION = re.compile(
    r"\A[\s$*]*(?:(?:\(([A-J])\)|([A-J])[).:])(?:\\[ ,;:~]|\\q?quad|[\s$~:.*])*(?=[-+\d\\.(])"
    r"|\(([a-j])\)[\s$]+(?=[\d\\]))"
)
_NAMED_OPTION = re.compile(r"\A[\s$*]*(?:option|choice)\s+(?=\(?[A-J]\b)", re.IGNORECASE)
_LABEL = re.compile(r"\A\s*[A-Za-z]{2,30}\s*:\s*(?=\S)")
_IN_TEXT = re.compile(r"\\(?:text(?!color)|math(?!bb|cal))\w*\s*\{([^{}]*)\}")
_BASE = re.compile(r"(\d+)\s*_\s*\{?\s*(\d+)\s*\}?")
_LETTERS = rf"(?!{PRODUCT})[A-Za-z]{{2,}}"
_WORD = re.compile(rf"(?<![\\A-Za-z]){_LETTERS}|(?!\\)[^\W\d_a-zA-Z\u0370-\u03ff]")
# A formula in which no letter denotes a number, and what may be its unit.
_WITH_UNIT = re.compile(r"\A((?:[^A-Za-z\\]|\\[A-Za-z]+)*(?:[\d})]|\\pi))(\s*[^\W\d_](?:[^\W\d_]|[\s/^{}23.])*)\Z")
_PHRASE = re.compile(
    r"(?=[^\W\d_]{2}|[^\x00-\u03ff])[^\W\d_](?:[^\W\d_]|[' -]|[\u0900-\u0903\u093a-\u094f\u0e31-\u0e4e]){0,59}"
)
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
_UNFIT = re.compile(
    r"(?<![_\d])\d+\s+\d|\d:\s*\d|\^\s*\{?\s*-?\s*\d{4,}|\^[^-+*/=\sA-Za-z]*\^|\*\*|(?<!\d)!|(?<=\d{3})!|!!|%(?!\Z)|\?|\d'"
)
# The end of a sentence that states a value.
_STATED = re.compile(r"(?:\A|.*\s)(?:is|are|was|were|equals):?\s+(?=[-+\d.$\\(\u2212])", re.DOTALL)
_RELATION = re.compile(r".*\s(?=\$[^$]*(?:[<>≤≥≠]|\\(?:[lg]eq?|[lg]t|neq?)(?![A-Za-z]))[^$]*\$\.?\Z)", re.DOTALL)
_SENTENCES = re.compile(r"(?<=[.!?])\s+(?![=<>*/^+-])|\n")
_VALUE_BEFORE = re.compile(r"\b(?:is|are|was|were|equals)\s+[-+$(\\]*\d")
_DATE = re.compile(r"(?:[12]\d{3}([-/])[01]?\d\1[0-3]?\d|[0-3]?\d([-/.])[0-3]?\d\2[12]\d{3})")
# What math-verify drops: text, and what is drawn over a formula.
_DRESSING = re.compile(
    r"\\(?:text|mbox|cancel|sout|not|neg|lnot|overline|bar|hat|ne|pm|mp|(?:p|b)?mod|circ|[%$])|[%$]|\d\s*_"
)
_COMMA_PAIR = re.compile(r"-?\d+,-?\d+")


def read(span: str, question: str = "") -> MathValue | None:
    """Return the value of a marked answer, None if anything in it is not understood. Words of the question are."""
    if _NUMBER.fullmatch(span):
        return MathValue(span)
    if not span.strip() or len(span) > LONGEST:
        return None
    plain = _IN_TEXT.sub(r" \1 ", span)
    if number := spelled(plain):
        return MathValue(number)
    dressed = _NAMED_OPTION.sub("", plain if _IN_TEXT.match(span.lstrip(" $")) else span)
    if alone := re.fullmatch(r"\s*\(?([A-J])[).:]\s*", dressed):
        return MathValue(alone[1])
    if label := _OPTION.match(dressed):
        value = _read(dressed[label.end() :], question)
        return value and replace(value, option=next(filter(None, label.groups())).upper())
    return _read(dressed, question)


def is_formula(text: str) -> bool:
    """Return whether math-verify may judge a text as it is: one expression without prose, signs or steps."""
    bare = re.sub(r"\\(?:operatorname\s*\{[a-z]+\}|[A-Za-z]+)", " ", text)
    plain = not re.search(r"[A-Za-z]{3}|[=<>≤≥≠'?]|[^\x00-\x7f]|\d\s+\d", bare) and not _DRESSING.search(text)
    return (
        plain
        and len(text) <= MAX_FORMULA
        and len(items_of(text)) == 1
        and not _UNFIT.search(text)
        and not _is_deep(text)
    )


def after_phrase(text: str, question: str = "") -> MathValue | None:
    """Return the value of what follows "answer is": all of it, or what it ends with if it does not begin with one."""
    value = read(text, question)
    return value if value or re.match(r"[^A-Za-z]*\d", text) else stated(text, question)


def stated(text: str, question: str = "") -> MathValue | None:
    """Return the number or formula of an unmarked text: the whole of it, or what its last sentence ends with."""
    text = text.strip()
    if len(text) <= MAX_FORMULA and "\n" not in text and (value := read(text, question)):
        return value
    sentence = _SENTENCES.split(text[-LONGEST:])[-1]
    if DENIAL.search(sentence) or re.search(r"\bor\b", sentence):
        return None
    match = _STATED.match(sentence) or _RELATION.match(sentence)
    if match and _VALUE_BEFORE.search(sentence[: match.end()]):
        return None  # "The total is 65, the rest is 64."
    if match and (value := read(sentence[match.end() :], question)) and not value.word:
        return value
    if not EQUALS.search(cleaned := clean(sentence)):
        return None
    symbol, value_text = concluded(cleaned, prose=True)
    value = None if EQUALS.search(value_text) else _formula(value_text, question)
    return value and replace(value, symbol=symbol)


def _read(span: str, question: str) -> MathValue | None:
    money = _MONEY.fullmatch(re.sub(r"\A\$(.+)(?<!\\)\$\Z", r"\1", span.strip()))
    if money and (amount := _formula(clean(re.sub(r"[A-Za-z]+\.?", "", span)), question)):
        return replace(amount, unit=_CURRENCIES[next(filter(None, money.groups()))])
    span = _ROWS.sub(_matrix_of, span)
    if _ENVIRONMENT.search(span):
        return _matrix(span)
    text = _LABEL.sub("", clean(_exact(span)))
    symbol, text = concluded(text)
    if _DATE.fullmatch(text):
        return MathValue("", word=re.sub(r"\b0", "", text))
    text = _SET.sub(r"\1", text)
    value = _ratio(text) or _list(text, question) or _formula(text, question)
    if value is not None and symbol and not value.unit and re.search("[A-Za-z]{3}\\Z", text):
        return None  # "n = 8 fails"
    if value is not None:
        pair = re.sub(r"[\s$]|\\!|\{(?=,)|(?<=,)\}", "", span)
        return replace(value, symbol=symbol, pair=pair if _COMMA_PAIR.fullmatch(pair) else "")
    if symbol:
        return None
    return MathValue(f"${span}$") if is_formula(span) and re.search(r"\\[A-Za-z]{2}", span) else _word(span)


def _word(span: str) -> MathValue | None:
    """Return a phrase of letters, such as "odd" or "Monday", that is not a product of variables."""
    text = _ARTICLE.sub("", clean(span).strip("{} "))
    if not _PHRASE.fullmatch(text) or not _WORD.search(text):
        return None
    return MathValue("", word=" ".join(text.split()).casefold())


def _exact(span: str) -> str:
    r"""Remove the rounding after an exact value: \frac{1}{3} \approx 0.33 becomes \frac{1}{3}."""
    exact, _, rounded = re.split(r"(≈|\\approx(?![A-Za-z])|\Z)", span, maxsplit=1)
    side = exact.rpartition("=")[2]
    whole = re.fullmatch(r"[\s$]*-?[\d.,]+[\s$]*", rounded) and re.search(r"\d|\\pi|\\sqrt", side)
    return exact if whole and not re.search(r"\.\d", side) else span


def _matrix(span: str) -> MathValue | None:
    """Return a matrix, or a formula of matrices, after at most its name; None if it contains words."""
    named = _NAMED.match(text := _SPACES.sub(" ", span.replace("$", " ")).strip().rstrip(".").strip())
    formula = text[named.end() :] if named else text
    prose = _WORD.search(_ENVIRONMENT.sub(" ", formula))
    if len(formula) > MAX_MATRIX or _is_deep(formula) or prose or _UNFIT.search(formula):
        return None
    return MathValue(f"${formula}$", symbol=named[1] if named else "")


def _matrix_of(match: re.Match[str]) -> str:
    rows = re.findall(r"\[([^\[\]]+)\]", match[0])
    return r"\begin{pmatrix}" + r"\\".join(row.replace(",", "&") for row in rows) + r"\end{pmatrix}"


def _ratio(text: str) -> MathValue | None:
    return MathValue(re.sub(r"\s", "", text)) if RATIO.fullmatch(text) else None


def _list(text: str, question: str) -> MathValue | None:
    """Return a list of formulas with "and" or "or" between some of them as one with commas."""
    items = [] if EQUALS.search(text) else items_of(text)
    if not 1 < len(items) <= _MOST_ITEMS or not re.search(r"(?<![A-Za-z])(?:and|or)(?![A-Za-z])", text):
        return None
    values = [None if _WORD.search(item) else _formula(item, question) for item in items]
    if any(value is None or value.percent or value.base for value in values):
        return None
    return MathValue(f"${', '.join(value.formula.strip('$') for value in values if value)}$")


def _formula(text: str, question: str) -> MathValue | None:
    """Return the whole text as one value: a number or formula with its unit, or a formula without words."""
    if based := _BASE.fullmatch(text):
        return MathValue(based[1], base=based[2])
    if _SPACED.fullmatch(text):
        text = text.replace(" ", "").replace(",", ".")
    if match := _VALUE.match(text):
        unit = _unit(match[0], text[match.end() :], question)
        if unit is not None:
            number = match[0].removesuffix(match["percent"] or "").replace("- ", "-").strip()
            return MathValue(_improper(number), bool(match["percent"]), unit=unit)
    unit = None
    if (split := _WITH_UNIT.match(text)) and (unit := _unit("", split[2], question)) is not None:
        text = split[1]
    percent, text = text.endswith("%"), text.removesuffix("%").rstrip()
    if not text or len(text) > MAX_FORMULA or _is_deep(text) or _WORD.search(_LENGTH.sub("x", text)):
        return None
    return None if _UNFIT.search(text) else MathValue(f"${text}$", percent, unit=unit or "")


def _unit(number: str, rest: str, question: str) -> str | None:
    """Return the unit behind a number, "" for a noun or nothing, None for what is more of a formula."""
    if re.match(r"[.,:;!?^_{}\[\]<>=|)&~+*-]|\\(?!mu|Omega|frac)", rest.strip()):
        return None
    if number.strip("+") in ("1", "1.0") and re.fullmatch(r"\s*[a-z]{3,}", rest) and not spelled(rest):
        return unit_of(rest, question) or ""
    return unit_of(rest, question)


def _improper(number: str) -> str:
    """Return a mixed number as a fraction: 3/2 for 1 1/2."""
    mixed = re.fullmatch(r"([-+]?)(\d+)\s+(\d+)/(\d+)", number)
    return f"{mixed[1]}{int(mixed[2]) * int(mixed[4]) + int(mixed[3])}/{mixed[4]}" if mixed else number


def _is_deep(formula: str) -> bool:
    """Return whether brackets are nested so deeply that the parser would not finish."""
    depth = deepest = 0
    for bracket in _BRACKET.findall(formula):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    return deepest > _DEEPEST
