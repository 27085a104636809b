"""Units of measure, read as a whole: one spelling for each, so that 5 m differs from 5 cm; counted nouns; numerals."""

import re

_SPELLINGS = """cm centimeter, mm millimeter, km kilometer, m meter, inch inche in, ft foot feet, yd yard, mi mile,
mg milligram, g gram gm, kg kilogram kilo, lb pound, oz ounce, ml milliliter, l liter, gal gallon, ton tonne, acre,
cup, s second sec, min minute, h hour hr, day, week, month, year yr, radian rad, degc celsius, degf fahrenheit, unit,
point, dollar usd $, euro eur €, sterling gbp £, rupee rs inr, yuan rmb cny 元 块, cent, ohm Ω, watt w, volt v,
joule j, newton n, pascal, mi/h mph, km/h kph"""
_CANONICAL = {spelling: row.split()[0] for row in _SPELLINGS.split(",") for spelling in row.split()}
# A prefix of the metric system and a unit of it, with capitals as they are.
_METRIC = re.compile(
    "[kMGTcdnpμµumh](?:m|g|s|L|l|W|Wh|Hz|J|V|A|Pa|N|Ω|ohm|eV|B|mol|cal|rad|bar|F)|Hz|Wh|Pa|eV|mol|cal|dB|lm|ha|atm|bar"
)
_PART = re.compile(
    r"\s*(?:(square|cubic|sq)\.?\s+)?([^\W\d_]+|[$€£])\.?(?:(?:\s*\^\s*\{?\s*)?(?<!\s)(-?[123])(?!\d)\s*\}?)?(?:\s*[*·]\s*|\s+)?"
)
_RATE = re.compile(r"\s*(?:/|(?<![A-Za-z])(?:per|an?|each|every)(?![A-Za-z]))\s*")
_REWRITES = {
    r"\A\s*\((.*)\)\s*\Z": r"\1",
    r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}": r"\1/\2",
    r"\\Omega": "Ω",
    r"\\mu ?": "μ",
}
_POWER = {"square": "2", "sq": "2", "cubic": "3"}
_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"""
NUMERALS = dict(zip(_WORDS.split(), [*range(20), *range(20, 100, 10)], strict=True))
NUMERALS |= {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_NUMERAL = f"(?:{'|'.join(NUMERALS)})"
_SPELLED = re.compile(
    rf"\s*(?:(minus|negative)\s+)?(?:a\s+)?({_NUMERAL}(?:(?:-|\s+|\s+and\s+){_NUMERAL})*)(?![\w-])", re.IGNORECASE
)
_PARTS = "half|halve|third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth|millionth"
_NO_NOUN = "|".join((*NUMERALS, _PARTS, "plu", "minu"))
_NOUN = re.compile(
    rf"(?!(?:{_NO_NOUN})s?\Z)(?:[a-z]{{3,}}(?<![sui])s|people|children|(?:wo)?men|fish|sheep)|[个個개つ人명名]"
)


def unit_of(text: str, question: str = "") -> str | None:
    """Return the unit that a text behind a number is, "" for a counted noun, None for anything else.

    Known are units of measure and their products, powers and rates, one English noun in the plural, and words that the
    question has, all of them.
    """
    for pattern, replacement in _REWRITES.items():
        text = re.sub(pattern, replacement, text).strip(" .")
    if not text or _is_asked(text, question):
        return _product(text) or ""
    amount, *rate = _RATE.split(text, maxsplit=1)
    unit = _product(amount)
    if unit is None and (not amount or _NOUN.fullmatch(amount.lower()) or _is_asked(amount, question)):
        unit = ""
    if unit is None or not rate:
        return unit
    per = _product(rate[0])
    noun = amount and re.fullmatch("[a-z]{3,}", rate[0])
    if per or noun or text.endswith("each") or _is_asked(rate[0], question):
        return f"{unit}/{per}" if per and unit else ""
    return None


def _product(text: str) -> str | None:
    """Return a product of units in one spelling, cm^2 for square centimeters, or None."""
    parts, end = [], 0
    while end < len(text):
        part = _PART.match(text, end)
        unit = part and _unit(part[2])
        if not part or not unit:
            return None
        power = part[3] or _POWER.get(part[1] or "", "1")
        parts.append(unit if power == "1" else f"{unit}^{power}")
        end = part.end()
    return "*".join(parts) or None


def _unit(word: str) -> str:
    if _METRIC.fullmatch(word) and word.lower() not in _CANONICAL:
        return word.replace("µ", "u").replace("μ", "u")
    if len(word) == 1 and word not in "mgshlLNJWVΩ元块$€£":
        return ""
    lower = word.lower().replace("metre", "meter").replace("litre", "liter")
    return _CANONICAL.get(word) or _CANONICAL.get(lower) or _CANONICAL.get(lower.removesuffix("s"), "")


def _is_asked(text: str, question: str) -> bool:
    """Return whether a text consists of words that the question has."""
    words, lowered = re.findall(r"[^\W\d_]+", text.lower()), question.lower()
    has = [re.search(rf"(?<![^\W\d_]){word}(?![^\W\d_])" if word < "\u0e00" else word, lowered) for word in words]
    return 0 < len(words) <= 6 and re.sub(r"[\W_]", "", text.lower()) == "".join(words) and all(has)


def units_agree(gold: str, answer: str) -> bool:
    """Return whether two units may be the same; a rate may lack its second part: 5 dollars for 5 dollars per hour."""
    if "/" in gold and "/" in answer:
        return gold == answer
    first, second = (unit.partition("/")[0] for unit in (gold, answer))
    return first == second or not (first and second)


def in_digits(text: str) -> str:
    """Return a text with the whole number that English words spell at its beginning in digits."""
    match = _SPELLED.match(text)
    total = below = 0
    for word in re.findall(r"\b(?!and\b)[a-z]+", match[2].lower()) if match else []:
        value = NUMERALS[word]
        if value >= 1000:
            total, below = total + (below or 1) * value, 0
        elif value == 100:
            below = (below or 1) * 100
        elif 0 < below % 100 < 20 or below % (10 if value < 10 else 100):
            return text
        else:
            below += value
    return f"{'-' if match[1] else ''}{total + below}{text[match.end() :]}" if match else text
