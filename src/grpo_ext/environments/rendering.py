"""Render contexts with a chat template, keeping the ids that the policy sampled.

The whole conversation is rendered before every turn. If the text extends what the policy has read and written, only
the new part is tokenized and appended to the existing ids. If the template has rewritten earlier messages (thinking
stripped, a tool call formatted differently), the context is tokenized from its beginning and shares a prefix with the
turns before it. Control tokens come from the template or the sampler only: in other texts a space splits them.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar, cast

from transformers import PreTrainedTokenizerBase

from grpo_ext.environments.protocol import Message

T = TypeVar("T")


_PIECE, _SEAM = 2**16, 64
"""Characters of a piece of a long text, and tokens by which cutting it out may change their number."""


class CannotRender(ValueError):
    """A chat template does not take a conversation or omits a part of it; the message names the template."""


class TooLong(CannotRender):
    """A text has more tokens than can fit."""


@dataclass(frozen=True)
class Context:
    """The policy's input before a turn."""

    ids: list[int]
    text: str
    """`ids` decoded, with control tokens in texts split by a space."""


class Renderer:
    """Renders conversations by one tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
        self.tokenizer: Any = tokenizer
        self.options = dict(options)
        self._name = tokenizer.name_or_path or "a tokenizer without a name"
        self._controls = _control_tokens(tokenizer)
        """Ids and texts of control tokens, longer texts first."""

    def opening(self, messages: Sequence[Message], tools: list[dict] | None, most: int | None = None) -> Context:
        """Return the first context of a conversation, which may be refused if it has more than `most` tokens.

        Raises:
            CannotRender: the template does not take the messages, or omits one of them.
            TooLong: it has far more than `most` tokens.
        """
        text = self._text(messages, tools)
        self._require_rendered([], messages, tools)
        return Context(self._encoded(text, most), text)

    def following(
        self,
        before: Context,
        sampled: list[int],
        history: Sequence[Message],
        parsed: Message,
        news: Sequence[Message],
        tools: list[dict] | None,
        written: Message | None = None,
        most: int | None = None,
    ) -> tuple[Context, Message]:
        """Return the context after a finished turn, and the policy's message as the history keeps it.

        Two forms of the message are tried: the text as written, then the parsed message, because some templates render
        a tool's answer only after a message with `tool_calls`. A form counts only if the template renders all of
        `news` after it. The first form whose text extends the conversation wins; if neither does, the parsed form of
        a tool call, else the written form. `written` is given where the last token does not end the message.

        Raises:
            CannotRender: the template takes neither form, or omits a message of `news`.
            TooLong: the context has far more than `most` tokens.
        """
        sampled_text = self.decoded(sampled)
        closing = self.decoded(sampled[-1:])
        written = written or {"role": "assistant", "content": sampled_text.removesuffix(closing)}
        rewritten: list[tuple[str, Message]] = []
        failure: CannotRender | None = None
        for message in (written, self._split(parsed)):
            try:
                text = self._text([*history, message, *news], tools)
                self._require_rendered([*history, message], news, tools)
            except CannotRender as error:
                failure = error
                continue
            if text.startswith(before.text + sampled_text):
                suffix = text[len(before.text) + len(sampled_text) :]
                return Context(
                    [*before.ids, *sampled, *self._after(sampled[-1], closing, suffix, most)], text
                ), message
            rewritten.append((text, message))
        if not rewritten:
            assert failure is not None
            raise failure
        text, message = rewritten[-1 if parsed.get("tool_calls") else 0]
        return Context(self._encoded(text, most), text), message

    def harmless(self, messages: Sequence[Message]) -> list[Message]:
        """Return an environment's messages with a space in every control token in their text."""
        return [self._split(message) for message in messages]

    def _split(self, value: T) -> T:
        clean: Any = value
        if isinstance(value, str):
            clean = value.encode("utf-8", "replace").decode()  # half a surrogate pair is not text
            for _, control in self._controls:
                if len(control) > 1:
                    clean = clean.replace(control, f"{control[0]} {control[1:]}")
        elif isinstance(value, dict):
            clean = {self._split(key): self._split(part) for key, part in value.items()}
        elif isinstance(value, list):
            clean = [self._split(part) for part in value]
        return cast(T, clean)

    def decoded(self, ids: list[int]) -> str:
        """Return sampled ids as text: control tokens as they are, texts that look like one split by a space."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        counts = Counter(ids)
        if all(text.count(control) == counts[number] for number, control in self._controls):
            return text
        controls = dict(self._controls)
        runs = (
            (control, self.tokenizer.decode(list(run), clean_up_tokenization_spaces=False))
            for control, run in groupby(ids, key=controls.__contains__)
        )
        return "".join(text if control else self._split(text) for control, text in runs)

    def _require_rendered(self, before: Sequence[Message], news: Sequence[Message], tools: list[dict] | None) -> None:
        """Raise CannotRender unless the template renders the text of every message of `news` after `before`.

        Marks stand in for the texts: a template may trim or escape a text, but not a mark, and no mark is there by
        chance. Messages without text cannot lose any.
        """
        marks = {number: f"observation{number}mark7c1f" for number, message in enumerate(news) if _has_text(message)}
        marked = [{**m, "content": marks[i]} if i in marks else m for i, m in enumerate(news)]
        text = self._text([*before, *marked], tools) if marks else ""
        rendered = set(re.findall(r"observation\d+mark7c1f", text))
        for number, mark in marks.items():
            if mark not in rendered:
                lost = news[number]
                raise CannotRender(
                    f"the chat template of {self._name} leaves out a message of role {lost['role']!r:.80} "
                    f"({lost['content']!r:.80}), so the model would not read it"
                )

    def _text(self, messages: Sequence[Message], tools: list[dict] | None) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tools=tools or None, add_generation_prompt=True, tokenize=False, **self.options
            )
        except Exception as error:  # a template may raise anything of its own
            roles = ", ".join(str(message.get("role")) for message in messages)
            reason = f"the chat template of {self._name} does not take {roles:.200} ({error!s:.1000})"
            raise CannotRender(reason) from error
        return text

    def _encoded(self, text: str, most: int | None = None) -> list[int]:
        if most is not None and len(text) > 8 * most and self._exceeds(text, 2 * most):
            raise TooLong(f"a text of {len(text):,} characters has more than {most:,} tokens")
        try:
            ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # half a surrogate pair, deep in a message
            raise CannotRender(f"the tokenizer of {self._name} does not take the text ({error!s:.1000})") from error
        return ids

    def _exceeds(self, text: str, most: int) -> bool:
        """Return whether a text has more than `most` tokens; no more of it is read than shows that.

        Its pieces have at most `_SEAM` tokens more than it has there, whatever the tokenizer: no vocabulary is asked.
        """
        for start in range(0, len(text), _PIECE):
            most -= max(0, len(self._encoded(text[start : start + _PIECE])) - _SEAM)
            if most < 0:
                return True
        return False

    def _after(self, last: int, closing: str, suffix: str, most: int | None) -> list[int]:
        """Return the ids of a text that follows a token; some tokenizers encode the start of a text differently."""
        ids = self._encoded(closing + suffix, most)
        return ids[1:] if ids[:1] == [last] else self._encoded(suffix)


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, str]]:
    """Return ids and texts of all tokens that are marked as special, longer texts first.

    `all_special_tokens` lists only those with a name (eos_token, ...): not Llama 3's <|start_header_id|>.
    """
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return sorted((added | named).items(), key=lambda control: -len(control[1]))


def _has_text(message: Message) -> bool:
    """Return whether a template must render the text; it may omit text beside a tool call."""
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip()) and not message.get("tool_calls")
