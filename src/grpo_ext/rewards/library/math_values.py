r"""Read a marked answer as a whole: a number with a unit or noun, a list, an equation, a formula, a word."""

import re
from dataclasses import replace
from fractions import Fraction

from grpo_ext.rewards.library.math_equality import EQUALS, MAX_FORMULA, MAX_MATRIX, MathValue
from grpo_ext.rewards.library.math_marks import CONNECTIVES, DENIAL
from grpo_ext.rewards.library.math_notation import GREEK, IMPLIES, PRODUCT, clean, items_of
from grpo_ext.rewards.library.math_units import in_digits, unit_of

LONGEST = 600
"""Characters of a marked answer; a longer one is prose."""
_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?")  # the common case, which needs no cleaning
_MONEY = re.compile(r"-?\s*\\?([$€£])\s*-?[\d.,]+|-?[\d.,]+\s*\\?([$€£])|(USD|EUR|GBP|Rs)\.?\s*-?[\d.,]+")
# The label of an option before its value: \textbf{(B)}\ 12, "B) 12", "B. 12", "(b) 12", "D: 45".
_OPTION = re.compile(
    r"\A[\s$*]*(?:(?i:option|choice)\s+)?"
    r"(?:(?:\(([A-J])\)|([A-J])[).:])(?:\\[ ,;:~]|\\q?quad|[\s$~:.*])*(?=[-+\d\\.(])|\(([a-j])\)[\s$]+(?=[\d\\]))"
)
_ALONE = re.compile(r"[\s$*]*(?:(?i:option|choice)\s+)?\(?([A-J])[).:]*\s*")
_LABEL = re.compile(r"\A\s*[A-Za-z]{2,30}\s*:\s*(?=\S)")
_IN_TEXT = re.compile(r"\\(?:text(?!color)|math(?!bb|cal))\w*\s*\{([^{}]*)\}")
_RATIO = re.compile(r"\d+(?:\.\d+)?(?: ?: ?\d+(?:\.\d+)?)+")
_LETTERS = rf"(?!{PRODUCT})[A-Za-z]{{2,}}"
_WORD = re.compile(rf"(?<![\\A-Za-z]){_LETTERS}|(?!\\)[^\W\d_a-zA-Z\u0370-\u03ff]")
# A formula in which no letter denotes a number, and what may be its unit.
_WITH_UNIT = re.compile(
    r"((?:[^A-Za-z\\]|\\[A-Za-z]+)*?(?:[\d})]|\\pi))(\s*(?:[^\W\d_]|\(|/(?=\s*[^\W\d_])|\\(?:frac|mu|Omega)).*)",
    re.DOTALL,
)
_PHRASE = re.compile(
    r"(?=[^\W\d_]{2}|[^\x00-\u03ff])[^\W\d_](?:[^\W\d_]|[' -]|[\u0900-\u0903\u093a-\u094f\u0e31-\u0e4e]){0,59}"
)
_SET = re.compile(r"\A\{([^{}]*)\}\Z")
_AND = re.compile(r"(?:(?<=[\s)\]}])|,)\s*(?:and|or)(?![A-Za-z])\s*")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{(?:[pbBvV]?matrix|smallmatrix|array)\}(?:\{[clr| ]+\})?")
_INNER, _DEEPEST = re.compile(r"[(\[{][^()\[\]{}]*[)\]}]"), 12
# Several numbers side by side, percent in the middle, or powers and factorials in which sympy would hang.
_UNFIT = re.compile(
    r"(?<![_\d])\d+\s+\d|\d:\s*\d|\^\s*[{(]?\s*-?\s*\d{4,}|\^[^-+*/=\sA-Za-z]*\^|\*\*|(?<!\d)!|(?<=\d{3})!"
    r"|!!|%(?!\Z)|[?~]|\.\.|\d'"
)
# A date, a time or a number to a base.
_AS_WRITTEN = re.compile(
    r"[12]\d{3}([-/])[01]?\d\1[0-3]?\d|[0-3]?\d([-/.])[0-3]?\d\2[12]\d{3}|\d{1,2}:\d\d(?::\d\d)?|\d+ ?_ ?\{? ?\d+ ?\}?"
)
_SENTENCES = re.compile(r"(?<=[.!?])\s+(?![=<>*/^+-])|\n|\s(?=(?:So|Thus|Hence|Therefore)\b)")
# A closing sentence: one clause whose subject is a noun phrase, a symbol or a calculation; or words and a calculation.
_IS = r"\s(?:is|are|was|were|equals):?\s"
_SUBJECT = r"(?:the|this|that|these|those|it|there|its|his|her|their|our|my|[A-Z][a-z]+['\u2019]s)\b"
_STATED = re.compile(
    rf"{CONNECTIVES}(?:{_SUBJECT}(?:(?!{_IS})[^,;:?!=$]|\$[^$=]*\$)*(?:{_IS}|=)"
    rf"|(?:[A-Za-z]|\d[\d.,\s()]*[-+*/^\u00d7][^A-Za-z=]*){_IS})\s*(?P<value>.+)",
    re.IGNORECASE | re.DOTALL,
)
_WORKED_OUT = re.compile(
    rf"{CONNECTIVES}(?:(?!\b(?:and|or)\b)[\w'\u2019 ])*\s"
    r"(?P<value>[\d$\\(][^=]*(?:[-+*/^\u00d7]|\\(?:times|cdot))[^=]*=.+)",
    re.IGNORECASE | re.DOTALL,
)

