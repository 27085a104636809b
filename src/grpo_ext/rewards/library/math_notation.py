"""Normalise what models write in many ways: minus signs, percent, fractions, thousands, arrows, emphasis."""

import re
import unicodedata
from typing import Any

IMPLIES = "⇒"  # between a step and its result
# Adjacent letters that are a product, not a word or a unit.
PRODUCT = r"(?:(?!by|up|us|at|as|yr|qt|pt|pc|cc|ct|sq|tv)[abcpqrstuvwxyz]{2}|mn|abc|xyz)(?![A-Za-z])"
# A factor after a number: not a unit, and not the article of "5 a day".
FACTOR = rf"(?:(?![ai]\s+[A-Za-z]{{2}})[a-fi-kn-rt-z](?![A-Za-z'])|{PRODUCT})"
_SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "tenthousand": 10**4, "lakh": 10**5, "million": 10**6}
_SCALES |= {"crore": 10**7, "hundredmillion": 10**8, "billion": 10**9, "trillion": 10**12}
_COMMANDS = r"(?:(?:left|right)(?![a-z])|(?:[dt]?frac|sqrt|boxed|text|begin|end|pi|cdot|times|leq?|geq?|infty|cup)\b)"
_NAMED_SIGNS = {r"\langle": "(", r"\rangle": ")", r"\lbrace": r"\{", r"\rbrace": r"\}", r"\colon": ":"}
_FUNCTIONS = "sqrt|log|ln|exp|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|sinh|cosh|tanh"


def _raised(match: re.Match[str]) -> str:
    digits = unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-")
    return f"^{digits}" if len(digits) == 1 else f"^{{{digits}}}"


def _without_commas(number: str) -> str:
    """Return a number without thousands separators; (12,102) is a pair."""
    return number if number[0] in "([" and number[-1] in ")]" and number.count(",") == 1 else number.replace(",", "")


