"""Read numbers that are written in words: `minus twenty-three`, `two thirds`, `三百二十`."""

import re
import unicodedata

_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"""
NUMERALS = dict(zip(_WORDS.split(), [*range(20), *range(20, 100, 10)], strict=True))
NUMERALS |= {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4}
PARTS |= {"fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10}
_PHRASE = re.compile(r"[a-z]+(?:[ -]+[a-z]+)*|[^\x00-\u2fff]+")
_LONGEST = 100


def spelled(text: str) -> str | None:
    """Return the number that a text of at most 100 characters spells as a whole, as 12, -7 or 7/2, or None."""
    text = text.strip(" .:*$").lower()
    if len(text) > _LONGEST or not _PHRASE.fullmatch(text):
        return None
    words = re.findall(r"[a-z]+|[^ -]", text)
    sign = "-" * (words[0] in ("minus", "negative"))
    words = words[len(sign) :]
    part = PARTS.get(words[-1].removesuffix("s")) if words else None
    if part is None:
        number = _counted([word for word in words if word != "and"])
        return None if number is None else f"{sign}{number}"
    cut = words.index("and") if "and" in words else -1
    whole, count = words[: max(cut, 0)], words[cut + 1 : -1]
    parts = 1 if count == ["a"] or words == ["half"] else _counted(count)
    before = _counted(whole) if whole else 0
    return None if parts is None or before is None else f"{sign}{before * part + parts}/{part}"


def _counted(words: list[str]) -> int | None:
    """Return the number of words such as two, hundred, five, or None: a power of ten multiplies what is below it."""
    total = 0
    for i, word in enumerate(words):
        value = NUMERALS.get(word, int(unicodedata.numeric(word, -1)) if len(word) == 1 else -1)
        power = value in (10, 100) or value >= 1000
        below = total % value if power else 0
        room = 10 * value if power and not below else 10 if value < 10 else 100
        if value < 0 or (value == 0 and len(words) > 1) or (not below and i and total % room):
            return None
        total += (below or 1) * value - below if power else value
    return total if words else None
