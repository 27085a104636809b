"""An advantage of your own: the share of its group that a completion beats, minus the share that beats it.

Only the order of the rewards counts, so that one outlier cannot dwarf the rest of its group.

Run it:              python examples/custom_advantage.py [--max_steps 50]
Use it in a recipe:  advantage_estimator: examples.custom_advantage:wins
                     advantage_kwargs: {margin: 0.1}
"""

import sys

from torch import Tensor

from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.train import train


def wins(rewards: Tensor, *, margin: float = 0.0) -> Tensor:
    """(wins - losses) / (G - 1) for rewards [groups, completions]; NaN is a completion that could not be scored.

    A comparison with NaN is neither a win nor a loss; the caller sets the advantage of unscored completions to 0.
    """
    lead = rewards[:, :, None] - rewards[:, None, :]
    scorable = (~rewards.isnan()).sum(dim=-1, keepdim=True)
    balance = (lead > margin).sum(dim=-1) - (lead < -margin).sum(dim=-1)
    return balance.to(rewards.dtype) / (scorable - 1).clamp(min=1)


if __name__ == "__main__":
    own = ["--advantage_estimator", "custom_advantage:wins"]
    run = ["--max_steps", "5", "--save_strategy", "no", "--output_dir", "outputs/custom_advantage"]
    train(load_recipe(["--config", "quickstart/grpo", *own, *run, *sys.argv[1:]]))
