"""Units of measure: one spelling for each, so that 5 m is not taken for 5 cm."""

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
    "cent": "",
    "radian": "rad",
}
_CANONICAL = {spelling: unit for unit, others in _SPELLINGS.items() for spelling in (unit, *others.split())}
_AFTER = re.compile(r"\s*(?:square |cubic )?\s*([A-Za-z]+)(?:\s*\^?\s*\{?([23])(?!\d))?")
_RATE = re.compile(r"\s*(?:/|per\b|an?\b|each\b)")
_POWER = {"square": "2", "cubic": "3"}


def unit_after(text: str, position: int) -> str:
    """The unit that begins there, such as cm or cm^2; "" for other words and for rates."""
    match = _AFTER.match(text, position)
    if match is None or _RATE.match(text, match.end()):
        return ""
    word = match[1].lower().replace("metre", "meter").replace("litre", "liter")
    unit = _CANONICAL.get(word) or _CANONICAL.get(word.removesuffix("s"), "")
    power = match[2] or next((p for name, p in _POWER.items() if name in match[0]), "")
    return f"{unit}^{power}" if unit and power else unit
