"""Check an environment's answers in the training process; the environment may have sent anything."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from PIL import Image

from grpo_ext.config.images import in_parts
from grpo_ext.environments.protocol import IMAGE, PARTS_CURE, Message, is_parts, is_text, parts_text
from grpo_ext.environments.session import PNG, InvalidResult, require_known
from grpo_ext.rewards.workers.worker import safe_repr

LONGEST = 2**20
"""Most characters of an observation."""
LARGEST_REWARD = 1e30
"""Largest absolute reward; sums of such rewards still fit into a float32."""


class CheckedStep(NamedTuple):
    """A checked answer to a turn."""

    observation: list[Message]
    reward: float | None
    done: bool
    afresh: bool
    calls: int
    refused: int


def opened(
    prompt: Sequence[Message], answer: Mapping[str, object], harmless: Callable[[Sequence[Message]], list[Message]]
) -> list[Message]:
    """Return the conversation that an episode begins with; text is appended to the prompt's last message, as in TRL.

    Raises:
        InvalidResult: the answer is neither text nor messages.
    """
    opening = _content(_with_part(answer.get("opening")))
    if opening is None or isinstance(opening, str) or is_parts(opening):
        for message in prompt:
            require_known(message.get("content"), "the prompt has")
    if opening is None:
        return list(prompt)
    if isinstance(opening, str) or is_parts(opening):
        [addition] = harmless([{"content": opening}])
        before, added = prompt[-1].get("content") or "", addition["content"]
        if isinstance(before, str) and isinstance(added, str):
            return [*prompt[:-1], {**prompt[-1], "content": f"{before}{added}"}]
        both = [part for content in (before, added) for part in in_parts({"content": content})["content"]]
        return [*prompt[:-1], {**prompt[-1], "content": both}]
    messages = _messages(opening)
    if not messages:
        raise InvalidResult("no messages to begin with. Return None to begin with the prompt as it is.")
    return harmless(messages)


def stepped(answer: Mapping[str, object]) -> CheckedStep:
    """Return a checked answer to a turn.

    Raises:
        InvalidResult: it is not an answer.
    """
    observation = answer.get("observation")
    messages = [] if observation is None else _messages(observation)
    done = answer.get("done") is True
    if not done and not messages:
        raise InvalidResult("no observation, and it is not done: the model would have nothing to answer. Return one.")
    counts = [answer.get(name) for name in ("calls", "refused")]
    calls, refused = (count if isinstance(count, int) and abs(count) <= LONGEST else 0 for count in counts)
    return CheckedStep(messages, final_reward(answer), done, answer.get("afresh") is True, calls, refused)


def final_reward(answer: Mapping[str, object]) -> float | None:
    """Return the reward of an answer.

    Raises:
        InvalidResult: it is not a number.
    """
    value = answer.get("reward")
    if value is None:
        return None
    if not isinstance(value, int | float) or not abs(value) <= LARGEST_REWARD:
        raise InvalidResult(f"a reward of {safe_repr(value)}. Return a finite number or None.")
    return float(value)


def _messages(observation: object) -> list[Message]:
    messages = _with_part(observation)
    if isinstance(messages, str) or is_parts(messages):
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, list):
        messages = [{**m, "content": _content(m.get("content"))} if isinstance(m, dict) else m for m in messages]
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        cure = "Return text, or [{'role': ..., 'content': ...}]."
        raise InvalidResult(f"{safe_repr(messages)} is neither text nor messages. {cure}")
    texts = [part.get("text", "") for message in messages for part in in_parts(message)["content"]]
    if (length := sum(map(len, texts))) > LONGEST:
        raise InvalidResult(f"an observation of {length} characters; {LONGEST} are the most.")
    return messages


def _is_message(message: object) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), str) or is_parts(message.get("content"))


def _with_part(value: object) -> object:
    """Return an image that came by itself as a list with its part, any other value unchanged."""
    return [{"type": IMAGE, IMAGE: value}] if isinstance(value, dict) and PNG in value else value


def _content(content: Any) -> Any:
    """Return content parts with their images opened, as text if they are text, any other value unchanged."""
    require_known(content, "it returned")
    if not is_parts(content):
        return content
    return parts_text(content) if is_text(content) else [_opened(part) for part in content]


def _opened(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part with its image, which `session.encoded` has made a PNG."""
    if part["type"] != IMAGE:
        return part
    try:
        image = Image.open(io.BytesIO(base64.b64decode(part[IMAGE][PNG])), formats=["PNG"])
        image.load()
    except Exception:  # the environment may have sent anything
        raise InvalidResult(f"{safe_repr(part)} holds no image. {PARTS_CURE}") from None
    return {"type": IMAGE, IMAGE: image}
