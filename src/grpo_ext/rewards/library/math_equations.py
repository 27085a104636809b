r"""Read equations in answers: `x = 5` and "Total = 5" give 5, `2x + 3y = 5` and `a = 3, b = 5` stay whole.

The right side counts only where the left names one quantity or is plain arithmetic. Elsewhere it could be guessed
without solving anything: the 0 of `x + y - z + 1 = 0`.
"""

import re

from grpo_ext.rewards.library.math_notation import IMPLIES, PRODUCT

EQUALS = re.compile(r"(?<![<>!:])=(?![^{}]*\})")  # not in braces, such as the bounds of a sum
_GREEK = (
    r"\\(?:var)?(?i:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|psi|omega)"
    r"(?![A-Za-z])"
)
_LETTER = rf"(?:[A-Za-z](?![A-Za-z])|{_GREEK})"
_INDEX = r"'*(?:_(?:\w|\{[^{}]*\}))?(?:\^\*|\^\{-1\})?"
_ONE = rf"(?:m?\\(?:angle|overline|bar|hat|vec)\s*)?\{{?{_LETTER}\}}?{_INDEX}"
# One quantity: x, x_1, a : b, the length AB, \angle A, f(x), \gcd(a, b), dy/dx, (x, y), a sum or limit.
_SYMBOL = re.compile(
    rf"{_ONE}(?:\s*:\s*{_ONE})?|[A-Z]{{2}}|\|[A-Z]\||[f-hpPA-Z]{_INDEX}\s*\([^()=]*\)|\\?(?:gcd|lcm|max|min|det)\s*\([^()=]*\)|\\frac\{{d[^{{}}]*\}}\{{d[^{{}}]*\}}"
    rf"|\(\s*{_ONE}(?:\s*,\s*{_ONE})+\s*\)|\\(?:sum|prod|i+nt|lim)(?![A-Za-z]).*",
    re.DOTALL,
)
# A letter that denotes a number, unlike the article in "a day", "a 5" and the end of "today's".
_UNKNOWN = re.compile(rf"(?<![A-Za-z\\'\u2019])(?!a (?:[a-z]{{2}}|\d)|I [a-z]{{2}})(?:{_LETTER}|{PRODUCT})|{_GREEK}")
_UNIT_LETTER = re.compile(r"(?<=\d)\s*[mgshLl](?![A-Za-z])")
_LEAD = re.compile(
    r"\A(?:[\s:;,!?*_#\"'“”„«»\u2018\u2019—]|[A-Za-z]+:|(?:so|thus|hence|therefore)\b)*"
)  # marks and a label, not part of a value
_WORD = rf"(?<![A-Za-z\\])(?!{PRODUCT})[A-Za-z]{{2,}}"
_PROSE = re.compile(
    rf"\A.*{_WORD}(?:['\u2019][a-z]+)?[:,]?\s+(?![-+*/^=)])", re.DOTALL
)  # up to the formula at the end
_CONNECTED = re.compile(
    r"\A(?:.*(?<!\w))?(?:so|then|thus|hence|therefore|and|get|have|gives|that|where|with),?\s+",
    re.DOTALL | re.IGNORECASE,
)  # up to the symbol at the end
_NAME = re.compile(r"[A-Za-z][a-z]{2,30}|m?\s*\\(?:angle|triangle)\s*[A-Z]{3}")
_NUMBER = re.compile(r"-?\d{1,300}(?:\.\d{1,300})?")
_NEXT_EQUATION = re.compile(rf"[\d)}}]\s+{_ONE}\s*\Z")  # the "3 b" of a = 3 b = 5
_PLAIN = re.compile(r"(?:[A-Za-z ]+[:=])?[-+\s\d./]*\d[\s\d./]*[A-Za-z ]*")  # "3", "Tom: 3", "x = 5 cm"

Sides = tuple[str, str]


def concluded(text: str, *, prose: bool = False) -> Sides:
    """Return the symbol and the value of `x = 5` or `x = 1 or x = 2`; ("", right side) after a label or a calculation.

    ("", text) where an equation or a list of them stays whole: `EQUALS` still finds its sign. The last
    step of a calculation, or of a solution for one symbol, counts. With `prose` a sentence may stand before it.
    """
    before, _, after = text.rpartition(IMPLIES)
    if not prose and re.search(r"\d", before) and not EQUALS.search(before):
        return "", text  # "65, so x = 64"
    text = _LEAD.sub("", after).strip()
    items = items_of(text)
    equations = [item for item in items if EQUALS.search(item)]
    if not equations:
        return "", text
    if not prose and any(re.search(_WORD, item) for item in items if item not in equations):
        return "", text  # "none, or x = 5"
    if any(_SYMBOL.fullmatch(item) for item in items if item not in equations):
        return "", text  # "x, y = 5"
    sides = [_sides(equation, prose) for equation in equations]
    last = sides[-1]
    if last is None or _is_list(items, equations, sides, last[0]):
        return "", ", ".join(items)
    if last[0] and len(items) > 1 and _are_solutions(items, sides):
        return last[0], ", ".join(side[1] for side in sides if side)
    return last[0], last[1] + text[text.rindex(equations[-1]) + len(equations[-1]) :]


