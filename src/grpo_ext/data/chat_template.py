"""The chat template of a recipe: Jinja text or a file of it, and whether it renders."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILES = (".jinja", ".jinja2", ".j2")
_TOKENS: dict[str, Any] = {"bos_token": "", "eos_token": "", "pad_token": "", "unk_token": ""}
_QUESTION, _SYSTEM = "What is 2 + 3?", "Answer with a number."


def template_text(value: str) -> str:
    """The template itself."""
    return _path(value).read_text(encoding="utf-8") if value.endswith(_FILES) else value


def _path(value: str) -> Path:
    return Path(value).expanduser()


def problems(value: str, *, with_system: bool = False) -> Iterator[str]:
    """What is wrong with a template before any tokenizer is loaded: it is rendered on a question as training does.

    `with_system` puts a system message in front, as `system_prompt` does.
    """
    if value.endswith(_FILES) and not _path(value).is_file():
        yield f"chat_template={value!r}: no such file. Paths count from the working directory."
        return
    shown = value if value.endswith(_FILES) else f"{' '.join(value.split())[:40]}..."
    try:
        text = template_text(value)
    except (OSError, UnicodeDecodeError) as error:
        yield f"chat_template={value!r} cannot be read: {error}."
        return
    if "{{" not in text and "{%" not in text:
        cure = "Write Jinja text, or the path of a .jinja file; remove it for the tokenizer's own."
        yield f"chat_template={shown!r}: no Jinja, so every prompt would be the same text. {cure}"
        return
    question, system = {"role": "user", "content": _QUESTION}, {"role": "system", "content": _SYSTEM}
    rendered = _rendered(text, [question])
    if isinstance(rendered, Exception):
        yield f"chat_template={shown!r} does not render: {type(rendered).__name__}: {rendered}. Correct the template."
    elif _QUESTION not in rendered:
        yield f"chat_template={shown!r} leaves the user's message out of the prompt. Correct the template."
    elif with_system:
        rendered = _rendered(text, [system, question])
        if isinstance(rendered, Exception) or _SYSTEM not in rendered:
            why = f"refuses a system message: {rendered}" if isinstance(rendered, Exception) else "leaves it out"
            yield (
                f"chat_template={shown!r} {why}, but system_prompt is set. Correct the template, or write the system "
                "prompt into the prompts."
            )


def _rendered(text: str, messages: list[dict[str, str]]) -> str | Exception:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered: Any = render_jinja_template([messages], chat_template=text, add_generation_prompt=True, **_TOKENS)
    except Exception as error:  # a template may raise anything, by its own raise_exception too
        return error
    return str(rendered[0][0])  # of the texts, and the places of the assistant's words, the first text
