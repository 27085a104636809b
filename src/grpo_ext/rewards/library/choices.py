"""Read the option that an answer chooses: a mark that is one letter, or one letter with its text."""

# ruff: noqa: RUF001  signs of other scripts

import re

from grpo_ext.rewards.library.math_marks import DENIAL, answer_part, find
from grpo_ext.rewards.library.math_notation import tidy

_NAMED = r"(?:(?:the|option|choice|letter|la|el|die|选项|選択肢|선택지|вариант)\s*)*"
_DRESSED = re.compile(
    rf"{_NAMED}[\[({{\"'“«*]*(?P<letter>[^\W\d_])[\])}}\"'”»*]*[.。!]?(?P<text>(?:(?<=[)\].*])|\s*[.:)）])\s*\S.*)?",
    re.IGNORECASE | re.DOTALL,
)
_LINE = re.compile(r"[^\w(\[]*\(?([^\W\d_])(?:\)|[.:](?=\s))")
# What goes on in place of the option's own text: "B) is not the answer", "B. or C".
_GOES_ON = re.compile(
    r"[\s,;/|&*]*(?:(?:is|isn|was|wasn|are|can|could|must|may|and|or|nor|not|but|et|y|und|oder|o|ou)\b|[+/|&?])"
)
_CHOSEN = re.compile(
    r"(?:.*\s)?(?:is|(?:must|should|would|will)\s+be|it['’]s|choose|pick|select|with|say|so|therefore|thus|hence|option|choice|letter)\b[\s:*]*"
    r"(?P<rest>[^\n]{1,30})",
    re.IGNORECASE,
)
_RIGHT = re.compile(
    rf"(?:so|therefore|thus|hence|,|\s)*{_NAMED}\(?(?P<letter>[^\W\d_])\)?\s+is\s+(?:the\s+)?(?:correct|right|answer|true)"
    r"(?:\s+(?:answer|option|choice))?[.!]?",
    re.IGNORECASE,
)
_SENTENCES = re.compile(r"(?<=[.!?])\s+|\n")
_LONGEST = 300


def choice(text: str, choices: str = "ABCDE") -> str | None:
    r"""Return the one option of `choices` that `text` chooses, in upper case, or None.

    Read is a mark, as `math_marks.find` has it (`<answer>`, \boxed{}, "answer is B", in many languages), or else a
    text or a last line that is nothing but the option, or a last sentence such as "So B is correct." or "I choose B."
    A mark is read whole: `B`, `(B)`, `Option B`, or `B) its text`. Several options and denials choose no option.
    """
    options = frozenset(choices.upper())
    marks = find(answer_part(text))
    if marks is None:
        return None
    if marks.marked:
        letters = {_letter(content, options) for content in marks.contents}
        return letters.pop() if len(letters) == 1 else None
    return _unmarked(marks.contents[0], options)


def _letter(content: str, options: frozenset[str]) -> str | None:
    """Return the option that a text is, in any dress, with at most its own text behind a label."""
    match = _DRESSED.fullmatch(tidy(content[:_LONGEST]).strip(" >#-")) if len(content) <= _LONGEST else None
    if match is None or (letter := match["letter"].upper()) not in options:
        return None
    following = match["text"] or ""
    rest = following.lstrip(" .:)）*")
    others = [*re.findall(r"(?<![\w'’-])[^\W\d_](?![\w'’-])", rest), *_LINE.findall(rest)]
    return None if _GOES_ON.match(rest) or any(other in options and other not in "AI" for other in others) else letter


def _unmarked(text: str, options: frozenset[str]) -> str | None:
    labels = {match[1].upper() for line in text.split("\n") if (match := _LINE.match(line))} & options
    last = text.rstrip().rpartition("\n")[2].strip()
    if letter := _letter(last, options):
        return letter if labels <= {letter} or len(tidy(last)) == 1 else None
    sentence = _SENTENCES.split(text[-_LONGEST:].strip())[-1]
    if DENIAL.search(sentence):
        return None
    if right := _RIGHT.fullmatch(sentence):
        return right["letter"].upper() if right["letter"].upper() in options else None
    chosen = _CHOSEN.fullmatch(sentence)
    return _letter(chosen["rest"], options) if chosen else None