def _is_list(items: list[str], equations: list[str], sides: list[Sides | None], symbol: str) -> bool:
    """Return whether the last equation is one of several, not the last step: a = 3, b = 5; x + y = 7, x = 2."""
    unsolved = [equation for equation, side in zip(equations, sides, strict=True) if side is None]
    unknowns = {letter for equation in unsolved for letter in _UNKNOWN.findall(equation)}
    before = items[: len(items) - 1 - items[::-1].index(equations[-1])]
    return (
        len({side[0] for side in sides if side} - {""}) > 1
        or bool(symbol and unknowns - {symbol})
        or bool(
            _PLAIN.fullmatch(equations[-1]) and any(map(_PLAIN.fullmatch, before)) and not _are_solutions(items, sides)
        )
    )


def _are_solutions(items: list[str], sides: list[Sides | None]) -> bool:
    """Return whether each item is a solution for the symbol, without words of a derivation: x = 1 or x = 2."""
    words = any(re.search("[A-Za-z]{3}", EQUALS.split(item)[0]) for item in items[1:])
    return not words and len(sides) == len(items) and all(side and side[0] for side in sides)


def _sides(equation: str, prose: bool = False) -> Sides | None:
    """Return the symbol and the right side of an equation that is solved for one quantity, None for any other."""
    left, *between, right = EQUALS.split(equation)
    left = _LEAD.sub("", left).strip()
    if prose:
        left = _LEAD.sub("", (_PROSE if re.search(r"\d", left) else _CONNECTED).sub("", left)).strip()
    right = _LEAD.sub("", right).strip()
    if _NAME.fullmatch(left):
        return "", right  # Total = 5
    if any(word != word.upper() for word in re.findall(_WORD, left)) and not _SYMBOL.fullmatch(left):
        return None  # prose
    if _NUMBER.fullmatch(left) and _NUMBER.fullmatch(right) and float(left) != float(right):
        return None  # 41 = 40
    if any(_NEXT_EQUATION.search(side) for side in between):
        return None
    if _SYMBOL.fullmatch(left):
        return _name(left), right
    if re.fullmatch(r"-?[\d.]+", left) and re.search(r"\d\s*[-+*/]", right) and not re.search(r"[^\W\d_]", right):
        return "", left  # 15 = 9 + 6
    if re.search(r"\d", left) and not re.search(_WORD, left + right):
        if _SYMBOL.fullmatch(right):  # 5 = x
            return _name(right), left
        if _UNKNOWN.search(_UNIT_LETTER.sub("", right)):  # 5 = 2x + 3y
            return None
    if re.search(r"\d\s*[A-Za-z]", right):  # 6 m * 3 m = 18 m^2
        left = _UNIT_LETTER.sub("", left)
    return None if _UNKNOWN.search(left) else ("", right)


def _name(symbol: str) -> str:
    return re.sub(r"[\s{}]", "", symbol)


def solutions(system: str) -> tuple[str, list[list[str]]]:
    """Return the symbols of a solved system and a row of values per solution: (a,b) and 4, 5 for `a = 4, b = 5`.

    No rows if an equation is not solved, if there is only one symbol, or if the rows differ in their symbols.
    """
    items = items_of(system)
    sides = [_sides(item) if EQUALS.search(item) else None for item in items]
    names = [side[0] if side else "" for side in sides]
    width = names.index(names[0], 1) if names[0] in names[1:] else len(names)
    if "" in names or width < 2 or names != names[:width] * (len(names) // width):
        return "", []
    values = [side[1] for side in sides if side]
    return f"({','.join(names[:width])})", [values[i : i + width] for i in range(0, len(values), width)]


def items_of(text: str) -> list[str]:
    """Split at commas, semicolons, ends of lines and sentences, "and" and "or", outside brackets."""
    items, depth = [""], 0
    for token in re.findall(r"[^\W\d_]+|\.\s|.", text, re.DOTALL):
        depth = max(0, depth + (token in "([{") - (token in ")]}"))
        if depth == 0 and re.fullmatch(r"[,;\n]|\.\s|and|or", token):
            items.append("")
        else:
            items[-1] += token
    return [item.strip() for item in items if item.strip()]
