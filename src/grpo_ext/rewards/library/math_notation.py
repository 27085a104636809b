"""Normalise what models write in many ways: scripts, minus signs, percent, fractions, thousands, arrows, emphasis."""

# ruff: noqa: RUF001  signs of other scripts

import re
import unicodedata
from typing import Any

PERCENT = r"\\?%|\bper ?cent\b|\bpct\b"
_TIE = r"(?<=[\w)}])~(?=\s*[\\A-Za-z])"  # a space of LaTeX, not the sign of "about 5"
IMPLIES = "⇒"  # between a step and its result
# Adjacent letters that are a product, not a word or a unit.
PRODUCT = r"(?:(?!by|up|us|at|as|yr|qt|pt|pc|cc|ct|sq|tv)[abcpqrstuvwxyz]{2}|mn|abc|xyz)(?![A-Za-z])"
_POWERS = {2: "hundred", 3: "thousand k тыс", 4: "万 萬 만", 5: "lakh", 6: "million mio mln млн", 7: "crore"}
_POWERS |= {8: "亿 億 억", 9: "billion bn mrd млрд", 12: "trillion"}
_SCALES = {name: 10**power for power, names in _POWERS.items() for name in names.split()}
_SCALES |= dict.fromkeys(("dozen", "dutzend", "docena", "douzaine", "dúzia"), 12)
_NAMED_SIGNS = {r"\langle": "(", r"\rangle": ")", r"\lbrace": r"\{", r"\rbrace": r"\}", r"\colon": ":"}
_FUNCTIONS = "sqrt|log|ln|exp|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|sinh|cosh|tanh"
GREEK = "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|psi|omega"
_SIGNS = {0xFF01 + i: chr(0x21 + i) for i in range(94)} | str.maketrans(
    "\u3002\uff61\u0964\u3001\u060c\u066b\u066c\u3000\u2795\ufe62\u2716\u2217\u22c5\u00b7\u2797\u2796\u066a\u2044",
    "...,,., ++****/-%/",
)
_SIGNS |= dict.fromkeys(map(ord, "「」『』《》【】"), '"') | dict.fromkeys(map(ord, "₹₩₽₺₫₴₦฿"), " ")
_SIGNS |= {ord("ℝ"): r"\mathbb{R}", ord("ℤ"): r"\mathbb{Z}", ord("ℕ"): r"\mathbb{N}", ord("∅"): r"\emptyset"}
_EMOJI = "[\u2600-\u274b\u274d-\u27bf\U0001f000-\U0001faff\ufe0e\ufe0f\u200b-\u200f\u20e3]"
_SHAPED = re.compile("[\u2100-\u214f\u2469-\u24ff\u3300-\u33ff\ufb00-\ufb06\U0001d400-\U0001d7ff\u00b5]")