_GREEK = rf"\\(?:var)?(?i:{GREEK})(?![A-Za-z])"
_LETTER = rf"(?:[A-Za-z](?![A-Za-z])|{_GREEK})"
_INDEX = r"'*(?:_(?:\w|\{[^{}]*\}))?(?:\^\*|\^\{-1\})?"
_ONE = rf"(?:m?\\(?:angle|overline|bar|hat|vec)\s*)?\{{?{_LETTER}\}}?{_INDEX}"
# One quantity: x, x_1, a : b, the length AB, \angle A, f(x), \gcd(a, b), dy/dx, (x, y), a sum or limit.
_SYMBOL = re.compile(
    rf"{_ONE}(?:\s*:\s*{_ONE})?|[A-Z]{{2}}|\|[A-Z]{{1,2}}\||\\frac\{{[A-Z]{{2}}\}}\{{[A-Z]{{2}}\}}|[f-hpPA-Z]{_INDEX}\s*\([^()=]*\)|\\?(?:gcd|lcm|max|min|det)\s*\([^()=]*\)|\\frac\{{d[^{{}}]*\}}\{{d[^{{}}]*\}}"
    rf"|\(\s*{_ONE}(?:\s*,\s*{_ONE})+\s*\)|m?\s*\\(?:angle|triangle)\s*[A-Z]{{3}}|\\(?:sum|prod|i+nt|lim)(?![A-Za-z]).*",
    re.DOTALL,
)
_NAME = re.compile(r"[A-Za-z][a-z]{2,30}")
_PLAIN = re.compile(r"(-?\d{1,300}(?:\.\d{1,300})?)(?: ?%| ?[A-Za-z]{2,}[A-Za-z /]*| [A-Za-z][A-Za-z /]*)?")
_UNKNOWN = re.compile(rf"(?<![A-Za-z\\])(?:{_LETTER}|[A-Za-z]{{2,}})|{_GREEK}")
_LEAD = re.compile(r"\A(?:[\s:;,!?*_#\"'“”„«»\u2018\u2019—]|(?:so|thus|hence|therefore|then)\b)*", re.IGNORECASE)


