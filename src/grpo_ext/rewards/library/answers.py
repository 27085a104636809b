"""Rewards for answers with one correct form: a string, a letter, a JSON document."""

import json
import logging
import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from grpo_ext.rewards.protocol import OptionError, rewards
from grpo_ext.rewards.text import Completion, answer_block, boxed, completion_text

logger = logging.getLogger(__name__)

_JSON_BLOCK = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
# {0} is the class of letters, {1} its lower case, which counts only where it cannot be the article of "a dog".
# "answer is (B)", "Answer: **B**", "option B": a letter by itself
_NAMED = (
    r"(?i:answer|option|choice)(?i:\s+is)?[:=*_$\s(\[]*+(?:\\text\w*\{{)?\(?"
    r"([{0}](?![\w'])|[{1}](?=[).:\]}}*$]|\s*\Z))"
)
# "B", "(B)", "B) text", "**B.** text"
_OPENING = r"[*_$\s]*(?:\\text\w*\{{)?(?:\(([{0}{1}])\)|\[([{0}{1}])\]|([{0}{1}])(?=[).:}}*$]|\s*\Z))"
_SECOND = r"[)\]}}*$.:\s]*(?i:,|;|/|&|\band\b|\bor\b)\s*(?i:option\s+)?(?:\(?[{0}](?![\w'])|\([{1}]\))"


def final_answer(text: str) -> str:
    """Return the text after the last `</think>`, or the content of its last `<answer>` if there is one, stripped."""
    answer = text.rpartition("</think>")[2]
    block = answer_block(answer)
    return answer.strip() if block is None else block


@rewards.register("exact_match", independent=True)
def exact_match(
    completions: list[Completion],
    solution: list[Any],
    *,
    strip: bool = True,
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    **_: object,
) -> list[float | None]:
    """1.0 where the answer (see `final_answer`) is `solution`, character by character in Unicode NFC, else 0.0.

    `strip` joins runs of white space and drops it at both ends; `ignore_case` folds case; `ignore_punctuation` drops
    every character of a punctuation category. None: no solution, or it becomes empty.
    """

    def normal(text: str) -> str:
        text = unicodedata.normalize("NFC", text.casefold() if ignore_case else text)
        if ignore_punctuation:
            text = "".join(c for c in text if not unicodedata.category(c).startswith("P"))
        return " ".join(text.split()) if strip else text

    golds = [None if gold is None else normal(str(gold)) for gold in solution]
    return [
        float(normal(final_answer(completion_text(completion))) == gold) if gold else None
        for completion, gold in zip(completions, golds, strict=True)
    ]


@rewards.register("multiple_choice", independent=True)
def multiple_choice(
    completions: list[Completion], solution: list[str | None], *, choices: str = "ABCDE", **_: object
) -> list[float | None]:
    r"""1.0 where the answer's letter is `solution`'s, else 0.0; None where `solution` is not a single letter.

    Read in this order: \boxed{B}, the last "answer is (B)" / "Answer: B" / "option B", an answer or a last line that
    starts with "B", "(B)", "B) text". Two letters ("A and B") are wrong, and so is an answer without a letter.

    Raises:
        ValueError: choices are not distinct letters.
    """
    if not choices.isalpha() or len(set(choices.upper())) != len(choices):
        raise OptionError("choices", choices, "not distinct letters", "Write them like ABCD.")
    golds = [choice(str(gold or ""), choices) for gold in solution]
    return [
        None if gold is None else float(choice(final_answer(completion_text(completion)), choices) == gold)
        for completion, gold in zip(completions, golds, strict=True)
    ]


def choice(text: str, choices: str = "ABCDE") -> str | None:
    """Return the one letter that `text` chooses, in upper case, or None."""
    named, opening, second = _patterns(choices.upper())
    content = boxed(text)
    if content is None:
        matches = list(named.finditer(text))
        if matches:
            return None if second.match(text, matches[-1].end()) else matches[-1][1].upper()
    for part in [content] if content is not None else [text, (text.splitlines() or [""])[-1]]:
        match = opening.match(part)
        if match:
            return None if second.match(part, match.end()) else next(filter(None, match.groups())).upper()
    return None


@lru_cache
def _patterns(choices: str) -> list[re.Pattern[str]]:
    return [re.compile(p.format(choices, choices.lower())) for p in (_NAMED, _OPENING, _SECOND)]


@rewards.register("json_schema", independent=True, column_or_option=("schema", "default_schema"))
def json_schema(
    completions: list[Completion],
    schema: list[Any] | None = None,
    *,
    default_schema: dict[str, Any] | None = None,
    valid_json: float = 0.0,
    **_: object,
) -> list[float | None]:
    """1.0 for an answer that is JSON and fits the schema, `valid_json` for JSON that does not, 0.0 for anything else.

    The answer is the last ```json block, else as in `final_answer`. The schema is the row's (column `schema`, as JSON
    or a mapping), else `default_schema`; it cannot refer to other documents. None: no schema, or an invalid one.

    Raises:
        ValueError: valid_json outside [0, 1]. ImportError: jsonschema is not installed.
    """
    if not 0 <= valid_json <= 1:
        raise OptionError("valid_json", valid_json, "it is part of a score of 1", "Set it in [0, 1].")
    schemas = schema if schema is not None else [None] * len(completions)
    return [
        _fits(completion_text(completion), default_schema if own is None else own, valid_json)
        for completion, own in zip(completions, schemas, strict=True)
    ]


def _fits(text: str, schema: object, valid_json: float) -> float | None:
    check = None if schema is None else _validator(schema if isinstance(schema, str) else json.dumps(schema))
    if check is None:
        return None
    try:
        blocks = _JSON_BLOCK.findall(text.rpartition("</think>")[2])
        document = json.loads(blocks[-1] if blocks else final_answer(text), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    try:
        return 1.0 if check(document) else valid_json
    except Exception as error:  # a dangling reference, a pattern that is not a regular expression
        logger.warning("json_schema cannot apply %.200r: %r", schema, error)
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


@lru_cache(maxsize=256)
def _validator(schema_json: str) -> Callable[[Any], bool] | None:
    try:
        import jsonschema
        from referencing import Registry
    except ImportError as error:
        raise ImportError("reward 'json_schema' needs jsonschema: pip install 'grpo-ext[json]'.") from error
    try:
        schema = json.loads(schema_json)
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
    except (ValueError, TypeError, jsonschema.SchemaError) as error:
        logger.warning("json_schema: %.200r is not a JSON schema: %.300s", schema_json, error)
        return None
    is_valid: Callable[[Any], bool] = kind(schema, registry=Registry()).is_valid
    return is_valid
