r"""Find the answer in a completion: by end token, reasoning, tags, boxes, `####`."""

import re

from grpo_ext.rewards.text import answer_block, boxes

PLACES = ("auto", "tag", "boxed", "hash", "last")
"""Places where an answer may be read; `auto` takes the first of the others that exists."""

_END = re.compile(
    r"<\|(?:im_end|im_start|endoftext|end_of_text|eot_id|eom_id|end|return)\|>|</s>|<eos>|<end_of_turn>|<\uff5cend\u2581of\u2581sentence\uff5c>"
)
_OPENING = re.compile(rf"\A(?:\s*(?:{_END.pattern}))+")
_HASHED = re.compile(r"[-+$€£¥\\(.]*\d[^\n]*")
_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}|\\q?quad(?![A-Za-z])|\\[()\[\],;:! ]|[$&]")
# Text between boxes that form one answer: a separator, up to four words and "and", the name of the next.
_JOINS = re.compile(
    r"(?!.*\b(?:no|not|wait|actually|instead|then|hence|so)\b)[,;]?\s*(?:(?:[A-Za-z()]+\s+){0,4}(?:and|or))?[,:]?"
    r"\s*(?:[A-Za-z]\w*(?:_\{\w+\})?\s*=)?",
    re.IGNORECASE,
)
_MOST_BOXES = 50


def answer_part(text: str) -> str:
    """Return the part of a completion before an end token and after the last `</think>`."""
    text = _OPENING.sub("", text)  # end tokens of a template
    end = _END.search(text)
    return text[: end.start() if end else len(text)].rpartition("</think>")[2]


def marked(text: str, where: str = "auto") -> str | None:
    """Return the marked answer in an `answer_part`, or None; `where` may admit only one kind of mark."""
    block = answer_block(text) if where in ("auto", "tag") else None
    if block is not None:
        return _boxed(block) or _hashed(block) or block
    if where in ("auto", "boxed") and (box := _boxed(text)) is not None:
        return box
    return _hashed(text) if where in ("auto", "hash") else None


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
    match = _HASHED.fullmatch(text.rpartition("####")[2].strip()) if "####" in text else None
    return match[0] if match else None