def read(span: str, question: str = "") -> MathValue | None:
    """Return the value of a marked answer, None if anything in it is not understood. Words of the question are."""
    if _NUMBER.fullmatch(span):
        return MathValue(span)
    if not span.strip() or len(span) > LONGEST:
        return None
    plain = _IN_TEXT.sub(r" \1 ", span)
    dressed = in_digits(plain if _IN_TEXT.match(span.lstrip(" $")) else span)
    if alone := _ALONE.fullmatch(dressed):
        return MathValue(alone[1])
    if label := _OPTION.match(dressed):
        value = _read(dressed[label.end() :], question)
        return value and replace(value, option=next(filter(None, label.groups())).upper())
    return _read(dressed, question)


def stated(text: str, question: str = "") -> MathValue | None:
    """Return the value of an unmarked text: the whole of it, or of its last sentence.

    There a percent sign is meant where the question speaks of percent; else 18% is 18/100.
    """
    text = text.strip()
    if len(text) <= MAX_FORMULA and "\n" not in text and (value := read(text, question)):
        return value
    value = closing(_SENTENCES.split(text[-LONGEST:])[-1], question)
    if value and value.percent and not re.search("%|percent", question):
        return replace(value, formula=f"{value.formula.strip('$')}/100", percent=False)
    return value


def closing(sentence: str, question: str = "") -> MathValue | None:
    """Return what a sentence of one clause ends with: "So the total is 18.", "Thus x = 18.", "He pays 9 * 2 = 18."."""
    if DENIAL.search(sentence):
        return None
    sentence = sentence.lstrip(" *_#>")
    match = _STATED.fullmatch(sentence) or _WORKED_OUT.fullmatch(sentence)
    equation = re.sub(rf"\A{CONNECTIVES}", "", sentence, flags=re.IGNORECASE)
    value = read(match["value"] if match else equation if "=" in equation else "", question)
    return None if value is None or value.word else value


def _read(span: str, question: str) -> MathValue | None:
    money = _MONEY.fullmatch(re.sub(r"\A\$(.+)(?<!\\)\$\Z", r"\1", span.strip()))
    if money and (amount := _formula(clean(re.sub(r"[A-Za-z]+\.?", "", span)), question)):
        return replace(amount, unit=unit_of(next(filter(None, money.groups()))) or "")
    if _ENVIRONMENT.search(span):
        span = " ".join(span.split())
    text = _LABEL.sub("", clean(span))
    symbol, text = concluded(_SET.sub(r"\1", text))
    if _AS_WRITTEN.fullmatch(text):
        return MathValue("", word=re.sub(r"\b0|[ {}]", "", text))
    value = _ratio(text) if _RATIO.fullmatch(text) else _formula(text, question)
    if value is not None:
        fails = symbol and not value.unit and re.search("[A-Za-z]{3}\\Z", text)  # "n = 8 fails"
        return None if fails else replace(value, symbol=value.symbol or symbol)
    return None if symbol else _word(span)


def _word(span: str) -> MathValue | None:
    """Return a phrase of letters, such as "odd" or "Monday", that is not a product of variables."""
    text = clean(span).strip("{} ")
    if not _PHRASE.fullmatch(text) or not _WORD.search(text):
        return None
    return MathValue("", word=" ".join(text.split()).casefold())


def _ratio(text: str) -> MathValue | None:
    """Return the quotient of a ratio, or what its parts are where the first is 1; no part may be 0."""
    parts = [Fraction(part) for part in text.replace(" ", "").split(":")]
    if not all(parts):
        return None
    if len(parts) == 2:
        return MathValue(text.replace(":", "/"), symbol=":")
    return MathValue("", word=":".join(str(part / parts[0]) for part in parts))


