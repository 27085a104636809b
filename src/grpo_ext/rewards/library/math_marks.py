r"""Find the final answer of a completion: in a tag, a box, after `####`, after "answer is", or as its whole text.

The first kind of mark that occurs decides. Several marks of it with different contents are no answer, nor is a denied
one.
"""

# ruff: noqa: RUF001  letters of other scripts

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from grpo_ext.rewards.library.math_notation import PERCENT, ascii_signs
from grpo_ext.rewards.library.math_units import unit_of
from grpo_ext.rewards.text import END_TOKEN, boxes

PLACES = ("auto", "tag", "boxed", "hash", "last")
"""Places where an answer may be read; `auto` takes the first of the others that exists."""

# A language a row: how it names an answer | what follows | what closes the sentence | how it denies.
_ROWS = """
answers? ans\\.? | is are was equals will\\s+be must\\s+be | | \\w*not no never hardly \\w+n['’]t wrong incorrect false
答案 正解 解答 回答 答え 答 选择 选项 选 | 是 为 為 等于 は | です | 不 没 非 错
정답 답 | 은 는 | 입니다 이다 | 아니
ответ відповідь отговор | это это\\s+число равен | | не нет невер\\w* неправ\\w*
respuesta resposta risposta alternativa | es é è | | no não non nunca
réponse reponse | est | | pas
antwort antwoord svar svaret lösung | ist lautet beträgt is är | | nicht kein\\w* niet geen inte
odpowiedź odpoveď odpověď | jest je | | nie není
cevap yanıt | | dir dır dür dur tir tır | değil
الإجابة إجابة الجواب جواب الخيار پاسخ | هي هو است | | ليس ليست
उत्तर উত্তর | | है | नहीं
đáp\\s+án chọn | là | | không
คำตอบ | คือ | | ไม่
jawaban jawabannya | adalah ialah | | bukan tidak
απάντηση | είναι | | δεν
התשובה תשובה | היא הוא | | לא אינה אינו
vastaus răspuns răspunsul | on este | | ei nu
"""
_WORDS, _COPULAS, _CLOSINGS, _DENIALS = (
    sorted({word for row in _ROWS.strip().splitlines() for word in row.split("|")[column].split()}, reverse=True)
    for column in range(4)
)


def _one_of(words: list[str]) -> str:
    """Return a pattern for one of the words; letters beside a word count only in scripts that space words."""
    return "|".join(word if "\u0e00" <= word[0] <= "\uffff" else rf"(?<!\w)(?:{word})(?!\w)" for word in words)


