r"""Find the answer in a completion: by end token, reasoning, tags, JSON, boxes, `####`."""

import json
import re
from collections.abc import Mapping
from typing import Any

from grpo_ext.rewards.library.math_languages import ascii_signs
from grpo_ext.rewards.text import END_TOKEN, answer_block, boxes

PLACES = ("auto", "tag", "boxed", "hash", "last")
"""Places where an answer may be read; `auto` takes the first of the others that exists."""

_OPENING = re.compile(rf"\A(?:\s*(?:{END_TOKEN.pattern}))+")
_HASHED = re.compile(r"\d|\\[A-Za-z]")
_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}|\\q?quad(?![A-Za-z])|\\[()\[\],;:! ]|[$&]")
# Text between boxes that form one answer: a separator, up to four words and "and", the name of the next.
_JOINS = re.compile(
    r"(?!.*\b(?:no|not|wait|actually|instead|then|hence|so)\b)[,;]?\s*(?:(?:[A-Za-z()]+\s+){0,4}(?:and|or))?[,:]?"
    r"\s*(?:[A-Za-z]\w*(?:_\{\w+\})?\s*=)?",
    re.IGNORECASE,
)
_MOST_BOXES = 50
_LAST_TAG = re.compile(r"</([A-Za-z][\w-]{0,30})>[\s.`]*\Z")
_REASONING = re.compile(r"think|thought|reason|scratch|analysis|reflect", re.IGNORECASE)
_OBJECT = re.compile(r'\{\s*"')
_LONGEST = 200
"""Characters of an answer in a tag that is not `<answer>`: longer ones are running text."""
_KEYS = ("answer", "final_answer", "ground_truth", "solution", "result", "target", "value", "label")


def answer_part(text: str) -> str:
    """Return the part of a completion before an end token and after the last `</think>`."""
    text = _OPENING.sub("", text)  # end tokens of a template
    end = END_TOKEN.search(text)
    return ascii_signs(text[: end.start() if end else len(text)].rpartition("</think>")[2])


def marked(text: str, where: str = "auto") -> str | None:
    """Return the marked answer in an `answer_part`, or None; `where` may admit only one kind of mark."""
    block = answer_block(text) if where in ("auto", "tag") else None
    if block is None and where in ("auto", "tag"):
        block = _tagged(text)
    if block is not None:
        return _boxed(block) or _hashed(block) or _in_json(block) or block
    if where in ("auto", "boxed") and (box := _boxed(text)) is not None:
        return box
    hashed = _hashed(text) if where in ("auto", "hash") else None
    return _in_json(text) if hashed is None and where == "auto" else hashed


def _tagged(text: str) -> str | None:
    """Return the short content of a tag of any name at the end of the text: `<SOLUTION>12</SOLUTION>`."""
    closed = _LAST_TAG.search(text, max(0, text.rfind("</")))
    if not closed or _REASONING.match(closed[1]):
        return None
    opened = text.rfind(f"<{closed[1]}>", 0, closed.start())
    content = text[opened + len(closed[1]) + 2 : closed.start()].strip()
    return content if opened >= 0 and len(content) <= _LONGEST and "\n" not in content else None


def _in_json(text: str) -> str | None:
    """Return the answer of a JSON object at the end of the text, or None."""
    starts = [match.start() for match in _OBJECT.finditer(text)]
    try:
        value, end = json.JSONDecoder().raw_decode(text, starts[-1])
    except (IndexError, ValueError, RecursionError):
        return None
    return None if text[end:].strip("}` .\n\t") else answer_of(value)


def answer_of(value: Any) -> str | None:
    """Return the answer in a JSON value: a string or number, that of a list of one, of a key such as "answer"."""
    if isinstance(value, Mapping):
        named = [value[key] for key in _KEYS if key in value] or (list(value.values()) if len(value) == 1 else [])
        return answer_of(named[0]) if named else None
    if isinstance(value, list | tuple):
        return answer_of(value[0]) if len(value) == 1 else None
    return None if value is None else str(value)


def _boxed(text: str) -> str | None:
    r"""Return the content of the last box, preceded by boxes that join it to one answer: `\boxed{1} and \boxed{2}`."""
    spans = boxes(text)[-_MOST_BOXES:]
    if not spans:
        return None
    parts = [text[slice(*spans[-1])].strip()]
    for (first, end), (start, _) in zip(spans[-2::-1], spans[:0:-1], strict=True):
        between = text[end + 1 : text.rfind("\\", 0, start)]
        if end >= start or len(between) > 70 or not _JOINS.fullmatch(_MARKUP.sub(r" \1 ", between).strip()):
            break
        parts.insert(0, text[first:end].strip())
    return ", ".join(dict.fromkeys(parts))


def _hashed(text: str) -> str | None:
    hashed = text.rpartition("####")[2].strip() if "####" in text else ""
    return hashed if "\n" not in hashed and _HASHED.search(hashed) else None