_REWRITES: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"<<[^<>]*>>|</?(?:b|u|em|strong)>", ""),  # GSM8K's calculator annotations, HTML
        (rf"(?<!\\)\\\\(?={_COMMANDS})", r"\\"),  # escaped once more, as in JSON
        (r"(?<=[\w)}|])(?<![²³¹⁰-⁹])[⁺⁻]?[²³¹⁰-⁹]+", _raised),
        (r"!=|≠", r"\\ne "),
        (r"≤|<=(?!>)", r"\\le "),
        (r"≥|>=", r"\\ge "),
        (r"(?<=[\w)])(?<![A-Za-z]{2})\*\*(?=[\w(-])", "^"),  # Python's power
        (r"\^\s*(?:\(([^()^]*)\)|([-+]?(?:\d{2,}|\d*\.\d+)))", r"^{\1\2}"),
        (r"\\(?:[lr]angle|[lr]brace|colon)(?![A-Za-z])", lambda m: _NAMED_SIGNS[m[0]]),
        (r"(?:[\u2212\ufe63]|(?<!\d)(?<!\d )\u2013)(?=\s*[\d.$\\(])", "-"),  # minus signs; 5\u20138 is a range
        (r"\b(?:[Mm]inus|[Nn]egative)\s+(?=[\d.$\\(])", "-"),
        (r"(?<=\d)(?:,?\\!\s?|\\,|['_\u2009\u2019\u202f])(?=\d{3}(?!\d))", ","),
        (r"\\begin\{cases\}([^&]{0,200}?)\\end\{cases\}", r"\1"),  # a system; a function of cases has signs &
        (r"\\\\(?=\s*[A-Za-z]\w*\s*=)|\\q?quad", "\n"),
        (r"[\u00a0\u2009\u202f]|\\[,!;: ]|~|\\(?:displaystyle|boxed)(?![A-Za-z])", " "),
        (r"\\(?:implies|therefore|(?:[Ll]ong)?[Rr]ightarrow)(?![A-Za-z])|<?[-=]>|[→⇒⟹∴]", IMPLIES),
        (r"(?:,|(?<=\d))\s*(?:and )?(?:so|thus|hence|therefore)\b", IMPLIES),
        (r"[≈∈]|\\(?:approx|in)(?![A-Za-z])", "="),
        (r"\u00d7|\\(?:times|cdot)(?![A-Za-z])|(?<=[\w)%]) x (?=\\?[$\d.])|(?<=\d)x(?=\d)", "*"),
        (r"\u00f7|\\div(?![A-Za-z])", "/"),
        (r"\{,\}", ","),
        (r"(?<=\d)\\?[$€£¥](?=[\d,])", " "),  # two amounts, not one number
        (r"\\[$]|[$€£¥]|\\[()\[\]]", ""),
        (r"\s+", lambda m: "\n" if "\n" in m[0] else " "),  # on runs of it later patterns would take cubic time
        (r"\\%|\bper ?cent\b|\bpct\b", "%"),
        (r"(?:(?<![\d\s])|^) ?% ?(\d+(?:[.,]\d+)?)(?![\d.,]|\s*%)", r" \1%"),
        (r"\^\s*([-\u2212]\d+)(?![\d.{])", lambda m: f"^{{{m[1]}}}".replace("\u2212", "-")),
        (
            r"((?:sin|cos|tan|cot|sec|csc) ?)[({]?(\d+(?:\.\d+)?)\^? ?\{? ?(?:\\circ(?![A-Za-z])|°) ?\}?[)}]?",
            r"\1(\2*\\pi/180)",
        ),
        (r"\^? ?\{? ?(?:\\circ|°) ?\}?|\bdegrees?\b", " "),
        (r"\\[cdt]?frac(?![A-Za-z])", r"\\frac"),
        (r"(?<=\\frac)\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))", r"{\1\2}{\3\4}"),
        (r"\\(?:(?:text)?color\s*\{[^{}]*\}|(?:bf|it|rm|[lL]arge|huge)(?![A-Za-z]))", ""),
        (r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf)|operatorname|mbox|underline)\s*\{([^{}]*)\}", r" \1 "),
        (r"\{?([^{}]*)\\over(?![A-Za-z])([^{}]*)\}?", r"\\frac{\1}{\2}"),
        (r"^\s*[*\u2022]\s+", ""),  # the bullet of a list
        (r"(?<![\d)}])(\*\*|__|`)(?=\S)(.+?)(?<=\S)\1", r"\2"),
        (r"(?<![\w)}])([*_])(?=\S)([^*_\n]+)(?<=\S)\1(?![\w({])", r"\2"),
        (rf"(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])", r"\\\1"),
        (r"√ ?(?=\()", r"\\sqrt"),
        (r"√ ?(\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z]))", r"\\sqrt{\1}"),
        (r"\\sqrt ?\(((?:[^()]|\([^()]*\))*)\)", r"\\sqrt{\1}"),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (
            r"(?<![\d.,])\d{1,3}(?:(?:\.\d{3}(?!\d))+,\d+(?![\d,.])|(?:\.\d{3}(?!\d)){2,}(?![.,]\d))",
            lambda m: m[0].replace(".", "").replace(",", "."),
        ),
        (r"[(\[]?(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)[)\]]?", lambda m: _without_commas(m[0])),
        (r"∞|(?<![A-Za-z\\])inf(?:inity)?(?![A-Za-z])", r"\\infty "),
        (r"π", r"\\pi "),
        (r"(?<=\d) ?\*? ?i(?= *(?:[-+)]|\Z))", "i"),
        (r"(?<![\w}^/])(\d+)\s*\\frac\s*\{(\d+)\}\s*\{(\d+)\}", r"\1 \2/\3"),
        (rf"(?<![\w}}^])\\frac\s*\{{\s*(\d+)\s*\}}\s*\{{\s*(\d+)\s*\}}(?!\w|\s*(?:[(\\^{{]|{FACTOR}))", r"\1/\2"),
        (r"^\\?\{ ?[a-z] ?(?:\\mid(?![A-Za-z])|\||:)([^{}]*?)\\?\}$", r"\1"),  # the condition of a set
        (r"^\s*\](?=[^\[\]]*[,;])|(?<=[,;])([^\[\](),;]*)\[\s*$", lambda m: "(" if m[1] is None else f"{m[1]})"),
        (r"([\[(][^\[\](),;]*);([^\[\](),;]*[\])])", r"\1,\2"),
        (
            rf"(?:(?<![\d.,])(\d{{1,9}}),(\d{{1,2}})|(?<=\d))\s+({'|'.join(_SCALES)})s?\b",
            lambda m: f"{m[1]}.{m[2]}*{_SCALES[m[3]]}" if m[1] else f"*{_SCALES[m[3]]}",
        ),
    )
]


def clean(text: str) -> str:
    """Return normalised text without currency signs, thousands separators and closing punctuation."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text.strip().rstrip('.…,;:?*"”»').strip()
