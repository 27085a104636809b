"""Render contexts with a chat template, keeping the ids that the policy sampled.

The whole conversation is rendered before every turn. If the text extends what the policy has read and written, only
the new part is tokenized and appended to the existing ids. If the template has rewritten earlier messages (thinking
stripped, a tool call formatted differently), the context is tokenized from its beginning and shares a prefix with the
turns before it. Control tokens come from the template or the sampler only: in other texts a space splits them.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar, cast

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from grpo_ext.config.images import described, images_in, in_parts
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
    """`ids` decoded, with control tokens in texts split by a space, and of each image what the template prints."""
    images: list[Any] = field(default_factory=list)
    """The images among `ids`, in order."""


class Renderer:
    """Renders conversations by one chat template.

    Args:
        processing: a tokenizer, or the processor of a model that takes images.
        options: of the template.
        obstacle: why conversations must not hold images; "" if they may.
    """

    def __init__(
        self, processing: PreTrainedTokenizerBase | ProcessorMixin, options: Mapping[str, Any], obstacle: str = ""
    ) -> None:
        self.tokenizer: Any = getattr(processing, "tokenizer", processing)
        self.options = dict(options)
        self._processor: Any = processing if hasattr(processing, "image_processor") else None
        self._name = self.tokenizer.name_or_path or "a tokenizer without a name"
        self._obstacle = obstacle if self._processor else f"{self._name} reads text only"
        self._controls = _control_tokens(self.tokenizer)
        """Ids and texts of control tokens, longer texts first."""

    def opening(self, messages: Sequence[Message], tools: list[dict] | None, most: int | None = None) -> Context:
        """Return the first context of a conversation, which may be refused if it has more than `most` tokens.

        Raises:
            CannotRender: the template does not take the messages, or omits one of them or its images.
            TooLong: it has far more than `most` tokens.
        """
        text, images = self._text(messages, tools), images_in(messages)
        self._require_rendered([], messages, tools)
        return Context(self._encoded(text, most, images), text, images)

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

        Three forms of the message are tried: the text as written, without space at its beginning, which some templates
        print themselves, and the parsed message, because some templates render a tool's answer only after a message
        with `tool_calls`. A form counts only if the template renders all of `news` after it. The first form whose text
        extends the conversation wins; if none does, the parsed form of a tool call, else the written form. `written`
        is given where the last token does not end the message.

        Raises:
            CannotRender: the template takes no form, or omits a message of `news`.
            TooLong: the context has far more than `most` tokens.
        """
        sampled_text = self.decoded(sampled)
        closing = self.decoded(sampled[-1:])
        written = written or {"role": "assistant", "content": sampled_text.removesuffix(closing)}
        begun = {**written, "content": (written.get("content") or "").lstrip()}
        rewritten: list[tuple[str, Message]] = []
        failure: CannotRender | None = None
        for message in (written, begun, self._split(parsed)):
            try:
                text = self._text([*history, message, *news], tools)
                self._require_rendered([*history, message], news, tools)
            except CannotRender as error:
                failure = error
                continue
            if text.startswith(before.text + sampled_text):
                suffix, images = text[len(before.text) + len(sampled_text) :], images_in(news)
                after = self._after(sampled[-1], closing, suffix, most, images)
                return Context([*before.ids, *sampled, *after], text, [*before.images, *images]), message
            rewritten.append((text, message))
        if not rewritten:
            assert failure is not None
            raise failure
        text, message = rewritten[-1 if parsed.get("tool_calls") else 0]
        if before.images or images_in(news):
            reason = "rewrites earlier messages, and a conversation with images is trained as one row"
            raise CannotRender(f"the chat template of {self._name} {reason}")
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
        """Raise CannotRender unless the template renders the texts and images of every message of `news`.

        Marks stand in for the texts: a template may trim or escape a text, but not a mark, and no mark is there by
        chance. Messages without text cannot lose any. An image is rendered if the text is another without it.
        """
        marks: dict[str, Message] = {}
        marked = [message if message.get("tool_calls") else _marked(message, marks) for message in news]
        text = self._text([*before, *marked], tools) if marks or images_in(news) else ""
        rendered = set(re.findall(r"observation\d+mark7c1f", text))
        lost = [message for mark, message in marks.items() if mark not in rendered]
        for number in (i for i, message in enumerate(news) if images_in([message])):
            others = [*marked[:number], _without_images(marked[number]), *marked[number + 1 :]]
            if self._text([*before, *others], tools) == text:
                lost.append(news[number])
        for message in lost:
            raise CannotRender(
                f"the chat template of {self._name} leaves out a message of role {message['role']!r:.80} "
                f"({described([message])[0]['content']!r:.80}), so the model would not read it"
            )

    def _text(self, messages: Sequence[Message], tools: list[dict] | None) -> str:
        if self._obstacle and images_in(messages):
            raise CannotRender(f"a message holds an image: {self._obstacle}")
        templates, messages = self._processor or self.tokenizer, list(messages)
        if self._processor:  # whose template may take parts only
            messages = list(map(in_parts, messages))
        try:
            text: str = templates.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=True, tokenize=False, **self.options
            )
        except Exception as error:  # a template may raise anything of its own
            roles = ", ".join(str(message.get("role")) for message in messages)
            reason = f"the chat template of {self._name} does not take {roles:.200} ({error!s:.1000})"
            raise CannotRender(reason) from error
        return text

    def _encoded(self, text: str, most: int | None = None, images: list[Any] | None = None) -> list[int]:
        if most is not None and len(text) > 8 * most and self._exceeds(text, 2 * most):
            raise TooLong(f"a text of {len(text):,} characters has more than {most:,} tokens")
        try:
            if images:
                [row] = self._processor(text=[text], images=[images], add_special_tokens=False)["input_ids"]
                return list(row)
            ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # half a surrogate pair, deep in a message; an image with a side of one pixel
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

    def _after(self, last: int, closing: str, suffix: str, most: int | None, images: list[Any]) -> list[int]:
        """Return the ids of a text that follows a token; some tokenizers encode the start of a text differently."""
        ids = self._encoded(closing + suffix, most, images)
        return ids[1:] if ids[:1] == [last] else self._encoded(suffix, images=images)


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, str]]:
    """Return ids and texts of all tokens that are marked as special, longer texts first.

    `all_special_tokens` lists only those with a name (eos_token, ...): not Llama 3's <|start_header_id|>.
    """
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return sorted((added | named).items(), key=lambda control: -len(control[1]))


def _marked(message: Message, marks: dict[str, Message]) -> Message:
    """Return a message with a mark for each text that a template must render; `marks` gets its message by each."""

    def marked(text: str) -> str:
        if not text.strip():
            return text
        mark = f"observation{len(marks)}mark7c1f"
        marks[mark] = message
        return mark

    content = message.get("content")
    if isinstance(content, list):
        parts = [{**part, "text": marked(part["text"])} if "text" in part else part for part in content]
        return {**message, "content": parts}
    return {**message, "content": marked(content)} if isinstance(content, str) else message


def _without_images(message: Message) -> Message:
    """Return a message with empty texts in the places of its images."""
    parts = in_parts(message).get("content") or []
    return {**message, "content": [{"type": "text", "text": part.get("text", "")} for part in parts]}
