"""The quickstart's task: three-digit addition, digit by digit, with a held-out set."""

import hashlib
import itertools
import random
import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from datasets import Dataset

_Split = Literal["train", "validation", "held_out"]

COMPLETION_FORMAT = re.compile(r"<think>\n.*\n</think>\n<answer>\n.*\n</answer>", re.DOTALL)
ANSWER = re.compile(r"<answer>\n(.*)\n</answer>", re.DOTALL)
DIGITS = 3
POOL_SIZE = 10_000
FORGETFULNESS = 0.6


def split_of(a: int, b: int) -> _Split:
    """Return the split of a + b: 80 % train, 10 % validation, 10 % held out.

    A hash of the unordered pair decides, so that b + a is in the same split, for every seed and size.
    """
    digest = hashlib.blake2b(f"{min(a, b)}+{max(a, b)}".encode(), digest_size=4).digest()
    bucket = int.from_bytes(digest, "big") % 10
    return "held_out" if bucket == 0 else "validation" if bucket == 1 else "train"


@cache
def addition_pairs(split: _Split) -> tuple[tuple[int, int], ...]:
    """Return the problems (a, b) of a split, from a fixed pool of 10,000, in a fixed random order."""
    draw = random.Random(0)
    low, high = 10 ** (DIGITS - 1), 10**DIGITS
    pool: dict[tuple[int, int], None] = {}
    while len(pool) < POOL_SIZE:
        pool[draw.randrange(low, high), draw.randrange(low, high)] = None
    return tuple(pair for pair in pool if split_of(*pair) == split)


def demonstration(a: int, b: int, *, forgets: Callable[[], bool] = lambda: False) -> str:
    """Return a completion for a + b: column addition, least digit first, in <think>, and its result in <answer>.

    A carry gets a line of its own: 47 + 58 is worked out as `7+8=15`, `4+5=9`, `9+1=10`. `forgets` is called at each
    carry; True drops it, which makes the result wrong.
    """
    lines, written, carry = [], "", 0
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y)
        lines.append(f"{x}+{y}={total}")
        if carry and not forgets():
            lines.append(f"{total}+1={total + 1}")
            total += 1
        written, carry = f"{total % 10}{written}", total // 10
    answer = f"{carry or ''}{written}"
    return "\n".join(["<think>", *lines, "</think>", "<answer>", answer, "</answer>"])


def careless_demonstration(a: int, b: int, draw: random.Random) -> str:
    """Return a well-formed demonstration in which each carry is forgotten with probability 0.6."""
    return demonstration(a, b, forgets=lambda: draw.random() < FORGETFULNESS)


def example(a: int, b: int) -> dict[str, Any]:
    """Return a dataset row: a conversational `prompt` and the `solution`."""
    return {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "solution": str(a + b)}


def demonstrations(seed: int, size: int) -> list[dict[str, Any]]:
    """Return `size` rows of prompt and completion; the train split is repeated if it is smaller."""
    draw = random.Random(seed)
    pairs = list(addition_pairs("train"))
    draw.shuffle(pairs)
    return [
        {
            "prompt": example(a, b)["prompt"],
            "completion": [{"role": "assistant", "content": careless_demonstration(a, b, draw)}],
        }
        for a, b in itertools.islice(itertools.cycle(pairs), size)
    ]


def load(
    *,
    size: int | None = None,
    eval_size: int | None = 400,
    eval_split: _Split = "held_out",
    seed: int = 0,
) -> tuple["Dataset", "Dataset"]:
    """Return disjoint train and evaluation problems (see `split_of`); `data.config` checks the options.

    Args:
        size: number of training problems; None for all (about 8,000).
        eval_size: number of evaluation problems; None for all (about 1,000). The choice ignores `seed`.
        eval_split: `held_out` to report a result, `validation` to choose settings.
        seed: selects and orders the training problems.
    """
    from datasets import Dataset

    train = list(addition_pairs("train"))
    random.Random(seed).shuffle(train)
    chosen = train[:size], addition_pairs(eval_split)[:eval_size]
    train_set, eval_set = (Dataset.from_list([example(a, b) for a, b in pairs]) for pairs in chosen)
    return train_set, eval_set
