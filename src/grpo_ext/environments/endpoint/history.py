"""The context of each request of an episode: it extends the finished turn whose conversation the request continues.

An agent sends a whole conversation each time. The turn whose messages and answer are the longest prefix of it keeps
its sampled ids, as far as the chat template's text extends them. Any other conversation (a branch, a summary, a
sub-agent, thinking that was removed) is rendered from its beginning; the tree of the trajectory finds what it shares.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from grpo_ext.environments.endpoint.requests import ChatRequest, calls_of, thinking_of
from grpo_ext.environments.protocol import Message
from grpo_ext.environments.rendering import Context, Renderer
from grpo_ext.objective.trajectory import common
from grpo_ext.rewards.text import conversation_text

Key: TypeAlias = str
"""Role, thinking, text and calls of a message; messages with equal keys are the same."""


class Opened(NamedTuple):
    """The context of a request, and its messages as the chat template has read them."""

    context: Context
    history: list[Message]


@dataclass(frozen=True)
class Finished:
    """A finished turn."""

    keys: list[Key]
    """Keys of the request's messages and of the answer."""
    messages: list[Message]
    """The request's messages."""
    opened: Opened
    sampled: list[int]
    parsed: Message
    written: Message | None
    """The message as text, where it did not end by itself."""


def key_of(message: Message) -> Key:
    """Return what makes a message the same as another; ids of calls and white space around texts do not."""
    text = str(message.get("content") or "").strip()
    return json.dumps([message["role"], thinking_of(message).strip(), text, calls_of(message)], sort_keys=True)


def continued(keys: Sequence[Key], finished: Sequence[Finished]) -> Finished | None:
    """Return the turn that is the longest prefix of a conversation, the last of equal ones; None if none is."""
    prefixes = [turn for turn in finished if keys[: len(turn.keys)] == turn.keys]
    return max(reversed(prefixes), key=lambda turn: len(turn.keys), default=None)


class History:
    """The finished turns of one episode.

    Args:
        renderer: renders contexts.
        most: tokens that a context can have.
    """

    def __init__(self, renderer: Renderer, most: int | None = None) -> None:
        self._most = most
        self._renderer, self._finished, self._read = renderer, list[Finished](), list[list[int]]()

    def opened(self, request: ChatRequest) -> Opened:
        """Return the context of a request.

        Raises:
            CannotRender: the chat template does not take the conversation, or leaves out a part.
            TooLong: the context has more tokens than it can have.
        """
        turn = continued(keys_of(request), self._finished)
        tools = None if request.tools is None else self._renderer.harmless(request.tools)
        if turn is None:
            messages = self._renderer.harmless(request.messages)
            return Opened(self._renderer.opening(messages, tools, self._most), messages)
        before, news = turn.opened, self._renderer.harmless(request.messages[len(turn.keys) :])
        context, message = self._renderer.following(
            before.context, turn.sampled, before.history, turn.parsed, news, tools, turn.written, self._most
        )
        return Opened(context, [*before.history, message, *news])

    def add(self, turn: Finished) -> None:
        """Keep a finished turn."""
        self._finished.append(turn)

    def note(self, context: list[int]) -> None:
        """Keep the context of a request that will be answered."""
        self._read.append(context)

    def new_tokens(self, context: list[int]) -> int:
        """Return how many tokens of a context neither a finished turn nor another context has; 0 for the first."""
        read = [(ids, list[int]()) for ids in self._read]
        seen, shared = [*read, *((turn.opened.context.ids, turn.sampled) for turn in self._finished)], 0
        for ids, sampled in reversed(seen):  # the last is the longest, mostly
            if len(ids) + len(sampled) > shared:
                shared = max(shared, common([*ids, *sampled], context))
        return len(context) - shared if seen else 0

    @property
    def opening(self) -> list[Message]:
        """Messages of the first request, which are the prompt."""
        return self._renderer.harmless(self._finished[0].messages) if self._finished else []

    @property
    def messages(self) -> list[Message]:
        """Messages of the last conversation behind what it shares with the opening, with the model's last answer."""
        if not self._finished:
            return []
        opening, last = self.opening, self._finished[-1]
        conversation = self._renderer.harmless(last.messages)
        shared = next((i for i, (a, b) in enumerate(zip(conversation, opening, strict=False)) if a != b), len(opening))
        return [*conversation[shared:], last.parsed]

    @property
    def branches(self) -> str:
        """Conversations that the last one does not have, as text, each from where it leaves one that is shown."""
        shown, texts = list[Finished](), list[str]()
        for turn in reversed(self._finished):
            number, shared = max(
                ((i, common(turn.keys, other.keys)) for i, other in enumerate(shown)),
                key=lambda branch: branch[1],
                default=(0, 0),
            )
            if shared == len(turn.keys):
                continue
            messages = [*self._renderer.harmless(turn.messages), turn.parsed][shared:]
            of = f"branch {number}" if number else "prompt and completion"
            texts.append(
                f"--- branch {len(shown)}: after message {shared} of {of} ---\n\n{conversation_text(messages)}"
            )
            shown.append(turn)
        return "\n\n".join(texts[1:])


def keys_of(request: ChatRequest) -> list[Key]:
    """Return the keys of a request's messages."""
    return [key_of(message) for message in request.messages]
