"""Rewards under the names that Open-R1 gave them, by its formulas; and what its other names are here."""

import re

from grpo_ext.rewards.library.functions import repetition, soft_overlong, tags
from grpo_ext.rewards.protocol import rewards
from grpo_ext.rewards.text import Completion, completion_text

NOT_HERE = {
    "cosine": "Open-R1's counts characters. Write {name: cosine_length, kwargs: {max_length: ...}}, which counts "
    "tokens.",
    "length": "Kimi's compares the completions of a batch with one another. Write length_penalty, soft_overlong or "
    "cosine_length, which look at one.",
    "binary_code": "Write {name: code, kwargs: {partial: false}}; the tests are in the column tests.",
    "ioi_code": "It needs a judge of IOI tasks. Name a function of yours that asks one.",
    "cf_code": "It needs a judge of Codeforces tasks. Name a function of yours that asks one.",
}
"""Names of Open-R1's rewards that are none here, each with what to write."""


@rewards.register("tag_count", independent=True)
def tag_count(completions: list[Completion], **_: object) -> list[float]:
    r"""Open-R1's: 0.25 for each of `<think>\n`, `\n</think>\n`, `\n<answer>\n`, `\n</answer>` that occurs once."""
    return tags(completions, newlines=True)


@rewards.register("repetition_penalty", independent=True)
def repetition_penalty(
    completions: list[Completion], *, ngram_size: int = 3, max_penalty: float = -1.0, **_: object
) -> list[float]:
    """Open-R1's name of `repetition`, with its options.

    Raises:
        ValueError: as `repetition`.
    """
    return repetition(completions, n=ngram_size, max_penalty=max_penalty)


@rewards.register("soft_overlong_punishment", independent=True)
def soft_overlong_punishment(
    completion_ids: list[list[int]], *, max_completion_len: int = 16384, soft_punish_cache: int = 4096, **_: object
) -> list[float]:
    """Open-R1's name of `soft_overlong`, with its options and their defaults.

    Raises:
        ValueError: as `soft_overlong`.
    """
    return soft_overlong(completion_ids, max_length=max_completion_len, buffer=soft_punish_cache)


@rewards.register("code_format", independent=True)
def code_format(
    completions: list[Completion], language: list[str] | None = None, *, default_language: str = "python", **_: object
) -> list[float]:
    r"""Open-R1's: 1.0 for `<think>\n...\n</think>\n<answer>\n...\n</answer>` with a ```language block in the answer.

    The language is the row's (column `language`), else `default_language`. Text may follow on further lines.
    """
    languages = language if language is not None else [default_language] * len(completions)
    return [
        float(_code_layout(named or default_language).match(completion_text(completion)) is not None)
        for completion, named in zip(completions, languages, strict=True)
    ]


def _code_layout(language: str) -> re.Pattern[str]:
    answer = rf"<answer>\n.*?```{re.escape(language)}.*?```.*?\n</answer>$"
    return re.compile(rf"<think>\n.*?\n</think>\n{answer}", re.DOTALL | re.MULTILINE)
