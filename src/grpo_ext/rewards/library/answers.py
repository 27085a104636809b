"""Rewards for answers with one correct form: a string, a letter, a JSON document."""

import json
import logging
import math
import re
import unicodedata
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from grpo_ext.rewards.library.choices import choice
from grpo_ext.rewards.library.time_limit import time_limit
from grpo_ext.rewards.protocol import OptionError, rewards
from grpo_ext.rewards.text import Completion, answer_block, completion_text

logger = logging.getLogger(__name__)

_JSON_BLOCK = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
CHECK_SECONDS = 1.0
"""Limit of the processor's time in which a document is checked against its schema."""
_MOST_DECOMPOSED = 4  # characters into which one decomposes


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

    def normal(text: str, longest: float = math.inf) -> str:
        if ignore_case:
            text = text.casefold()
        if ignore_punctuation:
            text = "".join(c for c in text if not unicodedata.category(c).startswith("P"))
        if strip:
            text = " ".join(text.split())
        return unicodedata.normalize("NFC", text) if len(text) <= longest else ""  # it takes quadratic time

    golds = [None if gold is None else normal(str(gold)) for gold in solution]
    return [
        float(normal(final_answer(completion_text(completion)), _MOST_DECOMPOSED * len(gold)) == gold)
        if gold
        else None
        for completion, gold in zip(completions, golds, strict=True)
    ]


@rewards.register("multiple_choice", independent=True)
def multiple_choice(
    completions: list[Completion], solution: list[str | None], *, choices: str = "ABCDE", **_: object
) -> list[float | None]:
    r"""1.0 where the answer's letter is `solution`'s, else 0.0; None where `solution` is not a single letter.

    Details: `choices.choice`. A mark is read whole; several letters, a denial and no letter are wrong.

    Raises:
        ValueError: choices are not distinct letters.
    """
    if not choices.isalpha() or len(set(choices.upper())) != len(choices):
        raise OptionError("choices", choices, "not distinct letters", "Write them like ABCD.")
    golds = [choice(str(gold or ""), choices) for gold in solution]
    return [
        None if gold is None else float(choice(completion_text(completion), choices) == gold)
        for completion, gold in zip(completions, golds, strict=True)
    ]


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
    or a mapping), else `default_schema`; it cannot refer to other documents. A document that cannot be
    checked (too deep, a number beyond a float's range, `CHECK_SECONDS` passed) scores 0.0. None: no schema, or an
    invalid one.

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
        document = json.loads(
            blocks[-1] if blocks else final_answer(text), parse_constant=_number, parse_float=_number
        )
    except (ValueError, RecursionError):
        return 0.0
    try:
        with time_limit(CHECK_SECONDS):
            return 1.0 if check(document) else valid_json
    except (ArithmeticError, ValueError, RecursionError, TimeoutError):
        return 0.0
    except Exception as error:  # a dangling reference
        logger.warning("json_schema cannot apply %.200r: %r", schema, error)
        return None


def _number(text: str) -> float:
    """Return a number with a point or exponent, as an integer if it is one; NaN and what a float cannot hold raise."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a number")
    return int(number) if number.is_integer() else number


def _unique(validator: Any, wanted: bool, instance: Any, schema: object) -> Iterator[Exception]:
    """Check `uniqueItems` in linear time."""
    from jsonschema import ValidationError

    items = instance if wanted and validator.is_type(instance, "array") else []
    if len({json.dumps(item, sort_keys=True) for item in items}) < len(items):
        yield ValidationError("not unique")


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
        kind = jsonschema.validators.extend(kind, {"uniqueItems": _unique})
        is_valid: Callable[[Any], bool] = kind(schema, registry=Registry()).is_valid
        for probe in (None, [None], {"": None}):  # a reference to itself or to nothing
            is_valid(probe)
    except Exception as error:
        logger.warning("json_schema: %.200r is not a JSON schema: %.300s", schema_json, error)
        return None
    return is_valid
