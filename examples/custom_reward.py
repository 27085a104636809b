"""A reward of your own: the share of the answer's digits that are right, counted from the last.

Run it:              python examples/custom_reward.py [--max_steps 50]
Use it in a recipe:  reward_funcs:
                       - {name: accuracy, weight: 1.0}
                       - {name: digits, func: "examples.custom_reward:digits", weight: 0.5, kwargs: {tag: answer}}
"""

import re
import sys
from typing import Any

from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.rewards.text import completion_text
from grpo_ext.train import train


def digits(completions: list[Any], solution: list[str], *, tag: str = "answer", **_: Any) -> list[float | None]:
    """Return one float per completion; None without a solution to compare with, which is not a reward of 0.

    Columns of the dataset come before the star, options of the recipe after it; `**_` takes other columns of TRL.
    """
    return [_share_right(completion_text(c), gold, tag) for c, gold in zip(completions, solution, strict=True)]


def _share_right(text: str, gold: str, tag: str) -> float | None:
    if not gold:
        return None
    found = re.search(rf"<{tag}>\s*(\d+)\s*</{tag}>", text)
    pairs = zip(reversed(found[1]), reversed(gold), strict=False) if found else ()
    return sum(a == b for a, b in pairs) / max(len(gold), len(found[1]) if found else 0)


if __name__ == "__main__":
    own = ["--reward_funcs", "custom_reward:digits", "format", "--reward_weights", "1.0", "0.5"]
    run = ["--max_steps", "5", "--save_strategy", "no", "--output_dir", "outputs/custom_reward"]
    train(load_recipe(["--config", "quickstart/grpo", *own, *run, *sys.argv[1:]]))