_NAMED = re.compile(_one_of(_WORDS), re.IGNORECASE)
_PHRASE = re.compile(
    rf"(?:{_NAMED.pattern})(?:(?P<gap>(?:[\s*_][^\d\n:：=—.。,，;]{{0,40}}?)?)(?:(?P<is>{_one_of(_COPULAS)})\s*[:：]?|=>|[:：=—–→]|\s-\s|->)"
    r"|[\s*_]*(?=[\"'“(]*(?:[-\d\\$(]|[^\W\d_](?=\W*(?:\n|\Z)|[).:,]|['’]))))",
    re.IGNORECASE,
)
_CLOSED = re.compile(rf"\s*['’]?(?:{'|'.join(_CLOSINGS)})[.。]?\Z")
DENIAL = re.compile(_one_of(_DENIALS), re.IGNORECASE)
# Beside a box: a denial before it, without a verb between; what states it; a denial behind it; a clause behind it.
_DENIED = re.compile(rf"(?:{DENIAL.pattern})(?!.*\b(?:is|are|was|equals)\b)", re.IGNORECASE)
_STATES = re.compile(rf"(?:{_one_of(_COPULAS)}|[=:])[\s$*\\(\[]*\Z", re.IGNORECASE)
_REJECTED = re.compile(rf"[^\w,]*(?:\?\W*)?(?:\w+\W+){{0,3}}?(?:{DENIAL.pattern})", re.IGNORECASE)
_FOLLOWED = re.compile(rf"((?:[\s$*]|\\[)\]])*)(,?)\s*(?!{PERCENT})(?<!\\)([A-Za-z][^$]*)")
_DISPLAY = re.compile(r"\A(?:\\\[|\$\$)(.*?)(?:\\\]|\$\$)", re.DOTALL)
_OPENED = re.compile(r"\A[\s:：]*(?:[*_]+\s+)?")
CONNECTIVES = (
    r"(?:(?:so|thus|hence|therefore|then|finally|and|in\s+(?:all|total)|altogether|overall|we|i|can|conclude|find|get|see|know"
    r"|have|that|this|gives)(?!\w)[\s,:*_]*)*"
)
"""Words before a statement, which assert it."""
_LEAD = re.compile(
    rf"{CONNECTIVES}(?:(?:the|my|our|its?|final|correct|right|required|desired|exact|numeric(?:al)?|option|choice)(?!\w)[\s*_]*)*",
    re.IGNORECASE,
)
_FOREIGN_LEAD = re.compile(r"(?:[^\s\d]+\s*){0,3}")
_SENTENCE = re.compile(
    r"(?<=[.!])\s+(?!(?:or|no|not|wait|but|actually)\b)(?!(?:Or|No|Not|Wait|But|Actually)\b)|\n|(?<=[。！])|(?<=\?)\s+(?=[A-Z](?!o\b))"
)
_CLAUSE = re.compile(r"[,;:，；：]")
_OPENING = re.compile(rf"\A(?:\s*(?:{END_TOKEN.pattern}))+")
_REASONING = r"(?:think|thought|reason|scratch|analysis|reflect)\w{0,20}"
_REASONED = re.compile(rf"</{_REASONING}>", re.IGNORECASE)
_REASONS = re.compile(rf"<{_REASONING}>", re.IGNORECASE)
_INLINE = re.compile(r"</?(?:b|i|u|em|strong|code)>")
_BLOCK = re.compile(
    r"<([A-Za-z][\w-]{0,30}+)(?: [^<>\n]{0,60}+)?>((?:[^<]|<(?!/?[A-Za-z][\w-]{0,30}+(?: [^<>\n]{0,60}+)?>))*+)</\1>"
)
_OBJECT = re.compile(r'\{\s*"')
_HASHED = re.compile(r"^[ \t]*####(?!#)(.*)$", re.MULTILINE)
_JOIN = re.compile(r"[,;]?(?:and|or)?,?(?:[A-Za-z]\w*(?:_\{\w+\})?=)?", re.IGNORECASE)
_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}|\\q?quad(?![A-Za-z])|\\[()\[\],;:! ]|[$&\s]")
_TOUCHED_BEFORE = re.compile(
    r"(?:(?<=[\w}\)\]$])[ $]*[-+*/^]|(?<![^\s$=])[-−√]|\\(?:cdot|times|pm|sqrt|frac|neg|ne)|[\d√^])[\s$]*\Z"
)
_TOUCHED_AFTER = re.compile(r"\s*(?:[\^!*/+\d]|-\s*\d|\.\d|\\(?:cdot|times|pm|frac)(?![A-Za-z]))")
_NESTED = re.compile(r"\A\s*\\(?:boxed|fbox)\s*\{(.*)\}\s*\Z", re.DOTALL)
_VALUE_LINE = re.compile(r"(?!\d+[.)] +[A-Za-z])(?:[^A-Za-z]*\d|\\[A-Za-z]|[A-Za-z]\w* *=|\W*[A-Z]\W*\Z)")
_LONGEST, _MOST_MARKS = 200, 50
_TAIL = 4000
"""Characters at the end of a text in which "answer is" is a mark."""
_KEYS = ("answer", "final_answer", "ground_truth", "solution", "result", "target", "value", "label")


@dataclass(frozen=True)
class Found:
    """Contents of the marks of one kind, in order; `joined`: they may be one list; `marked`: not the whole text."""

    contents: tuple[str, ...]
    joined: bool = False
    marked: bool = True


NOTHING = Found(())
"""A mark that is denied, or not whole."""


def answer_part(text: str) -> str:
    """Return the part of a completion before an end token and after its reasoning."""
    text = _OPENING.sub("", text)  # end tokens of a template
    end = END_TOKEN.search(text)
    text = text[: end.start() if end else len(text)]
    return ascii_signs(_INLINE.sub("", _REASONED.split(text)[-1]))


def find(text: str, where: str = "auto") -> Found | None:
    """Return the contents of the marks of an `answer_part`, or None; `where` may admit only one kind."""
    reasons = _REASONS.search(text) is not None  # an open tag: nothing but a tag behind it is an answer
    for kind, look in (("tag", _tagged), ("boxed", _boxed), ("hash", _hashed), ("", _in_json), ("", _said)):
        if where in ("auto", kind) and not (reasons and kind != "tag") and (marks := look(text)) is not None:
            return marks
    return _unmarked(text) if where in ("auto", "last") and not reasons else None


def _tagged(text: str) -> Found | None:
    """Return the contents of `<answer>`, or of a short tag of any other name at the end: `<SOLUTION>12</SOLUTION>`."""
    blocks = list(_BLOCK.finditer(text))
    answers = [block[2].strip() for block in blocks if block[1].lower() == "answer"]
    if answers and _REJECTED.match(_SENTENCE.split(text[blocks[-1].end() :][:_LONGEST])[0]):
        return NOTHING
    if not answers and blocks and not text[blocks[-1].end() :].strip(" \t\n.`"):
        content = blocks[-1][2].strip()
        answers = [content] if len(content) <= _LONGEST and "\n" not in content else []
    return Found(tuple(map(_within, dict.fromkeys(answers)))) if answers else None


def _within(content: str) -> str:
    """Return the content of a tag, or of the one mark in it beside which it has no number."""
    if (marks := _in_json(content) or _boxed(content) or _hashed(content) or _said(content)) is None:
        return content
    rest = content
    for part in filter(None, marks.contents):
        rest = rest.replace(part, "")
    whole = marks.joined or len(marks.contents) == 1
    return ", ".join(marks.contents) if whole and not re.search(r"\d", rest) else ""


