"""The quickstart's task: two-digit addition, worked out digit by digit, with a held-out set no training ever sees."""

import hashlib
import random
import re
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from datasets import Dataset

Split = Literal["train", "validation", "held_out"]

FORMAT = re.compile(r"<think>\n.*\n</think>\n<answer>\n.*\n</answer>", re.DOTALL)
ANSWER = re.compile(r"<answer>\n(.*)\n</answer>", re.DOTALL)
NUMBERS = range(10, 100)


def split_of(a: int, b: int) -> Split:
    """Split that a + b belongs to: 80 % train, 10 % validation, 10 % held out.

    A hash of the unordered pair decides, so b + a never sits on the other side of the fence and no seed or size can
    move a problem.
    """
    digest = hashlib.blake2b(f"{min(a, b)}+{max(a, b)}".encode(), digest_size=4).digest()
    bucket = int.from_bytes(digest, "big") % 10
    return "held_out" if bucket == 0 else "validation" if bucket == 1 else "train"


@cache
def problems(split: Split) -> tuple[tuple[int, int], ...]:
    """Every problem (a, b) of a split, in one fixed shuffled order."""
    found = [(a, b) for a in NUMBERS for b in NUMBERS if split_of(a, b) == split]
    random.Random(0).shuffle(found)
    return tuple(found)


def working(a: int, b: int) -> str:
    """Column addition, least digit first: 47 + 58 gives the lines `7+8=15` and `4+5+1=10`."""
    lines, carry = [], 0
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        lines.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    return "\n".join(lines)


def demonstration(a: int, b: int) -> str:
    """The right completion for a + b: the working in <think>, the sum in <answer>."""
    return f"<think>\n{working(a, b)}\n</think>\n<answer>\n{a + b}\n</answer>"


def example(a: int, b: int) -> dict[str, Any]:
    """One dataset row: a conversational `prompt` and the `solution`."""
    return {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "solution": str(a + b)}


def load(
    task: str = "addition",
    *,
    size: int | None = None,
    eval_size: int | None = 256,
    eval_split: Split = "held_out",
    seed: int = 0,
) -> tuple["Dataset", "Dataset"]:
    """Train and evaluation problems, disjoint by construction (see `split_of`).

    Args:
        task: `addition` is the only one.
        size: number of training problems; None takes all of them (about 6,500).
        eval_size: number of evaluation problems; None takes all of them (about 800). The choice ignores `seed`.
        eval_split: `held_out` to report a result, `validation` to choose settings.
        seed: which training problems are taken, and in which order.

    Raises:
        ValueError: another task, another evaluation split, or a size that the split cannot give.
    """
    from datasets import Dataset

    if task != "addition":
        raise ValueError(f"task={task!r}: the quickstart has one task. Use task='addition'.")
    if eval_split not in ("validation", "held_out"):
        raise ValueError(f"eval_split={eval_split!r}: use 'held_out' or, to choose settings, 'validation'.")
    train = list(problems("train"))
    random.Random(seed).shuffle(train)
    chosen = _take(train, size, "size"), _take(list(problems(eval_split)), eval_size, "eval_size")
    train_set, eval_set = (Dataset.from_list([example(a, b) for a, b in pairs]) for pairs in chosen)
    return train_set, eval_set


def _take(pairs: list[tuple[int, int]], size: int | None, name: str) -> list[tuple[int, int]]:
    """The first `size` pairs."""
    if size is not None and not 1 <= size <= len(pairs):
        raise ValueError(
            f"{name}={size}: there are {len(pairs)} problems to take from. Set 1 <= {name} <= {len(pairs)}."
        )
    return pairs[:size]
