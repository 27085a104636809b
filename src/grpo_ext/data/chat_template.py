"""The chat template of a recipe: Jinja text or a file of it, and whether it renders."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_ext.errors import Problem

_FILES = (".jinja", ".jinja2", ".j2")
_TOKENS: dict[str, Any] = {"bos_token": "", "eos_token": "", "pad_token": "", "unk_token": ""}
_QUESTION, _SYSTEM = "What is 2 + 3?", "Answer with a number."


def template_text(value: str) -> str:
    """Return the template itself."""
    return Path(value).expanduser().read_text(encoding="utf-8") if value.endswith(_FILES) else value


def template_problems(value: str, *, with_system: bool = False) -> Iterator[Problem]:
    """Yield what is wrong with a template before any tokenizer is loaded: a question is rendered as training does.

    `with_system` puts a system message in front, as `system_prompt` does.
    """
    try:
        text = template_text(value)
    except FileNotFoundError:
        yield Problem("chat_template", value, "no such file", "Paths count from the working directory.")
        return
    except (OSError, UnicodeDecodeError) as error:
        yield Problem("chat_template", value, f"cannot be read: {error}", "Name a text file.")
        return
    shown = value if value.endswith(_FILES) else f"{' '.join(value.split())[:40]}..."
    if "{{" not in text and "{%" not in text:
        cure = "Write Jinja text, or the path of a .jinja file; remove it for the tokenizer's own."
        yield Problem("chat_template", shown, "not Jinja, so every prompt would be the same text", cure)
        return
    question, system = {"role": "user", "content": _QUESTION}, {"role": "system", "content": _SYSTEM}
    correct = "Correct the template."
    rendered = _rendered(text, [question])
    if isinstance(rendered, Exception):
        yield Problem("chat_template", shown, f"does not render: {type(rendered).__name__}: {rendered}", correct)
    elif _QUESTION not in rendered:
        yield Problem("chat_template", shown, "leaves the user's message out of the prompt", correct)
    elif with_system:
        rendered = _rendered(text, [system, question])
        if isinstance(rendered, Exception) or _SYSTEM not in rendered:
            why = f"refuses a system message: {rendered}" if isinstance(rendered, Exception) else "leaves it out"
            cure = f"{correct[:-1]}, or write the system prompt into the prompts."
            yield Problem("chat_template", shown, f"{why}, but system_prompt is set", cure)


def _rendered(text: str, messages: list[dict[str, str]]) -> str | Exception:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered: Any = render_jinja_template([messages], chat_template=text, add_generation_prompt=True, **_TOKENS)
    except Exception as error:  # a template may raise anything, by its own raise_exception too
        return error
    return str(rendered[0][0])  # the first of the texts, which precede the spans of the assistant's words
