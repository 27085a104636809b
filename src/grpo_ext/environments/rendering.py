"""Contexts as a chat template renders them, in which what the policy sampled stays the ids that it sampled.

A conversation's text is rendered whole before every turn. Where it goes on from what the policy saw and said, only
what follows is tokenised, and put behind the ids that there are; where the template has rewritten what was before
(thinking stripped, a call of a tool spelt anew), the context is tokenised from its beginning, and shares with the
turns before it what it shares.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_ext.environments.protocol import Message

logger = logging.getLogger(__name__)


class CannotRender(ValueError):
    """A chat template that does not take a conversation; the message names it."""


@dataclass(frozen=True)
class Context:
    """What the policy sees before a turn."""

    ids: list[int]
    text: str


class Renderer:
    """Renders conversations by one tokenizer's chat template.

    Args:
        tokenizer: the policy's.
        options: `chat_template_kwargs`.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        """Nothing is rendered yet."""
        self.tokenizer, self.options = tokenizer, dict(options)
        self._name = tokenizer.name_or_path or "a tokenizer without a name"
        self._specials = sorted(set(tokenizer.all_special_tokens), key=len, reverse=True)

    def opening(self, messages: Sequence[Message], tools: list[dict] | None) -> Context:
        """The first context of a conversation.

        Raises:
            CannotRender: the template does not take it.
        """
        text = self._text(messages, tools)
        return Context(self._encoded(text), text)

    def following(
        self,
        before: Context,
        sampled: list[int],
        history: Sequence[Message],
        parsed: Message,
        news: Sequence[Message],
        tools: list[dict] | None,
    ) -> tuple[Context, Message]:
        """The context after a turn that the policy has ended, and its message as the history has it from now on.

        The message is tried as it was written, then as it was parsed: some templates need the call of a tool to render
        the answer to it.

        Raises:
            CannotRender: the template takes neither.
        """
        said = self.tokenizer.decode(sampled, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        closing = self.tokenizer.decode(sampled[-1:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        written = {"role": "assistant", "content": said.removesuffix(closing)}
        rewritten: tuple[Context, Message] | None = None
        failure: CannotRender | None = None
        for message in (written, parsed):
            try:
                text = self._text([*history, message, *news], tools)
            except CannotRender as error:
                failure = error
                continue
            if text.startswith(before.text + said):
                suffix = text[len(before.text) + len(said) :]
                return Context([*before.ids, *sampled, *self._after(sampled[-1], closing, suffix)], text), message
            rewritten = rewritten or (Context(self._encoded(text), text), message)
        if rewritten is None:
            assert failure is not None
            raise failure
        return rewritten

    def harmless(self, messages: Sequence[Message]) -> list[Message]:
        """What an environment says, in which the text of a special token is text: a space parts it."""
        return [{key: self._parted(value) for key, value in message.items()} for message in messages]

    def _parted(self, value: Any) -> Any:
        if isinstance(value, str):
            value = value.encode("utf-8", "replace").decode()  # half a surrogate pair is no text
            for special in self._specials:
                if len(special) > 1:
                    value = value.replace(special, f"{special[0]} {special[1:]}")
        return value

    def _text(self, messages: Sequence[Message], tools: list[dict] | None) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tools=tools or None, add_generation_prompt=True, tokenize=False, **self.options
            )
        except Exception as error:  # a template may raise anything of its own
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise CannotRender(f"the chat template of {self._name} does not take {roles} ({error})") from error
        return text

    def _encoded(self, text: str) -> list[int]:
        try:
            ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # half a surrogate pair, deep in a message
            raise CannotRender(f"the tokenizer of {self._name} does not take the text ({error})") from error
        return ids

    def _after(self, last: int, closing: str, suffix: str) -> list[int]:
        """Ids of a text behind a token; some tokenizers begin a text otherwise than they go on with it."""
        ids = self._encoded(closing + suffix)
        return ids[1:] if ids[:1] == [last] else self._encoded(suffix)
