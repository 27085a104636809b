"""Read the option that an answer chooses: a letter that stands alone, in a sentence that does not deny it."""

# ruff: noqa: RUF001  letters of other scripts

import re
import unicodedata
from collections.abc import Iterator

from grpo_ext.rewards.library.math_languages import ascii_signs, in_english
from grpo_ext.rewards.text import boxed

_MARKUP = re.compile(r"\\[A-Za-z]+|</?[A-Za-z][^<>]{0,40}>")
# The text is in English where a word matters: `math_languages.in_english`.
_ANSWER = re.compile(r"\b(?:answers?|ans)\b", re.IGNORECASE)  # an option may follow anywhere in the sentence
_NAMED = re.compile(  # an option follows directly: "option B", "I go with (B)", "it must be B"
    r"\b(?:options?|choices?|choose|pick|select|with|say|is|be|it['’]s|so|therefore|thus|hence|letter)\b[\W_]*"
    r"(?:(?:the|option|choice|letter|la|el|die)\b[\W_]*){0,2}",
    re.IGNORECASE,
)
_NO = re.compile(
    r"\b(?:not|non|cannot|never|neither|nor|none|no(?!\.| doubt)|except|excluding|wrong|incorrect|false|ruled"
    r"|eliminated?)\b|n['’]t\b|(?:thing|\ball) but\b",
    re.IGNORECASE,
)
_OTHER = re.compile(r"\b(?:rather|instead|unlike)\b", re.IGNORECASE)  # denies what follows only
_REASON = re.compile(r"\b(?:because|since)\b", re.IGNORECASE)
_HEDGE = re.compile(r"\b(?:or|maybe|perhaps|possibly|might|could|also)\b", re.IGNORECASE)
_VERB = re.compile(  # what follows is said about the option; after another word it is the option's own text
    r"(?:[^\w,;]|_)*(?:(?:is|isn|was|wasn|are|can|could|would|must|may|might|does|will|should|seems)\b|[がで이가])",
    re.IGNORECASE,
)
_WRONG = re.compile(r"\W*(?:wrong|incorrect|false) (?:answer|option|choice)", re.IGNORECASE)
_CALLED = re.compile(r"\W*option\b")  # B选项, B şıkkı
_AND = re.compile(r"(?:and|y|e)\b", re.IGNORECASE)
_CLAUSE = re.compile(r"[,;:.\n]|(?<!thing )(?<!all )\bbut\b")
_END = re.compile(r"\n|[!?。]|\.(?=\s|\Z)")
_LINK = re.compile(r"(?:\A|\b(?:answer|ans|is|are|be|or|and|either|option|choice|letter))[\W_]*\Z", re.IGNORECASE)
_NAME = re.compile(r"\b(?:option|choice|letter)\W*\Z", re.IGNORECASE)
_ADDED = re.compile(rf"[?!]\W*|[\W_]*{_HEDGE.pattern}\W*(?:\w+\W+){{0,2}}", re.IGNORECASE)  # "? ", ". Or "
_SUFFIX = re.compile(r"['’][^\W\d_]{3}")  # of a Turkish case: B'dir
_LABEL = re.compile(r"[\W_]*[^\W_][^:\n]{0,60}:")
_ARTICLES = frozenset("AEIOYАИОВСКУЯ")  # options that are words as well
_WINDOW, _MOST_MARKS = 300, 50


def choice(text: str, choices: str = "ABCDE") -> str | None:
    r"""Return the one option of `choices` that `text` chooses, in upper case, or None.

    Read in this order: the last \boxed{B}; the last sentence with "answer is B", in many languages; a first or last
    line that opens with "B" or "(B) text"; the last "option B". An option is a letter without a letter beside it, not
    the article of "a dog". None: it is denied ("B is not the answer"), or one of several ("B (or C)").
    """
    options, content = frozenset(choices.upper()), boxed(text)
    text = ascii_signs(_MARKUP.sub(" ", text if content is None else content))
    text = re.sub(" +", " ", in_english(text, "", options)).strip()
    for found in (_marked(_ANSWER, text, options), _opened(text, options), _marked(_NAMED, text, options)):
        if found:
            return next(iter(found)) if len(found) == 1 else None
    return None


def _marked(mark: re.Pattern[str], text: str, options: frozenset[str]) -> set[str]:
    """Return what the sentence of the last mark that is followed by options chooses."""
    for match in reversed(list(mark.finditer(text))[-_MOST_MARKS:]):
        before = " ".join(_CLAUSE.split(text[max(0, match.start() - 30) : match.start()])[-1].split()[-3:])
        following, marked = text[match.start() : match.end() + _WINDOW], len(match[0])
        places = [place for place, _ in _found(following, options) if place >= marked]
        between = re.sub(r"\A[\W_]+", "", following[marked : places[0]]) if places else "."
        far = any(map(str.isalnum, between)) if mark is _NAMED else _END.search(between)
        if not far and not _NO.search(before) and (chosen := _chosen(following, options)):
            return chosen
    return set()