def _boxed(text: str) -> Found | None:
    r"""Return the contents of the boxes: one list if only separators, "and" or "or" stand between them."""
    outer: list[tuple[int, int]] = []
    for start, end in boxes(text):
        if not outer or start > outer[-1][1]:
            outer.append((start, end))
    if not outer:
        return None
    outer = outer[-_MOST_MARKS:]
    contents = [_box(text, start, end, last=end == outer[-1][1]) for start, end in outer]
    between = [text[end + 1 : text.rfind("\\", 0, start)] for (_, end), (start, _) in pairwise(outer)]
    joined = all(len(part) <= 70 and _JOIN.fullmatch(_MARKUP.sub(r"\1", part)) for part in between)
    return NOTHING if None in contents else Found(tuple(dict.fromkeys(filter(None, contents))), joined)


def _box(text: str, start: int, end: int, *, last: bool) -> str | None:
    r"""Return the content of a box, or None if its sentence denies it or a formula goes on beside it.

    So it is with the last one if a clause follows ("\boxed{3}, which is a mistake") and none states it before ("it is
    \boxed{3}, as required"), or if it is the subject of what follows: not its unit, nor "is the answer".
    """
    opening = text.rfind("\\", 0, start)
    before = _CLAUSE.split(_SENTENCE.split(text[max(0, opening - _LONGEST) : opening])[-1])
    after = _SENTENCE.split(text[end + 1 : end + 1 + _LONGEST])[0]
    content = _NESTED.sub(r"\1", text[start:end])
    denied = _DENIED.search(" ".join(before[-2:] if not before[-1].strip(" $") else before[-1:]))
    if denied or _REJECTED.match(after) or _TOUCHED_BEFORE.search(before[-1]) or _TOUCHED_AFTER.match(after):
        return None
    if last and (follows := _FOLLOWED.match(after)):
        space, comma, words = follows.groups()
        opens = not re.search(r"\w", "".join(before)) and not _NAMED.search(words)
        if not _STATES.search(before[-1]) if comma else (opens or not space) and unit_of(words) is None:
            return None
    percent = "%" if re.match(rf"[\s$]*(?:{PERCENT})", after) else ""
    return None if r"\boxed" in content else content.strip() + percent


def _hashed(text: str) -> Found | None:
    """Return the contents of the lines that begin with `####`; words count at the end only, elsewhere are headings."""
    lines = [line[1].strip() for line in _HASHED.finditer(text)][-_MOST_MARKS:]
    values = [line for line in lines if _VALUE_LINE.match(line)]
    if lines and text.rstrip().rpartition("\n")[2].lstrip().startswith("####"):
        values.append(lines[-1])
    return Found(tuple(dict.fromkeys(values))) if values else None


def _in_json(text: str) -> Found | None:
    """Return the answer of a JSON object at the end of the text, or None."""
    starts = [match.start() for match in _OBJECT.finditer(text)]
    try:
        value, end = json.JSONDecoder().raw_decode(text, starts[-1])
    except (IndexError, ValueError, RecursionError):
        return None
    answer = None if text[end:].strip("}` .\n\t") else answer_of(value)
    return None if answer is None else Found((answer,))


def answer_of(value: Any) -> str | None:
    """Return the answer in a JSON value: a string or number, that of a list of one, of a key such as "answer"."""
    if isinstance(value, Mapping):
        named = [value[key] for key in _KEYS if key in value] or (list(value.values()) if len(value) == 1 else [])
        return answer_of(named[0]) if named else None
    if isinstance(value, list | tuple):
        return answer_of(value[0]) if len(value) == 1 else None
    return None if value is None else str(value)


def _said(text: str) -> Found | None:
    """Return what the sentences after "answer is" hold, "" for a denied one, in any language of the table."""
    contents, text = [], text[-_TAIL:]
    for match in list(_PHRASE.finditer(text))[-_MOST_MARKS:]:
        lead = _CLAUSE.split(_SENTENCE.split(text[max(0, match.start() - _LONGEST) : match.start()])[-1])[-1]
        denied = DENIAL.search(match["gap"] or "") or DENIAL.search(lead)
        led = _LEAD if match[0][:3].lower() == "ans" else _FOREIGN_LEAD
        plain = led.fullmatch(lead.strip(' *_#>-"“('))
        if not (plain or denied or match["is"]):
            continue  # "They answer 12 questions", "to express the answer as a percentage:"
        content = _OPENED.sub("", text[match.end() : match.end() + 2 * _LONGEST])
        display = _DISPLAY.match(content)
        sentence = display[1].strip() if display else _CLOSED.sub("", _SENTENCE.split(content)[0].strip())
        inner = _PHRASE.search(sentence)  # "Final answer: The answer is 12."
        if inner is None or re.search(r"[\d.,;!?]", sentence[: inner.start()]):
            contents.append(sentence if plain and not denied and not inner else "")
    return Found(tuple(dict.fromkeys(contents))) if contents else None


def _unmarked(text: str) -> Found | None:
    """Return the text after its last closing tag, as a whole."""
    last = re.split(r"</[A-Za-z][\w-]{0,30}>", text)[-1].strip() or text.strip()
    return Found((last,), marked=False) if last else None
