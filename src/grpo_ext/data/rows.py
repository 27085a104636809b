"""One row of a dataset: the prompt as TRL takes it, the reference answer as a verifier takes it."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from grpo_ext.data.messages import arguments_of, read_arguments
from grpo_ext.errors import ABSENT, DataError, Problem
from grpo_ext.rewards.signatures import TRL_ARGUMENTS
from grpo_ext.safe_reading import parse_json

PROMPT_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("solution", "answer", "final_answer", "gold")
MAX_REPORTED = 5
LONGEST_PROMPT = 2**22
"""Most characters of a prompt: some million tokens."""
Row: TypeAlias = dict[str, Any]
Prompt: TypeAlias = str | list[Row]


class RowError(ValueError):
    """A row that cannot be used.

    Args:
        reason: what is wrong with it, with the value.
        cure: what to do.
        column: the column at fault; None: the row as a whole.
    """

    def __init__(self, reason: str, cure: str, column: str | None = None) -> None:
        super().__init__(reason, cure, column)
        self.reason, self.cure, self.column = reason, cure, column

    def at(self, place: str) -> Problem:
        """Return the problem, with the place of the row."""
        field = place if self.column is None else f"{place}, column {self.column!r}"
        return Problem(field, ABSENT, self.reason, self.cure)


def unusable(place: object, reason: str, cure: str) -> DataError:
    """Return the error for data that cannot be used."""
    return DataError([Problem(str(place), ABSENT, reason, cure)])


@dataclass(frozen=True)
class Plan:
    """Which columns become `prompt` and `solution`, and how."""

    prompt_column: str
    answer_column: str | None = None
    answer_format: str | None = None
    answer_required: bool = False
    system_prompt: str | None = None
    parses_prompt: bool = False
    """Whether the prompts are conversations written as JSON text."""

    @property
    def changes_prompt(self) -> bool:
        """Whether the column `prompt` is written."""
        return self.prompt_column != "prompt" or self.system_prompt is not None or self.parses_prompt

    @property
    def changes_answer(self) -> bool:
        """Whether the column `solution` is written."""
        return self.answer_column is not None and (self.answer_column != "solution" or self.answer_format is not None)

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        return [self.prompt_column, *([self.answer_column] if self.answer_column else [])]


def check_columns(names: Iterable[str]) -> list[Problem]:
    """Return a problem for each column that has the name of an argument that TRL gives to reward functions."""
    return [
        Problem(
            f"column {name!r}",
            ABSENT,
            f"TRL passes its own {name!r} to reward functions, so stock TRL crashes late or overwrites the column",
            f"Rename it, for example to 'dataset_{name}'.",
        )
        for name in names
        if name in TRL_ARGUMENTS
    ]


def convert(row: Row, plan: Plan) -> Row:
    """Return the columns of `row` that change under `plan`; a row in which none changes is checked too.

    Raises:
        RowError: the prompt or the answer of this row cannot be used.
    """
    changed: Row = {}
    prompt = parse_chat(row.get(plan.prompt_column), plan.prompt_column)
    check_prompt(prompt, plan.prompt_column)
    if plan.changes_prompt or prompt is not row.get(plan.prompt_column):
        changed["prompt"] = with_system_prompt(prompt, plan.system_prompt)
    if plan.answer_column is not None:
        answer = row.get(plan.answer_column)
        if isinstance(answer, float) and not math.isfinite(answer):
            cure = "Write null or text, or remove the row."
            raise RowError(f"{answer!r} is not an answer", cure, plan.answer_column)
        if plan.changes_answer or plan.answer_required:
            answer = extract_answer(answer, plan)
        if plan.changes_answer:
            changed["solution"] = answer
    return changed


_ROLES = ("system", "developer", "user", "assistant", "tool")
_CHAT_BEGINS = re.compile(r"""\s*\[\s*\{\s*['"](?:role|content)['"]\s*:""")
_ROLE_IN_CHAT = re.compile(rf"""['"]role['"]\s*:\s*['"](?:{"|".join(_ROLES)})['"]""")


def parse_chat(prompt: object, column: str) -> Any:
    """Return the messages of a conversation that is written as JSON text; any other prompt as it is.

    A list in JSON with an entry without one of the usual roles is text for the model to read.

    Raises:
        RowError: it is a conversation as Python prints it, or broken JSON.
    """
    if not isinstance(prompt, str) or not _looks_like_chat(prompt):
        return prompt
    try:
        messages = parse_json(prompt)
    except ValueError as error:
        raise RowError(
            f"{_short(prompt)} is a conversation written as text, but not as JSON ({error})",
            "Write it by json.dumps, or, where the model is to read this text, as the content of a message.",
            column,
        ) from None
    return messages if all(isinstance(m, dict) and m.get("role") in _ROLES for m in messages) else prompt


def _looks_like_chat(text: str) -> bool:
    """Return whether a text looks like a list of messages, in JSON or as Python prints it."""
    ends = text.rstrip().endswith("]")  # by itself: one pattern for all three would be quadratic in the text's length
    return ends and _CHAT_BEGINS.match(text) is not None and _ROLE_IN_CHAT.search(text) is not None


def check_prompt(prompt: object, column: str, *, continued: bool = False) -> None:
    """Refuse a prompt that is neither text nor a list of messages, or that is a conversation written as text.

    `continued`: an environment adds to the last message, whose text may be empty.

    Raises:
        RowError: empty, null, of another type, or a message without role or content.
    """
    fill = "Fill it in or remove the row."
    if (size := _size(prompt)) > LONGEST_PROMPT:
        reason = f"a prompt of {size:,} characters, and at most {LONGEST_PROMPT:,} are read"
        raise RowError(reason, "Shorten it or remove the row.", column)
    if prompt is None:
        raise RowError("null prompt", fill, column)
    if isinstance(prompt, str) and not prompt.strip():
        raise RowError(f"empty prompt {prompt!r}", fill, column)
    if isinstance(prompt, str):
        if parse_chat(prompt, column) is not prompt:
            raise RowError(
                f"{_short(prompt)} is a conversation written as JSON text",
                "Give the list itself, json.loads(text); where the model is to read this text, give it as the content "
                "of a message.",
                column,
            )
        return
    if not isinstance(prompt, list):
        raise RowError(f"{_short(prompt)} is neither text nor a list of messages", "Write it as a string.", column)
    if not prompt:
        raise RowError("empty list of messages []", fill, column)
    for number, message in enumerate(prompt, 1):
        _check_message(message, number, column, empty=continued and number == len(prompt))


def _size(prompt: object) -> int:
    """Return the number of characters of a prompt, with those of its messages and their parts."""
    if isinstance(prompt, str):
        return len(prompt)
    inside = prompt.values() if isinstance(prompt, dict) else prompt if isinstance(prompt, list) else ()
    return sum(map(_size, inside))


def _check_message(message: object, number: int, column: str, *, empty: bool) -> None:
    if not isinstance(message, dict):
        raise RowError(f"message {number} is {_short(message)}", "Write {'role': ..., 'content': ...}.", column)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        reason = f"message {number} has no 'role': {_short(message)}"
        raise RowError(reason, "Use system, user or assistant.", column)
    said = isinstance(content, str | list) and (content or (empty and content == ""))
    if not said and not message.get("tool_calls"):
        raise RowError(f"message {number} ({role}) has no 'content': {_short(message)}", "Fill it in.", column)
    for arguments in map(arguments_of, message.get("tool_calls") or ()):
        if isinstance(arguments, str) and read_arguments(arguments) is None:
            reason = f"the arguments of a call in message {number} ({role}) are no JSON object: {_short(arguments)}"
            raise RowError(reason, 'Write {"name": value}, as an object or as JSON text.', column)


def with_system_prompt(prompt: Prompt, system_prompt: str | None) -> list[Row]:
    """Conversational form of `prompt`, opened by `system_prompt` unless the conversation has a system message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system_prompt is None or any(message["role"] in ("system", "developer") for message in messages):
        return messages
    if isinstance(messages[0].get("content"), list):  # one column has one type: content parts stay content parts
        return [{"role": "system", "content": [{"type": "text", "text": system_prompt}]}, *messages]
    return [{"role": "system", "content": system_prompt}, *messages]


def extract_answer(value: object, plan: Plan) -> object:
    """Reference answer under the plan's `answer_format`; numbers become text, null stays null where that is allowed.

    Raises:
        RowError: a required answer is missing, or the format does not match it.
    """
    column = plan.answer_column or "solution"
    if value is None or (isinstance(value, str) and not value.strip()):
        if plan.answer_required:
            raise RowError(f"missing answer ({value!r})", "Fill it in or remove the row.", column)
        return None
    if type(value) is float and value.is_integer():
        value = int(value)  # a gap in a column of integers turns the others into floats
    if isinstance(value, int | float):
        value = str(value)
    if plan.answer_format is None:
        return value
    if not isinstance(value, str):
        reason = f"{_short(value)} is not text, as answer_format={plan.answer_format!r} needs"
        raise RowError(reason, "Unset answer_format.", column)
    return ANSWER_FORMATS[plan.answer_format](value, column)


def gsm8k_answer(text: str, column: str = "answer") -> str:
    """Text after the last `####`, thousands separators removed from a number.

    Raises:
        RowError: the text has no `####`, or ends with it.
    """
    _, mark, answer = text.rpartition("####")
    answer = answer.strip()
    if not mark or not answer:
        reason = f"no text after '####' in {_short(text)}, as answer_format='gsm8k' needs"
        raise RowError(reason, "Add it or unset answer_format.", column)
    return answer.replace(",", "") if re.fullmatch(r"-?\$?\d{1,3}(,\d{3})+(\.\d+)?", answer) else answer


def boxed_answer(text: str, column: str = "answer") -> str:
    r"""Content of the last \boxed{...}, with balanced braces.

    Raises:
        RowError: the text has no such box, or the box is empty or never closed.
    """
    _, mark, tail = text.rpartition("\\boxed{")
    depth = 1
    for position, character in enumerate(tail if mark else ""):
        escaped = position > 0 and tail[position - 1] == "\\"
        depth += 0 if escaped else {"{": 1, "}": -1}.get(character, 0)
        if depth == 0 and tail[:position].strip():
            return tail[:position].strip()
        if depth == 0:
            break
    reason = f"no filled \\boxed{{...}} in {_short(text)}, as answer_format='boxed' needs"
    raise RowError(reason, "Add it or unset answer_format.", column)


ANSWER_FORMATS: Mapping[str, Callable[[str, str], str]] = {"gsm8k": gsm8k_answer, "boxed": boxed_answer}
WRITTEN = {"gsm8k": "#### {}", "boxed": "\\boxed{{{}}}"}
"""Text from which the format of that name reads an answer."""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:50]} ... {text[-25:]}"
