"""Units of measure, read as a whole: one spelling for each, so that 5 m differs from 5 cm; and counted nouns."""

import re

from grpo_ext.rewards.library.math_numerals import NUMERALS, PARTS

_SPELLINGS = {
    "cm": "centimeter",
    "mm": "millimeter",
    "km": "kilometer",
    "m": "meter",
    "inch": "inche in",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram gm",
    "kg": "kilogram kilo",
    "lb": "pound",
    "oz": "ounce",
    "ml": "milliliter",
    "l": "liter",
    "s": "second sec",
    "min": "minute",
    "h": "hour hr",
    "day": "",
    "week": "",
    "month": "",
    "year": "yr",
    "dollar": "usd",
    "euro": "eur",
    "sterling": "gbp",
    "rupee": "rs inr",
    "yuan": "rmb cny 元 块",
    "cent": "",
    "radian": "rad",
    "degc": "celsius",
    "degf": "fahrenheit",
    "unit": "",
    "gallon": "gal",
    "ton": "tonne",
    "acre": "",
    "ohm": "Ω",
    "watt": "w",
    "volt": "v",
    "joule": "j",
    "newton": "n",
    "pascal": "",
    "point": "",
    "cup": "",
}
_CANONICAL = {spelling: unit for unit, others in _SPELLINGS.items() for spelling in (unit, *others.split())}
# A prefix of the metric system and a unit of it, with capitals as they are.
_METRIC = re.compile(
    "[kMGTcdnpμµumh](?:m|g|s|L|l|W|Wh|Hz|J|V|A|Pa|N|Ω|ohm|eV|B|mol|cal|rad|bar|F)|Hz|Wh|Pa|eV|mol|cal|dB|lm|ha|atm|bar"
)
_PART = re.compile(
    r"\s*(?:(square|cubic|sq)\.?\s+)?([^\W\d_]+)\.?(?:(?:\s*\^\s*\{?\s*)?(?<!\s)(-?[123])(?!\d)\s*\}?)?(?:\s*[*·]\s*|\s+)?"
)
_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_RATE = re.compile(r"\s*(?:/|(?<![A-Za-z])(?:per|an?|each|every)(?![A-Za-z]))\s*")
_POWER = {"square": "2", "sq": "2", "cubic": "3"}
_COUNTERS = frozenset(
    ["个", "個", "개", "つ", "人", "명", "名", "people", "children", "men", "women", "fish", "sheep"]
)
_PLURAL = re.compile(r"[A-Za-z]{3,}(?:(?<![suiSUI])s)")
_SINGULAR = re.compile(r"[a-z]{3,}")
_FRACTIONS = frozenset((*NUMERALS, *PARTS, "hundredth", "thousandth", "millionth", "plu", "minu"))


def unit_of(text: str, question: str = "") -> str | None:
    """Return the unit that a text behind a number is, "" for a counted noun, None for anything else.

    Known are units of measure and their products, powers and rates, one English noun in the plural, and words that the
    question has, all of them.
    """
    text = re.sub(r"\A\s*\((.*)\)\s*\Z", r"\1", text).strip(" .")
    if not text:
        return ""
    text = _FRACTION.sub(r"\1/\2", text).replace("\\Omega", "Ω").replace("\\mu ", "μ").replace("\\mu", "μ")
    text = re.sub(r"\A([mk])ph\Z", lambda m: {"m": "mi/h", "k": "km/h"}[m[1]], text)
    amount, *rate = _RATE.split(text, maxsplit=1)
    unit = _product(amount) if amount else ""
    if unit is None and (_is_noun(amount) or _is_asked(amount, question)):
        unit = ""
    if unit is None or not rate:
        return unit
    per = _product(rate[0])
    each = not rate[0] and re.search(r"\beach\Z", text)
    if per or each or (amount and _SINGULAR.fullmatch(rate[0])) or _is_asked(rate[0], question):
        return f"{unit}/{per}" if per and unit else ""
    return "" if _is_asked(text, question) else None


def _product(text: str) -> str | None:
    """Return a product of units in one spelling, cm^2 for square centimeters, or None."""
    parts, end = [], 0
    while end < len(text):
        part = _PART.match(text, end)
        unit = part and _unit(part[2])
        if not part or not unit:
            return None
        power = part[3] or _POWER.get(part[1] or "", "")
        parts.append(f"{unit}^{power}" if power and power != "1" else unit)
        end = part.end()
    return "*".join(parts) or None


def _unit(word: str) -> str:
    if _METRIC.fullmatch(word) and word.lower() not in _CANONICAL:
        return word.replace("µ", "u").replace("μ", "u")
    lower = word.lower().replace("metre", "meter").replace("litre", "liter")
    if len(word) == 1 and word not in "mgshlLNJWVΩ元块":
        return ""
    return _CANONICAL.get(word) or _CANONICAL.get(lower) or _CANONICAL.get(lower.removesuffix("s"), "")


def _is_noun(text: str) -> bool:
    lower = text.strip().lower()
    return lower in _COUNTERS or bool(
        _PLURAL.fullmatch(lower) and lower.removesuffix("s") not in _FRACTIONS and lower not in _FRACTIONS
    )


def _is_asked(text: str, question: str) -> bool:
    """Return whether a text consists of words that the question has."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    asked = question.lower()
    has = [re.search(rf"(?<![^\W\d_]){word}(?![^\W\d_])" if word < "\u0e00" else word, asked) for word in words]
    return 0 < len(words) <= 6 and re.sub(r"[\W_]", "", text.lower()) == "".join(words) and all(has)


def units_agree(gold: str, answer: str) -> bool:
    """Return whether two units may be the same; a rate may lack its second part: 5 dollars for 5 dollars per hour."""
    if "/" in gold and "/" in answer:
        return gold == answer
    first, second = (unit.partition("/")[0] for unit in (gold, answer))
    return first == second or not (first and second)
