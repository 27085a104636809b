"""Read the option that an answer chooses: a letter that stands alone, in a sentence that does not deny it."""

# ruff: noqa: RUF001  letters of other scripts

import re
import unicodedata
from collections.abc import Iterator

from grpo_ext.rewards.text import boxed

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_MARKUP = re.compile(r"\\[A-Za-z]+|</?[A-Za-z][^<>]{0,40}>")
_ANSWER = re.compile(  # an option may follow anywhere in the sentence
    r"\b(?:answers?|ans|ответ\w*|відповідь|respuesta|r[ée]ponse|resposta|risposta|antwort|antwoord|svar(?:et)?|cevap"
    r"|odpowiedź|jawaban|đáp án)\b|答案|答え|正解|解答|回答|정답|답은|إجابة|جواب|उत्तर|คำตอบ|תשובה",
    re.IGNORECASE,
)
_NAMED = re.compile(  # an option follows directly: "option B", "I go with (B)", "it must be B"
    r"(?:\b(?:options?|choices?|choose|pick|select|with|say|is|be|it['’]s|so|therefore|thus|hence|letter|opción|opção"
    r"|вариант|choix|letra)\b|选择?项?|選|선택|الخيار)[\W_]*(?:(?:the|option|choice|letter|la|el|die)\b[\W_]*){0,2}",
    re.IGNORECASE,
)
_NO = re.compile(
    r"\b(?:not|cannot|never|neither|nor|no(?!\.| doubt)|except|excluding|rather|instead|unlike|wrong|incorrect|false"
    r"|nicht|kein\w*|falsch\w*|pas|faux|non|ni|не|нет|неверн\w*|неправильн\w*|ليست?|خطأ)\b|n['’]t\b"
    r"|(?:thing|\ball) but\b|[不非错錯違]|ない|なく|아니|아닌|아닙|틀",
    re.IGNORECASE,
)
_REASON = re.compile(r"\b(?:because|since|weil|denn|car|parce|porque|perché|потому)\b|因[为為]|لأن", re.IGNORECASE)
_HEDGE = re.compile(
    r"\b(?:or|maybe|perhaps|possibly|might|could|also|ou|oder|vielleicht|или|أو)\b|或|または|또는", re.IGNORECASE
)
_VERB = re.compile(  # what follows is said about the option; after another word it is the option's own text
    r"[\W_]*(?:(?:is|isn|was|wasn|are|can|could|would|must|may|might|does|will|should|seems|ist|est|es|é|является)\b"
    r"|[是はがで은는이가])",
    re.IGNORECASE,
)
_AND = re.compile(r"\s+(?:and|und|et|y|e|и)\b", re.IGNORECASE)
_CLAUSE = re.compile(r"[,;:.\n]|(?<!thing )(?<!all )\bbut\b|sondern|sino|mais|而是|\bа\b")
_END = re.compile(r"\n|[!?。]|\.(?=\s|\Z)")
_LINK = re.compile(r"(?:\A|\b(?:is|are|be|or|and|either|option|choice|letter))[\W_]*\Z", re.IGNORECASE)
_ADDED = re.compile(rf"[\W_]*(?:(?:{_HEDGE.pattern})\W*(?:\w+\W+){{0,2}})?", re.IGNORECASE)  # "? Or ", "? "
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
    text = _MARKUP.sub(" ", (text if content is None else content).translate(_FULL_WIDTH)).strip()
    for found in (_marked(_ANSWER, text, options), _opened(text, options), _marked(_NAMED, text, options)):
        if found:
            return next(iter(found)) if len(found) == 1 else None
    return None


def _marked(mark: re.Pattern[str], text: str, options: frozenset[str]) -> set[str]:
    """Return what the sentence of the last mark that is followed by options chooses."""
    for match in reversed(list(mark.finditer(text))[-_MOST_MARKS:]):
        before = " ".join(_CLAUSE.split(text[max(0, match.start() - 30) : match.start()])[-1].split()[-3:])
        following = text[match.end() : match.end() + _WINDOW]
        places = [place for place, _ in _found(following, options)]
        between = re.sub(r"\A[\W_]+", "", following[: places[0]]) if places else "."
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
        if not re.match(r"\s+[^\W_]", line[place + 1 :]) or _goes_on(line[place + 1 :]):
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
            if _ADDED.fullmatch(text[stop:place]):
                chosen.add(letter)
            break
        if chosen and _REASON.search(between) and not _HEDGE.search(between):
            break
        if not (_NO.search(_CLAUSE.split(between)[-1]) or _denied(said)):
            chosen.add(letter)
    return chosen


def _denied(said: str) -> bool:
    """Return whether a sentence denies the option before: "is not right", "no es"; not ", not A"."""
    predicate = _VERB.match(said) and re.split("[,;]", said.lstrip(" ,;"))[0]
    return bool(_NO.match(said.lstrip()) or _NO.search(predicate or ""))


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
        return same or character.isdecimal() or unicodedata.combining(character or " ") > 0

    before, after = text[max(0, place - 2) : place].rjust(2), text[place + 1 : place + 3].ljust(2)
    beside = joins(before[1]) or joins(after[0])
    return beside or (before[1] in "'’" and joins(before[0])) or (after[0] in "'’-" and joins(after[1]))


def _is_word(text: str, place: int) -> bool:
    """Return whether a letter before a word, such as the article of "a dog", or in running text is no option."""
    before, after = text[:place], text[place + 1 :]
    followed = re.match(r"\s+[^\W\d_]", after) is not None and not _goes_on(after)
    if text[place] == text[place].upper():
        return followed and text[place] in _ARTICLES
    return followed or not (_LINK.search(before[-20:]) or before[-1:] in tuple("([{\"'`*"))


def _goes_on(after: str) -> bool:
    """Return whether the sentence goes on behind an option, instead of the option's text."""
    return any(words.match(after.lstrip()) for words in (_VERB, _NO, _REASON, _HEDGE)) or bool(_AND.match(after))
