"""Rewards to compare with: a lenient judge, which no layout can fail, and a control, which teaches no task."""

import hashlib
import re
from typing import Any

from grpo_ext.rewards.protocol import OptionError, rewards
from grpo_ext.rewards.text import Completion, completion_text

_NUMBER = re.compile(r"(?:(?<!\w)[-\u2212])?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?")
"""A number with its sign, which in 40-46 is none, and with commas between thousands."""


@rewards.register("last_number", independent=True)
def last_number(completions: list[Completion], solution: list[Any], **_: object) -> list[float | None]:
    """1.0 where the last number of a completion is the last one of `solution`, in any layout, else 0.0.

    A judge for evaluations beside a strict one: what the strict one gains more is layout. Do not train by it, since
    a completion may try several numbers. None: `solution` has no number.
    """
    golds = [None if gold is None else _last(str(gold)) for gold in solution]
    return [
        None if gold is None else float(_last(completion_text(completion)) == gold)
        for completion, gold in zip(completions, golds, strict=True)
    ]


def _last(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "").replace("\u2212", "-")) if numbers else None


@rewards.register("random", independent=True)
def random(
    completions: list[Completion], prompts: list[Any], *, rate: float = 0.5, salt: int = 0, **_: object
) -> list[float]:
    """1.0 for a share `rate` of all completions, by a hash of prompt, completion and `salt`, else 0.0.

    The control arm of an experiment: what a run gains by it, it does not gain by the reward. "Spurious Rewards",
    arXiv:2506.10947, and "Reasoning or Memorization?", arXiv:2507.10532, found gains by such rewards.

    Raises:
        ValueError: rate is not in 0..1.
    """
    if not 0 <= rate <= 1:
        raise OptionError("rate", rate, "not a share", "Set it between 0 and 1, to what the untrained model gets.")
    hashes = (
        hashlib.sha256(f"{salt}\0{prompt}\0{completion_text(completion)}".encode(errors="replace")).digest()
        for completion, prompt in zip(completions, prompts, strict=True)
    )
    return [float(int.from_bytes(digest[:8]) < rate * 2**64) for digest in hashes]