def _nfkc(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _without_commas(match: re.Match[str]) -> str:
    """Return a number without thousands separators; (12,102) is a pair."""
    number = match[0]
    return number if number[0] in "([" and number[-1] in ")]" and number.count(",") == 1 else number.replace(",", "")


def _compiled(*rules: tuple[str, Any]) -> list[tuple[re.Pattern[str], Any]]:
    return [(re.compile(pattern), replacement) for pattern, replacement in rules]


_EMPHASIS = _compiled(
    (r"\\(?:(?:text)?color\s*\{[^{}]*\}|(?:bf|it|rm|[lL]arge|huge|displaystyle)(?![A-Za-z]))", ""),
    (
        r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf)|boldsymbol|bm|operatorname|mbox|underline)\s*\{([^{}]*)\}",
        r" \1 ",
    ),
    (r"(?<![\d)}])(\*\*|__|`)(?=\S)(.+?)(?<=\S)\1", r"\2"),
    (r"(?<![\w)}])([*_])(?=\S)([^*_\n]+)(?<=\S)\1(?![\w({])", r"\2"),
)
_TIDY = _EMPHASIS + _compiled(
    (rf"\\(?:left|right)(?![A-Za-z])|\\[,!;: ]|\u00a0|{_TIE}|</?(?:b|u|i|em|strong)>", " "),
    (r"(?<!\\)\$|\\[()\[\]]", " "),
    (r"(?<=[A-Za-z])\s*\{(\w)\}", r" \1"),
    (r"\{(\w)\}", r"\1"),
    (r"(\\[A-Za-z]+)\s+(?![A-Za-z])", r"\1"),
    (r"\s+", " "),
    (r"(?<!\w)(?<!\d,) | (?!\w)", ""),
)
_CLEAN = [
    *_compiled(
        (r"((?:\\frac|\\sqrt|\\pi|\d/).*?)(?:≈|\\approx(?![A-Za-z]))[\s$]*-?[\d.,]+[\s$]*\Z", r"\1"),  # rounded
        (r"<<[^<>]*>>|</?(?:b|u|em|strong)>", ""),  # GSM8K's calculator annotations, HTML
        (r"(?<!\\)\\\\(?=(?:left|right|[dt]?frac|sqrt|text|begin|end|pi|cdot|times|infty)(?![a-z]))", r"\\"),
        (r"(?<=[\w)}|])(?<![²³¹⁰-⁹])[⁺⁻]?[²³¹⁰-⁹]+", lambda m: f"^{{{_nfkc(m[0])}}}".replace("\u2212", "-")),
        (r"!=|≠", r"\\ne "),
        (r"(?<=[\w)])(?<![A-Za-z]{2})\*\*(?=[\w(-])", "^"),  # Python's power
        (r"\\(?:[lr]angle|[lr]brace|colon)(?![A-Za-z])", lambda m: _NAMED_SIGNS[m[0]]),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"(\\(?:mathbb|mathcal|vec)) ([A-Za-z])(?![A-Za-z])", r"\1{\2}"),
        (r"(?:[\u2212\ufe63]|(?<!\d)(?<!\d )\u2013)(?=\s*[\d.$\\(])", "-"),  # minus signs; 5\u20138 is a range
        (r"\b(?:[Mm]inus|[Nn]egative)\s+(?=[\d.$\\(])", "-"),
        (r"(?<=\d)(?:,?\\!\s?|\\,|['_\u2009\u2019\u202f])(?=\d{3}(?!\d))", ","),
        (r"\\begin\{cases\}([^&]{0,200}?)\\end\{cases\}", r"\1"),  # a system; a function of cases has signs &
        (r"\\\\(?=\s*[A-Za-z]\w*\s*=)|\\q?quad", "\n"),
        (rf"[\u00a0\u2009\u202f]|(?<!\\)\\[,!;: ]|{_TIE}", " "),
        (r"\\(?:implies|therefore|(?:[Ll]ong)?[Rr]ightarrow)(?![A-Za-z])|<?[-=]>|[→⇒⟹∴]", IMPLIES),
        (r"(?:,|(?<=\d))\s*(?:and )?(?:so|thus|hence|therefore)\b", IMPLIES),
        (r"(?<=[^\s$])( ?)(?:≈|\\approx(?![A-Za-z]))|∈|\\in(?![A-Za-z])", r"\1="),
        (r"\u00d7|\\(?:times|cdot)(?![A-Za-z])|(?<=[\w)%]) x (?=\\?[$\d.])|(?<=\d)x(?=\d)", "*"),
        (r"(?<=\d)\\?[$€£¥](?=[\d,])", " "),  # two amounts, not one number
        (r"\\[$]|[$€£¥]|\\[()\[\]]", ""),
        (r"\s+", lambda m: "\n" if "\n" in m[0] else " "),  # on runs of it later patterns would take cubic time
        (PERCENT, "%"),
        (r"\^\s*(-\d+)(?![\d{]|\.\d)", r"^{\1}"),
        (r"\\[cdt]?frac(?![A-Za-z])", r"\\frac"),
        (r"(?<=\\frac)\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))", r"{\1\2}{\3\4}"),
    ),
    *_EMPHASIS,
    *_compiled(
        (r"(?:\^? ?\{? ?(?:\\circ|\\degree|°) ?\}?|(?<=\d )degrees )\s*([CF])(?![A-Za-z])", r" deg\1"),
        (r"\^? ?\{? ?(?:\\circ|\\degree|°) ?\}?|\bdegrees?\b", " "),
        (r"^\s*[*\u2022]\s+", ""),  # the bullet of a list
        (rf"(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])", r"\\\1"),
        (r"√ ?(\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z]))", r"\\sqrt{\1}"),
        (r"(?:√|\\sqrt) ?\(((?:[^()]|\([^()]*\))*)\)", r"\\sqrt{\1}"),
        (rf"(?<![A-Za-z\\])(pi|{GREEK})(?![A-Za-z])", r"\\\1 "),
        (
            r"(?<![\d.,])\d{1,3}(?:(?:\.\d{3}(?!\d))+,\d+(?![\d,.])|(?:\.\d{3}(?!\d)){2,}(?![.,]\d))",
            lambda m: m[0].replace(".", "").replace(",", "."),
        ),
        (r"[(\[]?(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)[)\]]?", _without_commas),
        (r"∞|(?<![A-Za-z\\])inf(?:inity)?(?![A-Za-z])", r"\\infty "),
        (r"π", r"\\pi "),
        (r"(?<![\w}^/])(\d+)\s*\\frac\s*\{(\d+)\}\s*\{(\d+)\}", r"\1 \2/\3"),
        (
            r"^([-+]?[1-9]\d{0,2}(?: \d{3})+)(?:[.,](\d+))?$",
            lambda m: m[1].replace(" ", "") + "." * bool(m[2]) + (m[2] or ""),
        ),
        (r"^\\?\{ ?[a-z] ?(?:\\mid(?![A-Za-z])|\||:)([^{}]*?)\\?\}$", r"\1"),  # the condition of a set
        (r",\s*[a-z] ?= ?\\mathbb ?\{?[ZNQR]\}?$", ""),  # the domain of a variable
        (r"^\s*\](?=[^\[\]]*[,;])|(?<=[,;])([^\[\](),;]*)\[\s*$", lambda m: "(" if m[1] is None else f"{m[1]})"),
        (
            rf"(?i)(?<=\d)\s*({'|'.join(sorted(_SCALES, key=len, reverse=True))})s?(?![a-zа-я])\.?",
            lambda m: f"*{_SCALES[m[1].lower()]}",
        ),
    ),
]
_QUOTED = re.compile(r"\A[\"'“„«‘](.*)[\"'”“»’‘]\Z", re.DOTALL)
_CLOSED = re.compile(r"(?<![\s,;:*])[\s,;:*]*(?<!\.)\.?(?<!\.\.)[\s*]*\Z")
_DECIMAL_COMMA = re.compile(r"(?<![\d.,/])(?![1-9]\d{0,2},\d{3}(?!\d))(\d+),(\d+)(?![\d/]|[.,]\d)")


