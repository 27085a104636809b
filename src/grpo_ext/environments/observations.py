"""Check an environment's answers in the training process; the environment may have sent anything."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from grpo_ext.environments.protocol import Message, is_parts, parts_text
from grpo_ext.environments.session import InvalidResult, require_text
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
        InvalidResult: the answer is neither text nor messages, or there are images.
    """
    opening = _as_text(answer.get("opening"))
    if opening is None or isinstance(opening, str):
        for message in prompt:
            require_text(message.get("content"), "the prompt has")
    if opening is None:
        return list(prompt)
    if isinstance(opening, str):
        [addition] = harmless([{"content": opening}])
        before, added = prompt[-1].get("content") or "", addition["content"]
        content = [*before, {"type": "text", "text": added}] if isinstance(before, list) else f"{before}{added}"
        return [*prompt[:-1], {**prompt[-1], "content": content}]
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
    messages = _as_text(observation)
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if isinstance(messages, list):
        messages = [{**m, "content": _as_text(m.get("content"))} if isinstance(m, dict) else m for m in messages]
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in messages
    ):
        cure = "Return text, or [{'role': ..., 'content': ...}]."
        raise InvalidResult(f"{safe_repr(messages)} is neither text nor messages. {cure}")
    if (length := sum(len(message["content"]) for message in messages)) > LONGEST:
        raise InvalidResult(f"an observation of {length} characters; {LONGEST} are the most.")
    return messages


def _as_text(content: object) -> object:
    """Return content parts as their text, any other value unchanged."""
    require_text(content, "it returned")
    return parts_text(content) if isinstance(content, list) and is_parts(content) else content
