"""Chat templates: that of a recipe, Jinja text or a file, and prompts rendered as training renders them."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_ext.data.messages import without_gaps
from grpo_ext.data.rows import Prompt
from grpo_ext.errors import Problem
from grpo_ext.rewards.columns import opened

_FILES = (".jinja", ".jinja2", ".j2")


def template_text(value: str) -> str:
    """Return the template itself."""
    return Path(value).expanduser().read_text(encoding="utf-8") if value.endswith(_FILES) else value


def template_problems(value: str) -> Iterator[Problem]:
    """Yield why a recipe's template cannot be read; whether it renders, `prompts.PromptCheck` finds."""
    try:
        text = template_text(value)
    except FileNotFoundError:
        yield Problem("chat_template", value, "no such file", "Paths count from the working directory.")
        return
    except (OSError, UnicodeDecodeError) as error:
        yield Problem("chat_template", value, f"cannot be read: {error}", "Name a text file.")
        return
    if "{{" not in text and "{%" not in text:
        shown = value if value.endswith(_FILES) else f"{' '.join(value.split())[:40]}..."
        cure = "Write Jinja text, or the path of a .jinja file; remove it for the tokenizer's own."
        yield Problem("chat_template", shown, "not Jinja, so every prompt would be the same text", cure)


def rendered(prompt: Prompt, tokenizer: Any, options: Mapping[str, Any]) -> str:
    """Return the text of a prompt as training tokenizes it; `options` are `chat_template_kwargs`."""
    if isinstance(prompt, str):
        return prompt
    text: str = tokenizer.apply_chat_template(
        without_gaps(prompt), add_generation_prompt=True, tokenize=False, **options
    )
    return text


def prompt_ids(prompt: Prompt, tokenizer: Any, options: Mapping[str, Any]) -> list[int]:
    """Return the tokens of a prompt as training makes them."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    encoded = tokenizer.apply_chat_template(
        without_gaps(prompt), add_generation_prompt=True, tokenize=True, return_dict=True, **options
    )
    return list(encoded["input_ids"])


def template_opens(tokenizer: Any, options: Mapping[str, Any]) -> str:
    """Return the tag of a layout that the template leaves open before a completion, with its white space, or "".

    A tokenizer that reads reasoning apart from the answer needs none.
    """
    if splits_reasoning(tokenizer):
        return ""
    for content in ("?", [{"type": "text", "text": "?"}]):
        with suppress(Exception):  # of the template; other checks report it
            return opened(rendered([{"role": "user", "content": content}], tokenizer, options))
    return ""


def splits_reasoning(tokenizer: Any) -> bool:
    """Return whether completions are parsed, as `parse_response` of TRL does, and not only decoded."""
    return any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema"))