def concluded(text: str) -> tuple[str, str]:
    """Return the symbol and the value of `x = 5`, of `x = 1 or x = 2`, and of `a = 3, b = 5`: (a,b) and (3, 5).

    The symbol is "" after a label or a calculation. ("", text) where an equation or a list of them stays whole.
    """
    before, _, after = text.rpartition(IMPLIES)
    if EQUALS.search(before) or not re.search(r"\d", before):
        text = after
    text = _LEAD.sub("", text)
    items = items_of(text)
    if not any(map(EQUALS.search, items)):
        return "", text
    sides = [solution(EQUALS.split(item)) for item in items]
    if any(side is None for side in sides):
        return "", ", ".join(items)
    pairs = [side for side in sides if side]
    names, values = zip(*pairs, strict=True)
    if len(items) == 1:
        return names[0], values[0]
    if names[0] and all(n == names[0] or (n, v) == ("", i) for (n, v), i in zip(pairs, items, strict=True)):
        return names[0], ", ".join(values)
    width = names.index(names[0], 1) if names[0] in names[1:] else len(names)
    if "" in names or width < 2 or names != names[:width] * (len(names) // width):
        return "", ", ".join(items)
    rows = [f"({', '.join(values[i : i + width])})" for i in range(0, len(values), width)]
    return f"({','.join(names[:width])})", ", ".join(rows)


def solution(parts: list[str]) -> tuple[str, str] | None:
    """Return the symbol and the value of an equation's parts: of x = 5, 2 + 3 = 5, x = 2 + 3 = 5 and Total = 5.

    None where it is not solved for one quantity (2x = 5), and where two of its parts are different numbers.
    """
    parts = [_LEAD.sub("", part).strip() for part in parts]
    if len(parts) == 1:
        return "", parts[0]
    symbol = next((part for part in (parts[0], parts[-1]) if _SYMBOL.fullmatch(part)), "")
    named = symbol == parts[0] or _NAME.fullmatch(parts[0])
    rest = parts[1:] if named else parts[:-1] if symbol else parts
    numbers = {match[1] for part in rest if (match := _PLAIN.fullmatch(part))}
    value = next((part for part in rest if _PLAIN.fullmatch(part)), rest[-1])
    unclear = any(_UNKNOWN.search(part) for part in rest if not _PLAIN.fullmatch(part))
    if len(numbers) > 1 or (not named and (unclear or (symbol and not numbers))):
        return None
    return re.sub(r"[\s{}]", "", symbol), value


def _formula(text: str, question: str) -> MathValue | None:
    """Return the whole text as one value: a number or formula with its unit, or a formula without words."""
    unit = None
    if (split := _WITH_UNIT.fullmatch(text)) and (unit := _unit(split[1], split[2], question)) is not None:
        text = split[1]
    text = re.sub(r"(\d+)\s+(\d+)/(\d+)", lambda m: f"{int(m[1]) * int(m[3]) + int(m[2])}/{m[3]}", text)
    text = _AND.sub(", ", text)
    percent, text = text.endswith("%"), text.removesuffix("%").rstrip()
    fits = text and len(text) <= (MAX_MATRIX if r"\begin" in text else MAX_FORMULA) and not _is_deep(text)
    clear = fits and not _WORD.search(_ENVIRONMENT.sub(" ", text)) and not _UNFIT.search(text)
    return MathValue(f"${text}$", percent, unit=unit or "") if clear else None


def _unit(number: str, rest: str, question: str) -> str | None:
    """Return the unit behind a number, "" for a noun or the number in words, None for what is more of a formula."""
    unit = unit_of(rest, question)
    if unit is None and number.strip("+") in ("1", "1.0") and re.fullmatch(r"\s*[a-z]{3,}", rest):
        return unit_of(f"{rest}s")
    return "" if unit is None and rest.strip().startswith("(") and in_digits(rest.strip(" ()")) == number else unit


def _is_deep(formula: str) -> bool:
    """Return whether brackets are not closed, or nested so deeply that the parser would not finish."""
    for _ in range(_DEEPEST):
        formula = _INNER.sub("", formula)
    return re.search(r"[(\[{]", formula) is not None