def _opened(text: str, options: frozenset[str]) -> set[str]:
    """Return what the first and last lines that open with an option choose; a last line of one letter decides."""
    chosen: set[str] = set()
    for line in dict.fromkeys((text.rpartition("\n")[2][:_WINDOW], text.partition("\n")[0][:_WINDOW])):
        label = _LABEL.match(line)
        if label and not _NO.search(label[0]) and _bare(line[label.end() :], options):
            line = line[label.end() :]
        place = next((place for place, _ in _found(line, options)), None)
        if place is None or any(map(str.isalnum, line[:place])):
            continue
        if _bare(line, options) and not chosen:
            return _chosen(line, options)
        rest = line[place + 1 :]
        if not re.match(r"\s+[^\W_]", rest) or _goes_on(rest) or _CALLED.match(rest):
            chosen |= _chosen(line, options)
    return chosen


def _bare(text: str, options: frozenset[str]) -> bool:
    """Return whether an option is all that a text has."""
    return sum(map(str.isalnum, text)) == 1 and any(_found(text, options))


def _chosen(text: str, options: frozenset[str]) -> set[str]:
    """Return the options that the first sentence with one affirms, and one that a hedge behind it adds."""
    places = list(_found(text, options))
    if not places:
        return set()
    end = _END.search(text, places[0][0] + 1)
    stop = end.start() if end else len(text)
    chosen: set[str] = set()
    past = 0
    for (place, letter), (following, _) in zip(places, [*places[1:], (stop, "")], strict=True):
        between, said = text[past:place], text[place + 1 : min(following, stop)]
        past = place + 1
        if place > stop:  # "B? Or C?"
            if chosen and _ADDED.fullmatch(text[stop:place]):
                chosen.add(letter)
            break
        if chosen and _REASON.search(between) and not _HEDGE.search(between):
            break
        clause = _CLAUSE.split(between)[-1]
        if not (_NO.search(clause) or _OTHER.search(clause) or _denied(said)):
            chosen.add(letter)
    return chosen


def _denied(said: str) -> bool:
    """Return whether a sentence denies the option before: "is not right", "no es"; not ", not A"."""
    predicate = (_VERB.match(said) or _CALLED.match(said)) and re.split("[,;]", said.lstrip(" ,;"))[0]
    return bool(_NO.match(said.lstrip()) or _WRONG.match(said) or _NO.search(predicate or ""))


def _found(text: str, options: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield place and letter of each option that stands alone and is no word of its sentence."""
    for place, character in enumerate(text):
        letter = character.upper()
        if letter in options and not _joined(text, place) and not _is_word(text, place):
            yield place, letter


def _joined(text: str, place: int) -> bool:
    """Return whether a letter is a part of a word: beside a letter or digit, or a hyphen or apostrophe and a letter.

    Letters of a script without cases, such as Chinese, leave a letter of a script with cases alone.
    """
    cased = text[place].upper() != text[place].lower()

    def joins(character: str) -> bool:
        same = character.upper() != character.lower() if cased else character.isalpha()
        return same or character.isdecimal() or unicodedata.category(character)[0] == "M"

    before, after = text[max(0, place - 2) : place].rjust(2), text[place + 1 : place + 3].ljust(2)
    beside = joins(before[1]) or joins(after[0])
    suffix = after[0] in "'’-" and joins(after[1]) and not _SUFFIX.match(text, place + 1)
    return beside or (before[1] in "'’" and joins(before[0])) or suffix


def _is_word(text: str, place: int) -> bool:
    """Return whether a letter before a word, such as the article of "a dog", or in running text is no option."""
    before, after = text[:place], text[place + 1 :]
    followed = re.match(r"\s+[^\W\d_]", after) is not None and not _goes_on(after)
    if text[place] == "I":
        return re.match(r"\s+(?!is\b)[^\W\d_]", after) is not None
    if text[place] == text[place].upper():
        return followed and text[place] in _ARTICLES and not _NAME.search(before[-20:])
    return followed or not (_LINK.search(before[-20:]) or before[-1:] in tuple("([{\"'`*"))


def _goes_on(after: str) -> bool:
    """Return whether the sentence goes on behind an option, instead of the option's text."""
    return any(words.match(after.lstrip()) for words in (_VERB, _NO, _OTHER, _REASON, _HEDGE, _AND))
