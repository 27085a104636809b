"""The text of a completion, and its tags and boxes."""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

Completion: TypeAlias = str | Sequence[Mapping[str, Any]]
_Content: TypeAlias = str | Sequence[str | Mapping[str, Any]] | None

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# The innermost block: a second <answer> opened inside the first must not become part of the content.
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
END_TOKEN = re.compile(
    r"<([|\uff5c])(?!(?:begin|end)_of_(?:thought|solution|box)\b|(?:channel|message|start)\1)[^\s<>|\uff5c]{1,40}\1>|</s>"
    r"|<(?:eos|EOS|pad|PAD|end_of_turn|turn\|)>|\[(?:EOS|PAD)\]"
)
"""A special token that ends a turn, as <|im_end|>, in text that was saved with it."""
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(rf"{_BOX.pattern}|\\[{{}}]|[{{}}]")


_EMPTY_LATEX = re.compile(
    r"\\(?:[,;:!> ]|\Z|q?quad(?![A-Za-z])|(?:h|v)?phantom\s*\{[^{}]*\}|[hv]space\*?\s*\{[^{}]*\}"
    r"|(?:text|math|boxed|mbox)\w*(?=\s*\{[^\w{}]*\}))|[{}$~]"
)
_BLANK = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"
"""Invisible characters of other categories: fillers, joiners, the empty Braille cell."""


def has_content(text: str) -> bool:
    """Return whether a text shows something: a letter, number, sign or punctuation, no mere space or empty LaTeX."""
    return any(unicodedata.category(c)[0] in "LNPS" and c not in _BLANK for c in _EMPTY_LATEX.sub("", text))


def completion_text(completion: Completion) -> str:
    """Return the text of a completion: the string itself, or the content of the last assistant message, or "".

    A message without a role counts as the assistant's, as in TRL's examples; text blocks of a content are joined. The
    end tokens behind the text do not belong to it.
    """
    if isinstance(completion, str):
        return _without_end_tokens(completion)
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            return _without_end_tokens(content_text(message.get("content")))
    return ""


def _without_end_tokens(text: str) -> str:
    start = end = len(text)  # of the last run of tokens
    for token in END_TOKEN.finditer(text):
        if start == len(text) or text[end : token.start()].strip():
            start = token.start()
        end = token.end()
    return text if text[end:].strip() else text[:start]


def content_text(content: _Content) -> str:
    """Return the text of a message's content: itself, its text blocks joined, "" for None."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(b if isinstance(b, str) else b.get("text") or "" for b in content)


def conversation_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return messages with their roles as text for people."""
    return "\n\n".join(f"[{message['role']}]\n{message_text(message)}" for message in messages)


def message_text(message: Mapping[str, Any]) -> str:
    """Return a message's content and calls of tools as text for people; a part that is not text shows its type."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(
            str(part.get("text") or f"[{part.get('type')}]") if isinstance(part, Mapping) else str(part)
            for part in content
        )
    calls = message.get("tool_calls")
    called = "\n" + json.dumps(calls, default=str, ensure_ascii=False) if calls else ""
    return f"{content or ''}{called}"


def answer_block(text: str) -> str | None:
    """Return the content of the last `<answer>...</answer>`, stripped, or None without one."""
    blocks = _ANSWER.findall(text)
    return blocks[-1].strip() if blocks else None


def boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} (or \fbox{...}) with balanced braces, stripped, or None."""
    spans = boxes(text)
    return text[slice(*spans[-1])].strip() if spans else None


def boxes(text: str) -> list[tuple[int, int]]:
    r"""Return where the content of each \boxed{...} (or \fbox{...}) with balanced braces begins and ends, in order."""
    opened: list[int | None] = []  # where the content of each open brace starts, None for a brace that opens no box
    spans = []
    for token in _BRACE.finditer(text):
        if token[0] == "}":
            start = opened.pop() if opened else None
            if start is not None:
                spans.append((start, token.start()))
        elif token[0][-1] == "{" and token[0] != "\\{":
            opened.append(token.end() if len(token[0]) > 1 else None)
    return sorted(spans)


def boxes_are_whole(text: str) -> bool:
    r"""Return whether every \boxed{...} is closed, and none is in another."""
    spans = boxes(text)
    apart = all(end < start for (_, end), (start, _) in pairwise(spans))
    return apart and len(spans) == len(_BOX.findall(text))
