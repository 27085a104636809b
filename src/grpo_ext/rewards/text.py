"""The text of a completion and the marks in it: tags, boxes."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
Completion: TypeAlias = str | Sequence[Message]

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# Innermost block, so that a second <answer> opened inside the first does not drag its own tag into the content.
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")


def completion_text(completion: Completion) -> str:
    """Text of a completion: the string itself, or the content of the last assistant message ("" without one).

    A message without a role counts as the assistant's, as in TRL's examples; text blocks of a content are joined.
    """
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            return content_text(message.get("content"))
    return ""


def content_text(content: Any) -> str:
    """Text of a message's content: itself, its text blocks joined, "" for None."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(b if isinstance(b, str) else b.get("text") or "" for b in content)


def answer_block(text: str) -> str | None:
    """Content of the last `<answer>...</answer>`, stripped, or None without one."""
    blocks = _ANSWER.findall(text)
    return blocks[-1].strip() if blocks else None


def boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...} (or \fbox{...}) whose braces balance, stripped, or None without one."""
    spans = boxes(text)
    return text[slice(*spans[-1])].strip() if spans else None


def boxes(text: str) -> list[tuple[int, int]]:
    r"""Where the contents of each \boxed{...} (or \fbox{...}) whose braces balance begin and end, in order."""
    opened: list[int | None] = []  # where the content of each open brace starts, None for a brace that is no box
    found = []
    for token in _BRACE.finditer(text):
        if token[0] == "}":
            start = opened.pop() if opened else None
            if start is not None:
                found.append((start, token.start()))
        elif token[0][-1] == "{" and token[0] != "\\{":
            opened.append(token.end() if len(token[0]) > 1 else None)
    return sorted(found)


def each_once(text: str, tags: Sequence[str]) -> bool:
    """Whether each tag occurs exactly once, which a regular expression over the whole text does not ensure."""
    return all(text.count(tag) == 1 for tag in tags)
