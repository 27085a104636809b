"""What an environment answered, read and checked in our own process: it may have written anything."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpo_ext.environments.content import CURE, is_parts, medium, text_of
from grpo_ext.environments.protocol import Message
from grpo_ext.environments.session import InvalidResult
from grpo_ext.rewards.workers.worker import safe_repr

LONGEST = 2**20
"""Characters of an observation."""
LARGEST = 1e30
"""Reward, up or down, whose sums a float32 still holds."""


class Stepped(NamedTuple):
    """A checked answer to a turn."""

    observation: list[Message]
    reward: float | None
    done: bool
    afresh: bool
    calls: int
    refused: int


def opened(
    prompt: Sequence[Message], value: Mapping[str, Any], harmless: Callable[[Sequence[Message]], list[Message]]
) -> list[Message]:
    """The conversation that an attempt begins with: text goes behind the prompt's last message, as in TRL.

    Raises:
        InvalidResult: it is neither text nor messages, or there are images.
    """
    said = _as_text(value.get("opening"))
    if said is None or isinstance(said, str):
        for message in prompt:
            _require_text(message.get("content"), "the prompt has")
    if said is None:
        return list(prompt)
    if isinstance(said, str):
        [news] = harmless([{"content": said}])
        before, added = prompt[-1].get("content") or "", news["content"]
        content = [*before, {"type": "text", "text": added}] if isinstance(before, list) else f"{before}{added}"
        return [*prompt[:-1], {**prompt[-1], "content": content}]
    messages = _messages(said)
    if not messages:
        raise InvalidResult("no messages to begin with. Return None to begin with the prompt as it is.")
    return harmless(messages)


def stepped(value: Mapping[str, Any]) -> Stepped:
    """Raises InvalidResult where an answer to a turn is none."""
    said = value.get("observation")
    news = [] if said is None else _messages(said)
    done = value.get("done") is True
    if not done and not news:
        raise InvalidResult("no observation, and it is not done: the model would have nothing to answer. Return one.")
    counts = [value.get(name) for name in ("calls", "refused")]
    calls, refused = (count if isinstance(count, int) and abs(count) <= LONGEST else 0 for count in counts)
    return Stepped(news, _number(value.get("reward")), done, value.get("afresh") is True, calls, refused)


def worth(value: Mapping[str, Any]) -> float | None:
    """What an attempt earned beside its turns, by its environment's `get_reward`.

    Raises:
        InvalidResult: that is no number.
    """
    return _number(value.get("reward"))


def _messages(said: Any) -> list[Message]:
    said = _as_text(said)
    said = [{"role": "user", "content": said}] if isinstance(said, str) else said
    if isinstance(said, list):
        said = [{**m, "content": _as_text(m.get("content"))} if isinstance(m, dict) else m for m in said]
    if not isinstance(said, list) or not all(_is_message(message) for message in said):
        cure = "Return text, or [{'role': ..., 'content': ...}]."
        raise InvalidResult(f"{safe_repr(said)} is neither text nor messages. {cure}")
    if (length := sum(len(message["content"]) for message in said)) > LONGEST:
        raise InvalidResult(f"an observation of {length} characters; {LONGEST} are the most.")
    return said


def _as_text(content: Any) -> Any:
    """Content parts as their text, anything else as it is.

    Raises:
        InvalidResult: a part is not text.
    """
    _require_text(content, "it returned")
    return text_of(content) if is_parts(content) else content


def _require_text(content: Any, who: str) -> None:
    if (kind := medium(content)) is not None:
        raise InvalidResult(f"{who} content of type {kind!r}, and environments carry text only. {CURE}")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise InvalidResult(f"a reward of {safe_repr(value)}. Return a finite number or None.")
    return float(value)