def ascii_signs(text: str) -> str:
    """Return the text with ASCII digits, signs and letters for full-width and mathematical ones, without emoji."""
    if text.isascii():
        return text
    text = re.sub(_EMOJI, " ", re.sub(rf" ?{_EMOJI}+(?!\w)", "", text.translate(_SIGNS)))
    text = _SHAPED.sub(lambda m: _nfkc(m[0]), text)
    text = re.sub("[¼-¾⅐-⅞]", lambda m: r" \frac{{{}}}{{{}}}".format(*_nfkc(m[0]).split("\u2044")), text)
    return re.sub(r"(?![0-9])\d", lambda m: str(int(m[0])), text)


def tidy(text: str) -> str:
    """Return a text without what does not change its meaning: spaces, LaTeX's dress, emphasis, closing punctuation."""
    for pattern, replacement in _TIDY:
        text = pattern.sub(replacement, text)
    return _QUOTED.sub(r"\1", _CLOSED.sub("", text.strip()).strip("` "))


def clean(text: str) -> str:
    """Return normalised text without currency signs, thousands separators and closing punctuation.

    A comma between digits that separates no thousands is a decimal comma, where it is the only one outside brackets,
    or semicolons separate.
    """
    text = text.replace("{,}", ",")
    if ";" in text or (
        text.count(",") == 1 and not re.search(r"[()\[\]]|\\(?:\{|langle|lbrace|begin)|\A\$?\{|\b(?:and|or)\b", text)
    ):
        text = _DECIMAL_COMMA.sub(r"\1.\2", text)
    for pattern, replacement in _CLEAN:
        text = pattern.sub(replacement, text)
    text = _CLOSED.sub("", _QUOTED.sub(r"\1", _CLOSED.sub("", text.strip())))
    return re.sub(r"([\[(][^\[\](),;]*);([^\[\](),;]*[\])])", r"\1,\2", text)


def in_point_notation(text: str) -> str:
    """Return a text in which a point separates thousands and a comma decimals with commas and points."""
    text = re.sub(r"(?<![\d.,])\d{1,3}(?:\.\d{3})+(?![\d.])", lambda m: m[0].replace(".", ""), text)
    return re.sub(r"(?<![\d.,])(\d+),(\d+)(?![\d.,])", r"\1.\2", text)


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
