"""Units of measure: one spelling for each, so that 5 m differs from 5 cm."""

import re

_SPELLINGS = {
    "mm": "millimeter",
    "cm": "centimeter",
    "m": "meter",
    "km": "kilometer",
    "inch": "inche",
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
    "yuan": "rmb cny",
    "cent": "",
    "radian": "rad",
}
_CANONICAL = {spelling: unit for unit, others in _SPELLINGS.items() for spelling in (unit, *others.split())}
_AFTER = re.compile(r"\s*(?:square |cubic )?\s*([A-Za-z]+)(?:\s*\^?\s*\{?([23])(?!\d))?")
_RATE = re.compile(r"\s*(?:/|per\b|an?\b|each\b)\s*([A-Za-z]*)")
_POWER = {"square": "2", "cubic": "3"}


def unit_after(text: str, position: int) -> str:
    """Return the unit that begins there, such as cm, cm^2 or km/h; "" for other words."""
    match = _AFTER.match(text, position)
    unit = "" if match is None else _unit(match[1])
    if match is None or not unit:
        return ""
    if rate := _RATE.match(text, match.end()):
        return f"{unit}/{_unit(rate[1])}" if _unit(rate[1]) else ""
    power = match[2] or next((p for name, p in _POWER.items() if name in match[0]), "")
    return f"{unit}^{power}" if power else unit


def units_agree(gold: str, answer: str) -> bool:
    """Return whether two units may be the same; a rate may lack its second part: 5 dollars for 5 dollars per hour."""
    if "/" in gold and "/" in answer:
        return gold == answer
    first, second = (unit.partition("/")[0] for unit in (gold, answer))
    return first == second or not (first and second)


def _unit(word: str) -> str:
    word = word.lower().replace("metre", "meter").replace("litre", "liter")
    return _CANONICAL.get(word) or _CANONICAL.get(word.removesuffix("s"), "")
