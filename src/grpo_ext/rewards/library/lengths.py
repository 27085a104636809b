"""Rewards for the length of a completion, in tokens, and for its writing system."""

import math
import re
import unicodedata
from functools import lru_cache
from typing import Any

from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.library.functions import accuracy
from grpo_ext.rewards.protocol import OptionError, rewards
from grpo_ext.rewards.text import Completion, completion_text

_LATIN = "en de fr es it pt nl sv da no fi pl cs sk hu ro hr sl et lv lt tr vi id ms sw ca eu gl"
# language -> the first words of the Unicode names of its letters
LANGUAGES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_LATIN.split(), ("LATIN",)),
    **dict.fromkeys(("ru", "uk", "bg", "be", "mk"), ("CYRILLIC",)),
    **dict.fromkeys(("ar", "fa", "ur"), ("ARABIC",)),
    **dict.fromkeys(("hi", "mr", "ne"), ("DEVANAGARI",)),
    "zh": ("CJK",),
    "ja": ("CJK", "HIRAGANA", "KATAKANA"),
    "ko": ("HANGUL",),
    "el": ("GREEK",),
    "he": ("HEBREW",),
    "th": ("THAI",),
    "bn": ("BENGALI",),
    "ta": ("TAMIL",),
    "te": ("TELUGU",),
    "ka": ("GEORGIAN",),
    "hy": ("ARMENIAN",),
}
# Text in no language: code, formulas (a single $ is money), commands, line breaks, tags, addresses. The pattern cannot
# backtrack far: a formula is given up where the next one opens, and \\( does not open one.
_NEUTRAL = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$[^$]*\$\$|\$[^$\n]*\$|\\\((?:[^\\]|\\[^()])*\\\)|\\\[(?:[^\\]|\\[^\[\]])*\\\]"
    r"|\\\\|\\[A-Za-z]+|</?(?:think|answer)>|https?://\S+",
    re.DOTALL,
)


@rewards.register("cosine_length", independent=True)
def cosine_length(
    completions: list[Completion],
    solution: list[str | None],
    completion_ids: list[list[int]],
    prompts: list[Any] | None = None,
    *,
    max_length: int,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    **_: object,
) -> list[float | None]:
    """v_long + (v_short - v_long) (1 + cos(pi min(n / max_length, 1))) / 2 over the number n of tokens.

    A correct answer scores max_value_correct when short and min_value_correct when long; a wrong one
    min_value_wrong when short and max_value_wrong when long. The reward `accuracy` decides what is correct; its
    None stays None. Otherwise this is TRL's `get_cosine_scaled_reward`, with TRL's defaults. "Demystifying Long
    Chain-of-Thought Reasoning", arXiv:2502.03373.

    Raises:
        ValueError: max_length < 1, or a minimum above its maximum.
    """
    if max_length < 1:
        raise OptionError("max_length", max_length, "the cosine needs a length to end at", "Set max_length >= 1.")
    for word, low, high in (
        ("correct", min_value_correct, max_value_correct),
        ("wrong", min_value_wrong, max_value_wrong),
    ):
        if low > high:
            beside = {f"max_value_{word}": high}
            raise OptionError(f"min_value_{word}", low, "the minimum is above the maximum", "Swap them.", **beside)
    ends = {1.0: (max_value_correct, min_value_correct), 0.0: (min_value_wrong, max_value_wrong)}
    return [
        None if correct is None else _cosine(*ends[correct], min(1.0, len(ids) / max_length))
        for correct, ids in zip(accuracy(completions, solution, prompts=prompts), completion_ids, strict=True)
    ]


def _cosine(short: float, long: float, progress: float) -> float:
    return long + 0.5 * (short - long) * (1 + math.cos(math.pi * progress))


@rewards.register("length_penalty", independent=True)
def length_penalty(
    completion_ids: list[list[int]], *, target: int, per_token: float = 0.001, max_penalty: float = -1.0, **_: object
) -> list[float]:
    """0 up to `target` tokens, then -per_token for each token more, down to max_penalty.

    Raises:
        ValueError: target < 0, per_token < 0 or max_penalty > 0.
    """
    if target < 0 or per_token < 0:
        raise OptionError("target", target, "neither can be negative", "Set both >= 0.", per_token=per_token)
    if max_penalty > 0:
        raise OptionError("max_penalty", max_penalty, "it would reward length", "Set max_penalty <= 0.")
    return [max(max_penalty, -per_token * max(0, len(ids) - target)) for ids in completion_ids]


@rewards.register("language_consistency", independent=True)
def language_consistency(
    completions: list[Completion], *, language: str = "en", scripts: list[str] | None = None, **_: object
) -> list[float]:
    r"""Share of the letters that belong to the writing system of `language`, or to one of `scripts`: 0 to 1.

    It compares scripts, not languages: German counts as English, Chinese as Japanese. `scripts` are first words of
    Unicode names: LATIN, CJK, CYRILLIC, ... Not counted: code blocks, inline code, $...$, \(...\),
    \[...\], LaTeX commands, tags, links. 0: no letter is left. After DeepSeek-R1's reward, arXiv:2501.12948,
    which counts words.

    Raises:
        ValueError: unknown language, or no scripts.
    """
    if scripts is None and language not in LANGUAGES:
        raise OptionError("language", language, "its script is unknown", did_you_mean(str(language), LANGUAGES))
    if scripts is not None and not scripts:
        raise OptionError("scripts", [], "no letter would count", "Name one, such as LATIN, or remove scripts.")
    wanted = set(LANGUAGES[language] if scripts is None else map(str.upper, scripts))
    return [_share(_NEUTRAL.sub(" ", completion_text(c)), wanted) for c in completions]


def _share(text: str, wanted: set[str]) -> float:
    letters = [script(character) for character in text if character.isalpha()]
    return sum(s in wanted for s in letters) / max(1, len(letters))


@lru_cache(maxsize=1 << 16)
def script(character: str) -> str:
    """Return the first word of a character's Unicode name, without its width: LATIN, CJK, HIRAGANA, ..., or ""."""
    name = unicodedata.name(character, "").removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ")
    word = re.split(r"[ -]", name, maxsplit=1)[0]
    return "CJK" if word == "IDEOGRAPHIC" else word
